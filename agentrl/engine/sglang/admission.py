"""`Admission`: checks before a server gets a request, that it samples from our model and which weights it holds."""

from collections.abc import Callable
from typing import Any

from agentrl.engine.sglang.client import Client, ServerError
from agentrl.engine.sglang.identity import (
    FIRST_SECONDS,
    Probe,
    ServerFacts,
    check_kind,
    check_sizes,
    check_tokenizer,
    check_vocabulary,
    difference,
    facts_of,
    other_weights,
    probe_of,
)
from agentrl.engine.sglang.sync import Sync
from agentrl.errors import UserError
from agentrl.models.lora import switched_off

BASE_VERSION = "0"
"""Version of the weights that adapters belong to."""


class Admission:
    """sync: sends a server our weights under a version. say: called with a line when that was needed. patience: seconds
    that a server may take for a request: for its first one it compiles kernels."""

    def __init__(
        self, model: Any, tokenizer: Any, sync: Sync, say: Callable[[str], None], patience: float = FIRST_SECONDS
    ) -> None:
        self._model, self._tokenizer, self._sync, self._say = model, tokenizer, sync, say
        self._patience = patience
        self._probe: Probe | None = None  # of the weights that servers hold themselves

    async def identify(self, client: Client) -> ServerFacts:
        """Return what a server tells about itself. Raises UserError where it serves another model, ServerError where it
        does not answer: one line."""
        facts = await facts_of(client)
        await check_kind(client, self._model.config)
        await check_vocabulary(client, self._model.get_input_embeddings().weight.shape[0], self._patience)
        await check_sizes(client, self._model.config)
        return facts

    async def first(self, client: Client, facts: ServerFacts, version: int) -> None:
        """Admit a server at the start of a run, with our weights at `version`. Raises UserError or ServerError: one
        line.

        Where the weights are in other processes nothing is compared: servers wait for them anyway.
        """
        if facts.has_tokenizer and self._tokenizer is not None:
            await check_tokenizer(client, self._tokenizer)
        if self._sync.apart:
            return
        adapted = self._sync.adapted
        if self._probe is None:
            self._probe = self._of_the_base() if adapted else probe_of(self._model, self._tokenizer)
        sent = await self._same(client, self._probe.on(facts.dtype), version)
        if adapted:
            await self._sync.send_to(client, version)
            await self._check_adapter(client, facts)
        elif not sent and facts.weight_version != str(version):
            await client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def again(self, client: Client, version: int) -> ServerFacts:
        """Admit a server that was out: it must still be of our model, hold the weights of `version` or take them, and
        sample."""
        facts = await self.identify(client)
        if self._sync.adapted:
            await self._base_again(client, facts)
            await self._sync.send_to(client, version)
        elif facts.weight_version != str(version):
            await self._sync.send_to(client, version)
        await sample_one(client, self._adapter_at(client), self._patience)
        return facts

    async def _same(self, client: Client, probe: Probe, version: int) -> bool:
        """Make sure that it holds the weights of the probe, and return whether it had to be sent them."""
        gap = await difference(client, probe, timeout=self._patience)
        if gap <= probe.tolerance:
            return False
        self._say(f"{other_weights(client, gap, probe)}: it is given ours")
        await (self._sync.send_base(client) if self._sync.adapted else self._sync.send_to(client, version))
        gap = await difference(client, probe, timeout=self._patience)
        if gap > probe.limit:
            said = other_weights(client, gap, probe, probe.limit)
            raise UserError(f"engine: {said}, also after it was given ours")
        return True

    async def _base_again(self, client: Client, facts: ServerFacts) -> None:
        """Make sure that it holds the base: one that others restarted may hold anything; those we launch load
        model.path."""
        if self._probe is not None:
            await self._same(client, self._probe.on(facts.dtype), 0)
        elif facts.weight_version != BASE_VERSION:
            await self._sync.send_base(client)

    async def _check_adapter(self, client: Client, facts: ServerFacts) -> None:
        probe = probe_of(self._model, self._tokenizer).on(facts.dtype)
        gap = await difference(client, probe, self._adapter_at(client), self._patience)
        if gap > probe.limit:
            raise UserError(f"engine: with the adapter {other_weights(client, gap, probe, probe.limit)}")

    def _adapter_at(self, client: Client) -> str | None:
        found = self._sync.adapter_of(client.url)
        return found[0] if found is not None else None

    def _of_the_base(self) -> Probe:
        with switched_off(self._model):
            return probe_of(self._model, self._tokenizer)


async def sample_one(client: Client, adapter: str | None = None, timeout: float = FIRST_SECONDS) -> None:
    """Raise ServerError unless it samples a token."""
    body: dict[str, Any] = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    if adapter is not None:
        body["lora_path"] = adapter
    answer = await client.post("/generate", body, timeout=timeout)
    if not isinstance(answer, dict) or not answer.get("output_ids"):
        raise ServerError(f"{client.url}: it returned no token when asked for one")
