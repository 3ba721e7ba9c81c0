"""Checks that a server samples from our model: its kind, sizes, vocabulary and tokenizer, and the log-probs of a short
prompt."""

import re
from typing import TYPE_CHECKING

from agentrl.containment.threads import in_thread
from agentrl.engine.servers.adapters import AdapterRoom
from agentrl.engine.servers.answer import Features
from agentrl.engine.servers.client import Client, RefusedError, ServerError
from agentrl.engine.servers.identity import (
    PROBE_TEXT,
    ServerFacts,
    check_architecture,
    check_sizes,
    check_vocabulary,
    config_at,
    other_model,
    other_tokenizer,
)
from agentrl.engine.sglang.command import SIGHT
from agentrl.errors import UserError
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TOGETHER = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj"))
"""SGLang computes these as parts of one layer, and ends where an adapter has not both."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


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
        adapters=AdapterRoom(
            bool(server.get("enable_lora")),
            server.get("max_lora_rank"),
            frozenset(server.get("lora_target_modules") or ()),
            int(server.get("dp_size") or 1),
            together=TOGETHER,
        ),
        dtype=str(server.get("dtype") or ""),
    )


async def check_model(client: Client, config: "PretrainedConfig", vocabulary: int, timeout: float) -> None:
    """See `ServerKind.check_model`. A server tells where it loaded the model from, not its sizes: they are read from
    that folder, where it is on this machine, or from the local copy of a hub's model. Where neither is there, the
    number of layers is compared by their names."""
    info = await client.get("/model_info")
    check_architecture(client, info, info.get("architectures") or [], config)
    await check_vocabulary(client, info, vocabulary, lambda token: _knows(client, token, timeout))
    theirs = await in_thread(config_at, str(info.get("model_path")))
    if theirs is None:
        await _check_layers(client, info, config.get_text_config().num_hidden_layers)
    else:
        check_sizes(client, info, theirs, config)
    if getattr(config, "image_token_id", None) is not None:
        await check_sight(client)


async def check_sight(client: Client) -> None:
    """Raise UserError where it would compute something else of an image than the trainer does."""
    told = await client.get("/server_info")
    for flag, wanted in SIGHT.items():
        found = told.get(flag.replace("-", "_"))
        if not found if isinstance(wanted, int) else found != wanted:
            said = f"--{flag}" if wanted is True else f"--{flag} {wanted}"
            raise UserError(f"engine: {client.url} sees images otherwise than the trainer: start it with {said}")


async def check_tokenizer(client: Client, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise UserError where its tokenizer gives other ids for a text than ours."""
    try:
        found = await client.post("/v1/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False})
    except RefusedError:
        return  # an older server has no such endpoint; the log-probs are compared in any case
    other_tokenizer(client, tokenizer, found.get("tokens") if isinstance(found, dict) else None)


async def _knows(client: Client, token: int, timeout: float) -> bool:
    """Ask for log-probs of a given id, which the server checks: one out of range in a prompt would crash it."""
    body = {
        "input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True,
        "token_ids_logprob": [token],
    }  # fmt: skip
    try:
        await client.post("/generate", body, timeout=timeout)
    except RefusedError:
        return False
    return True


async def _check_layers(client: Client, info: dict[str, Json], ours: int) -> None:
    try:
        found = await client.post("/weights_checker", {"action": "checksum"})
        names = [name for rank in found["ranks"] for name in rank["checksums"]]
    except (ServerError, TypeError, KeyError):
        return  # an older server has no such endpoint
    layers = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if layers and max(layers) + 1 != ours:
        raise UserError(other_model(client, info, f"{max(layers) + 1} layers", str(ours)))
