"""Checks that a server samples from our model: its kind, sizes, vocabulary and tokenizer, and the log-probs of a short
prompt."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from agentrl.engine.sglang.adapters import AdapterRoom
from agentrl.engine.sglang.client import Client, RefusedError, ServerError
from agentrl.engine.sglang.wire import Features
from agentrl.errors import UserError
from agentrl.threads import in_thread

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
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server tells about itself (/model_info and /server_info)."""

    version: str
    """Of SGLang."""
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
        """Return it for a server that computes in `dtype`."""
        exact = dtype in ("", EXACT)
        return self if exact else replace(self, tolerance=LOOSE_TOLERANCE, limit=LOOSE_LIMIT)


async def facts_of(client: Client) -> ServerFacts:
    """Ask a server about itself. Raises ServerError where it does not answer, UserError where it is no SGLang
    server."""
    try:
        model, server = await client.get("/model_info"), await client.get("/server_info")
    except RefusedError as error:
        raise UserError(f"engine: {client.url} does not speak SGLang's API: {error}") from error
    if not isinstance(model, dict) or not isinstance(server, dict) or "max_req_input_len" not in server:
        raise UserError(f"engine: {client.url} answers, but not as an SGLang server does (no max_req_input_len)")
    if not model.get("is_generation", True):
        raise UserError(f"engine: {client.url} serves {model.get('model_path')}, which does not generate")
    return ServerFacts(
        version=str(server.get("version", "?")),
        features=Features(
            seeds=bool(server.get("enable_deterministic_inference")),
            incremental=bool(server.get("incremental_streaming_output")),
        ),
        max_context=int(server["max_req_input_len"]),
        weight_version=str(model.get("weight_version")),
        has_tokenizer=not server.get("skip_tokenizer_init"),
        adapters=AdapterRoom.of(server),
        dtype=str(server.get("dtype") or ""),
    )


async def check_kind(client: Client, config: Any) -> None:
    """Raise UserError where its architecture is not that of `config`, a transformers configuration."""
    info = await client.get("/model_info")
    theirs = info.get("architectures") or []
    ours = getattr(config, "architectures", None) or []
    if theirs and ours and set(theirs).isdisjoint(ours):
        raise UserError(_other_model(client, info, f"a {theirs[0]}", f"a {ours[0]}"))


async def check_vocabulary(client: Client, size: int, timeout: float = FIRST_SECONDS) -> None:
    """Raise UserError where its vocabulary is not exactly the ids 0 to `size` - 1.

    Asks for log-probs of given ids, which the server checks: an id out of range in a prompt would crash it.
    """
    info = await client.get("/model_info")
    if not await _knows(client, size - 1, timeout):
        raise UserError(_other_model(client, info, "a smaller vocabulary", f"{size} ids"))
    if await _knows(client, size, timeout):
        raise UserError(_other_model(client, info, "a larger vocabulary", f"{size} ids"))


async def check_tokenizer(client: Client, tokenizer: Any) -> None:
    """Raise UserError where its tokenizer gives other ids for a text than ours."""
    ours = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    try:
        found = await client.post("/v1/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False})
    except RefusedError:
        return  # an older server has no such endpoint; the log-probs are compared in any case
    if isinstance(found, dict) and found.get("tokens") not in (None, ours):
        raise UserError(
            f"engine: the tokenizer of {client.url} is not that of model.path: for one text it gives "
            f"{len(found['tokens'])} ids that begin {found['tokens'][:6]}, ours gives {len(ours)}, {ours[:6]}"
        )


async def difference(client: Client, probe: Probe, adapter: str | None = None, timeout: float = FIRST_SECONDS) -> float:
    """Return the mean absolute difference between its log-probs of the probe's ids and ours, in nats. adapter: name of
    one that the server holds. timeout: seconds to answer."""
    body = {
        "input_ids": list(probe.ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    named = body if adapter is None else {**body, "lora_path": adapter}
    answer = await client.post("/generate", named, timeout=timeout)
    try:
        theirs = [pair[0] for pair in answer["meta_info"]["input_token_logprobs"]][-len(probe.logprobs) :]
        gaps = [abs(a - b) for a, b in zip(theirs, probe.logprobs, strict=True)]
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise UserError(f"engine: {client.url} returns no log-probs of a prompt: {answer!r:.200}") from error
    return sum(gaps) / len(gaps) if all(map(math.isfinite, gaps)) else math.inf


def probe_of(model: Any, tokenizer: Any = None) -> Probe:
    """Return a prompt that `model` (a transformers causal LM) sampled, after the opening or, without a tokenizer, ids
    spread over the vocabulary; and what it gives it."""
    import torch

    embedding = model.get_input_embeddings().weight
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
    """Return the line for a server whose log-probs differ from ours. limit: what is allowed, else the tolerance."""
    return (
        f"{client.url} samples from other weights than model.path: the log-probs of {len(probe.logprobs)} tokens "
        f"differ by {gap:.3g} nats in the mean, and {probe.tolerance if limit is None else limit:g} is allowed"
    )


def _other_model(client: Client, info: dict[str, Any], theirs: str, ours: str) -> str:
    served = info.get("served_model_name") or info.get("model_path")
    return f"engine: {client.url} serves another model: {served} has {theirs}, model.path has {ours}"


async def _knows(client: Client, token: int, timeout: float) -> bool:
    body = {
        "input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True,
        "token_ids_logprob": [token],
    }  # fmt: skip
    try:
        await client.post("/generate", body, timeout=timeout)
    except RefusedError:
        return False
    return True


async def check_sizes(client: Client, config: Any) -> None:
    """Raise UserError where the server's model has other sizes than `config`, a transformers configuration.

    A tensor of another shape ends the server's scheduler, so this is checked before the first is sent. A server tells
    where it loaded the model from, not its sizes: they are read from that folder, where it is on this machine, or from
    the local copy of a hub's model. Where neither is there, the number of layers is compared by their names.
    """
    info = await client.get("/model_info")
    theirs = await in_thread(_config_at, str(info.get("model_path")))
    ours = config.get_text_config()
    if theirs is None:
        await _check_layers(client, info, ours.num_hidden_layers)
        return
    for name in SIZES:
        own, other = getattr(ours, name, None), getattr(theirs.get_text_config(), name, None)
        if own is not None and other is not None and own != other:
            raise UserError(_other_model(client, info, f"{name} {other}", str(own)))


def _config_at(path: str) -> Any:
    """Return the configuration of a model that is on this machine, or None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None


async def _check_layers(client: Client, info: dict[str, Any], ours: int) -> None:
    try:
        found = await client.post("/weights_checker", {"action": "checksum"})
        names = [name for rank in found["ranks"] for name in rank["checksums"]]
    except (ServerError, TypeError, KeyError):
        return  # an older server has no such endpoint
    layers = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if layers and max(layers) + 1 != ours:
        raise UserError(_other_model(client, info, f"{max(layers) + 1} layers", str(ours)))
