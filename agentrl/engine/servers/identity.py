"""What a server tells about itself, and what is compared with our model, whatever kind it is."""

from dataclasses import dataclass
from typing import Any

from agentrl.engine.servers.adapters import AdapterRoom
from agentrl.engine.servers.answer import Features
from agentrl.engine.servers.client import Client
from agentrl.errors import UserError

PROBE_TOKENS = 24
PROBE_TEXT = 'Hello, Wörld! 3 + 4.5 = 7.5\n\t{"name": [1, 2]} 漢字 '
TOLERANCE = {"float32": 1e-3}
"""Largest mean difference between log-probs, in nats; other dtypes round more."""
LOOSE_TOLERANCE = 0.1
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_local_experts", "moe_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server tells about itself ."""

    version: str
    """Of the product."""
    features: Features
    """What it can do."""
    max_context: int
    """Tokens of prompt and answer together that it takes."""
    weight_version: str
    """Of the weights that it holds."""
    has_tokenizer: bool
    """Whether it was started with a tokenizer."""
    adapters: AdapterRoom
    """The adapters that it takes."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and what our model gives it."""

    ids: tuple[int, ...]
    """Token ids of the prompt."""
    logprobs: tuple[float, ...]
    """Log-probs of ids[1:], natural log."""
    tolerance: float
    """Largest mean difference from a server's log-probs, in nats."""


def other_tokenizer(client: Client, tokenizer: Any, theirs: list[int] | None) -> None:
    """Raise UserError where `theirs`, a server's ids of PROBE_TEXT, are not ours. None: it tells none."""
    ours = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if theirs not in (None, ours):
        raise UserError(
            f"engine: the tokenizer of {client.url} is not that of model.path: for one text it gives "
            f"{len(theirs or ())} ids that begin {(theirs or [])[:6]}, ours gives {len(ours)}, {ours[:6]}"
        )


def probe_of(model: Any) -> Probe:
    """Return a prompt spread over the vocabulary, and what `model` (a transformers causal LM) gives it."""
    import torch

    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [(7 + 104_729 * i) % vocabulary for i in range(PROBE_TOKENS)]
    device = model.get_input_embeddings().weight.device
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:], device=device)[:, None])[:, 0]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Probe(tuple(ids), tuple(chosen.tolist()), TOLERANCE.get(dtype, LOOSE_TOLERANCE))


def other_weights(client: Client, gap: float, probe: Probe) -> str:
    """Return the line for a server whose log-probs differ from ours."""
    return (
        f"{client.url} samples from other weights than model.path: the log-probs of {len(probe.ids)} tokens differ by "
        f"{gap:.3g} nats in the mean, and {probe.tolerance:g} is allowed"
    )


def other_model(client: Client, info: dict[str, Any], theirs: str, ours: str) -> str:
    served = info.get("served_model_name") or info.get("model_path")
    return f"engine: {client.url} serves another model: {served} has {theirs}, model.path has {ours}"


def config_at(path: str) -> Any:
    """Return the configuration of a model that is on this machine, or None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
