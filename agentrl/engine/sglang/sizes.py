"""Whether a server's model has the sizes of ours. A tensor of another shape ends its scheduler, and with it the server,
so this is found out before the first is sent.

A server tells its architecture and where it loaded the model from, not its sizes: they are read from that folder, where
it is on this machine, or from the local copy of a hub's model. Where neither is there, the layers that it has are
compared by their names, and the rest stays unknown.
"""

import re
from typing import Any

from agentrl.engine.sglang.client import Client, ServerError
from agentrl.errors import UserError
from agentrl.threads import in_thread

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_local_experts", "moe_intermediate_size",
)  # fmt: skip
_LAYER = re.compile(r"\blayers\.(\d+)\.")


async def check_sizes(client: Client, config: Any) -> None:
    """Raises UserError where they are not those of `config`, a transformers configuration."""
    info = await client.get("/model_info")
    path = str(info.get("model_path"))
    theirs = await in_thread(_config_at, path)
    ours = config.get_text_config()
    if theirs is None:
        await _check_layers(client, path, ours.num_hidden_layers)
        return
    for name in SIZES:
        own, other = getattr(ours, name, None), getattr(theirs.get_text_config(), name, None)
        if own is not None and other is not None and own != other:
            raise _differs(client, path, f"{name} {other}", str(own))


def _config_at(path: str) -> Any:
    """The configuration of a model that is on this machine, or None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None


async def _check_layers(client: Client, path: str, ours: int) -> None:
    try:
        found = await client.post("/weights_checker", {"action": "checksum"})
        names = [name for rank in found["ranks"] for name in rank["checksums"]]
    except (ServerError, TypeError, KeyError):
        return  # an older server does not tell
    layers = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if layers and max(layers) + 1 != ours:
        raise _differs(client, path, f"{max(layers) + 1} layers", str(ours))


def _differs(client: Client, path: str, theirs: str, ours: str) -> UserError:
    return UserError(f"engine: {client.url} serves another model: {path} has {theirs}, model.path has {ours}")
