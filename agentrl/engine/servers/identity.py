"""What a server tells about itself, and what is compared with our model, whatever kind it is."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentrl.engine.servers.adapters import AdapterRoom
from agentrl.engine.servers.answer import Features
from agentrl.engine.servers.client import Client
from agentrl.errors import UserError
from agentrl.models.load import embeddings
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FIRST_SECONDS = 60.0
"""Time for a server to answer a request, where nothing else is said; the first one may have to compile kernels."""
PROBE_TOKENS = 24
PROBE_TEXT = 'Hello, Wörld! 3 + 4.5 = 7.5\n\t{"name": [1, 2]} 漢字 '
OPENING = "Once upon a time there was a little girl who lived"
OPENING_TOKENS = 8
"""Tokens of the opening, after which the model goes on by itself: two exact computations in bfloat16 differ most where
a token is unlikely, so those are compared that it sampled."""
EXACT = "float32"
TOLERANCE, LIMIT = 1e-3, 1e-3
"""Mean difference between log-probs, in nats, from which on a server is given our weights, and with which it is refused
once it has them, where both sides compute in float32."""
LOOSE_TOLERANCE, LOOSE_LIMIT = 0.1, 0.5
"""The same in other types, which round logits of 16 to 32 by up to 0.06; other weights differ by more than 1."""
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_local_experts", "moe_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server tells about itself."""

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
    dtype: str = ""
    """Of its weights, such as `bfloat16`, or `auto`; empty: it does not tell."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and what our model gives it."""

    ids: tuple[int, ...]
    """Token ids of the prompt."""
    logprobs: tuple[float, ...]
    """Log-probs of the last ids, natural log: those that are compared."""
    tolerance: float
    """Mean difference from a server's log-probs up to which it surely has our weights, in nats."""
    limit: float
    """The same, up to which it may have them, and rounds otherwise."""

    def on(self, dtype: str) -> "Probe":
        """It for a server that computes in `dtype`."""
        exact = dtype in ("", EXACT)
        return self if exact else replace(self, tolerance=LOOSE_TOLERANCE, limit=LOOSE_LIMIT)


def other_tokenizer(client: Client, tokenizer: "PreTrainedTokenizerBase", theirs: list[int] | None) -> None:
    """Raise UserError where `theirs`, a server's ids of PROBE_TEXT, are not ours. None: it tells none."""
    ours = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if theirs not in (None, ours):
        raise UserError(
            f"engine: the tokenizer of {client.url} is not that of model.path: for one text it gives "
            f"{len(theirs or ())} ids that begin {(theirs or [])[:6]}, ours gives {len(ours)}, {ours[:6]}"
        )


def probe_of(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> Probe:
    """A prompt that `model` (a transformers causal LM) sampled, after the opening or, without a tokenizer, ids
    spread over the vocabulary; and what it gives it."""
    import torch

    embedding = embeddings(model)
    ids = [(7 + 104_729 * i) % embedding.shape[0] for i in range(OPENING_TOKENS)]
    if tokenizer is not None:
        words = list(tokenizer.encode(OPENING, add_special_tokens=False))[:OPENING_TOKENS]
        ids = words if words and max(words) < embedding.shape[0] else ids
    start, chance = len(ids), torch.Generator().manual_seed(0)

    def logprobs() -> Any:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device=embedding.device), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1)

    while len(ids) < PROBE_TOKENS:
        ids.append(int(torch.multinomial(logprobs()[-1].exp().cpu(), 1, generator=chance)))
    chosen = logprobs()[start - 1 : -1].cpu().gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
    exact = next(model.parameters()).dtype == torch.float32
    limits = (TOLERANCE, LIMIT) if exact else (LOOSE_TOLERANCE, LOOSE_LIMIT)
    return Probe(tuple(ids), tuple(chosen.tolist()), *limits)


def other_weights(client: Client, gap: float, probe: Probe, limit: float | None = None) -> str:
    """The line for a server whose log-probs differ from ours. limit: what is allowed, else the tolerance."""
    return (
        f"{client.url} samples from other weights than model.path: the log-probs of {len(probe.logprobs)} tokens "
        f"differ by {gap:.3g} nats in the mean, and {probe.tolerance if limit is None else limit:g} is allowed"
    )


def other_model(client: Client, info: dict[str, Json], theirs: str, ours: str) -> str:
    """The line that refuses a server. info: its own facts. theirs, ours: what it and model.path have."""
    served = info.get("served_model_name") or info.get("model_path")
    return f"engine: {client.url} serves another model: {served} has {theirs}, model.path has {ours}"


def check_architecture(
    client: Client, info: dict[str, Json], theirs: Sequence[str], config: "PretrainedConfig"
) -> None:
    """Raise UserError where none of the architectures of a server is one of `config`, a transformers configuration."""
    ours = getattr(config, "architectures", None) or []
    if theirs and ours and set(theirs).isdisjoint(ours):
        raise UserError(other_model(client, info, f"a {theirs[0]}", f"a {ours[0]}"))


async def check_vocabulary(
    client: Client, info: dict[str, Json], size: int, knows: Callable[[int], Awaitable[bool]]
) -> None:
    """Raise UserError where a server's vocabulary is not exactly the ids 0 to `size` - 1. knows: asks it about one."""
    if not await knows(size - 1):
        raise UserError(other_model(client, info, "a smaller vocabulary", f"{size} ids"))
    if await knows(size):
        raise UserError(other_model(client, info, "a larger vocabulary", f"{size} ids"))


def check_sizes(client: Client, info: dict[str, Json], theirs: Any, config: "PretrainedConfig") -> None:
    """Raise UserError where a server's model has other sizes than ours: a tensor of another shape ends its
    scheduler. theirs, config: transformers configurations."""
    for name in SIZES:
        own, other = getattr(config.get_text_config(), name, None), getattr(theirs.get_text_config(), name, None)
        if own is not None and other is not None and own != other:
            raise UserError(other_model(client, info, f"{name} {other}", str(own)))


def config_at(path: str) -> Any:
    """The configuration of a model that is on this machine, or None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
