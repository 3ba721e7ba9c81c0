"""Checks that a server samples from our model: its kind, sizes, vocabulary and tokenizer, and the log-probs of a short
prompt."""

import re
from dataclasses import dataclass
from typing import Any

from agentrl.engine.servers.adapters import AdapterRoom
from agentrl.engine.servers.client import Client, RefusedError, ServerError
from agentrl.engine.sglang.wire import Features
from agentrl.errors import UserError
from agentrl.threads import in_thread

PROBE_TOKENS = 24
PROBE_TEXT = 'Hello, Wörld! 3 + 4.5 = 7.5\n\t{"name": [1, 2]} 漢字 '
TOLERANCE = {"float32": 1e-3}
"""Largest mean difference between log-probs, in nats; other dtypes round more."""
LOOSE_TOLERANCE = 0.1
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


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt, and what our model gives it."""

    ids: tuple[int, ...]
    """Token ids of the prompt."""
    logprobs: tuple[float, ...]
    """Log-probs of ids[1:], natural log."""
    tolerance: float
    """Largest mean difference from a server's log-probs, in nats."""


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
    )


async def check_kind(client: Client, config: Any) -> None:
    """Raise UserError where its architecture is not that of `config`, a transformers configuration."""
    info = await client.get("/model_info")
    theirs = info.get("architectures") or []
    ours = getattr(config, "architectures", None) or []
    if theirs and ours and set(theirs).isdisjoint(ours):
        raise UserError(other_model(client, info, f"a {theirs[0]}", f"a {ours[0]}"))


async def check_vocabulary(client: Client, size: int) -> None:
    """Raise UserError where its vocabulary is not exactly the ids 0 to `size` - 1.

    Asks for log-probs of given ids, which the server checks: an id out of range in a prompt would crash it.
    """
    info = await client.get("/model_info")
    if not await _knows(client, size - 1):
        raise UserError(other_model(client, info, "a smaller vocabulary", f"{size} ids"))
    if await _knows(client, size):
        raise UserError(other_model(client, info, "a larger vocabulary", f"{size} ids"))


async def check_tokenizer(client: Client, tokenizer: Any) -> None:
    """Raise UserError where its tokenizer gives other ids for a text than ours."""
    try:
        found = await client.post("/v1/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False})
    except RefusedError:
        return  # an older server has no such endpoint; the log-probs are compared in any case
    other_tokenizer(client, tokenizer, found.get("tokens") if isinstance(found, dict) else None)


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


async def _knows(client: Client, token: int) -> bool:
    body = {
        "input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True,
        "token_ids_logprob": [token],
    }  # fmt: skip
    try:
        await client.post("/generate", body)
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
    theirs = await in_thread(config_at, str(info.get("model_path")))
    ours = config.get_text_config()
    if theirs is None:
        await _check_layers(client, info, ours.num_hidden_layers)
        return
    for name in SIZES:
        own, other = getattr(ours, name, None), getattr(theirs.get_text_config(), name, None)
        if own is not None and other is not None and own != other:
            raise UserError(other_model(client, info, f"{name} {other}", str(own)))


def config_at(path: str) -> Any:
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
        raise UserError(other_model(client, info, f"{max(layers) + 1} layers", str(ours)))
