"""`Admission`: what a server must show before it gets a request: that it samples from our model, and which weights."""

from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.engine.sglang.client import Client, ServerError
from agentrl.engine.sglang.identity import (
    Probe,
    ServerFacts,
    check_kind,
    check_tokenizer,
    check_vocabulary,
    difference,
    facts_of,
    other_weights,
    probe_of,
)
from agentrl.errors import UserError

SAMPLE_SECONDS = 60.0


class Admission:
    """send: gives one server our weights under a version. say: is told in a line when that was needed."""

    def __init__(
        self, model: Any, tokenizer: Any, send: Callable[[Client, int], Awaitable[None]], say: Callable[[str], None]
    ) -> None:
        self._model, self._tokenizer, self._send, self._say = model, tokenizer, send, say
        self._probe: Probe | None = None

    async def first(self, client: Client, version: int) -> ServerFacts:
        """At the start of a run, with our weights at `version`. Raises UserError or ServerError: one line."""
        facts = await facts_of(client)
        await check_kind(client, self._model.config)
        await check_vocabulary(client, self._model.get_input_embeddings().weight.shape[0])
        if facts.has_tokenizer and self._tokenizer is not None:
            await check_tokenizer(client, self._tokenizer)
        self._probe = self._probe or probe_of(self._model)
        gap = await difference(client, self._probe)
        if gap > self._probe.tolerance:
            self._say(f"{other_weights(client, gap, self._probe)}: it is given ours")
            await self._send(client, version)
            gap = await difference(client, self._probe)
            if gap > self._probe.tolerance:
                raise UserError(f"engine: {other_weights(client, gap, self._probe)}, also after it was given ours")
        elif facts.weight_version != str(version):
            await client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        return facts

    async def again(self, client: Client, version: int) -> ServerFacts:
        """After it was out: it must still be of our model, hold the weights of `version` or take them, and sample."""
        facts = await facts_of(client)
        await check_kind(client, self._model.config)
        await check_vocabulary(client, self._model.get_input_embeddings().weight.shape[0])
        if facts.weight_version != str(version):
            await self._send(client, version)
        await sample_one(client)
        return facts


async def sample_one(client: Client) -> None:
    """Raises ServerError unless it samples a token."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    answer = await client.post("/generate", body, timeout=SAMPLE_SECONDS)
    if not isinstance(answer, dict) or not answer.get("output_ids"):
        raise ServerError(f"{client.url}: asked for one token, it gave none")
