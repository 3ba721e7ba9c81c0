"""`VllmEngine`: the engine over vLLM servers."""

from agentrl.engine.sglang.engine import ServerEngine
from agentrl.engine.vllm.kind import VllmKind


class VllmEngine(ServerEngine):
    """See `ServerEngine`. It samples with top-p and top-k only at temperature 0: the server's log-probs are those after
    them."""

    kind = VllmKind()
