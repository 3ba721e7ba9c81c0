"""`Admission`: checks before a server gets a request, that it samples from our model and which weights it holds."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.engine.servers.client import Client
from agentrl.engine.servers.identity import FIRST_SECONDS, Probe, ServerFacts, other_weights, probe_of
from agentrl.engine.servers.kind import ServerKind
from agentrl.engine.servers.sync import Sync
from agentrl.errors import UserError
from agentrl.models.load import embeddings
from agentrl.models.lora import switched_off

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BASE_VERSION = "0"
"""Version of the weights that adapters belong to."""


class Admission:
    """sync: sends a server our weights under a version. say: called with a line when that was needed. patience: seconds
    that a server may take for a request: for its first one it compiles kernels."""

    def __init__(
        self,
        kind: ServerKind,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        sync: Sync,
        say: Callable[[str], None],
        patience: float = FIRST_SECONDS,
    ) -> None:
        self._kind = kind
        self._model, self._tokenizer, self._sync, self._say = model, tokenizer, sync, say
        self._patience = patience
        self._probe: Probe | None = None  # of the weights that servers hold themselves

    async def identify(self, client: Client) -> ServerFacts:
        """What a server tells about itself. Raises UserError where it serves another model, ServerError where it
        does not answer: one line."""
        facts = await self._kind.facts(client)
        vocabulary = embeddings(self._model).shape[0]
        await self._kind.check_model(client, self._model.config, vocabulary, self._patience)
        return facts

    async def first(self, client: Client, facts: ServerFacts, version: int) -> None:
        """Admit a server at the start of a run, with our weights at `version`. Raises UserError or ServerError: one
        line.

        Where the weights are in other processes nothing is compared: servers wait for them anyway.
        """
        if facts.has_tokenizer and self._tokenizer is not None:
            await self._kind.check_tokenizer(client, self._tokenizer)
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
        await self._kind.sample_one(client, self._adapter_at(client), self._patience)
        return facts

    async def _same(self, client: Client, probe: Probe, version: int) -> bool:
        """Make sure that it holds the weights of the probe, and return whether it had to be sent them."""
        gap = await self._difference(client, probe)
        if gap <= probe.tolerance:
            return False
        self._say(f"{other_weights(client, gap, probe)}: it is given ours")
        await (self._sync.send_base(client) if self._sync.adapted else self._sync.send_to(client, version))
        gap = await self._difference(client, probe)
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
        gap = await self._difference(client, probe, self._adapter_at(client))
        if gap > probe.limit:
            raise UserError(f"engine: with the adapter {other_weights(client, gap, probe, probe.limit)}")

    async def _difference(self, client: Client, probe: Probe, adapter: str | None = None) -> float:
        """The mean absolute difference between its log-probs of the probe's ids and ours, in nats."""
        theirs = await self._kind.prompt_logprobs(client, probe.ids, adapter, self._patience)
        if len(theirs) != len(probe.ids) - 1:
            raise UserError(f"engine: {client.url} returns {len(theirs)} log-probs of a prompt of {len(probe.ids)} ids")
        gaps = [abs(a - b) for a, b in zip(theirs[-len(probe.logprobs) :], probe.logprobs, strict=True)]
        return sum(gaps) / len(gaps) if all(map(math.isfinite, gaps)) else math.inf

    def _adapter_at(self, client: Client) -> str | None:
        found = self._sync.adapter_of(client.url)
        return found[0] if found is not None else None

    def _of_the_base(self) -> Probe:
        with switched_off(self._model):
            return probe_of(self._model, self._tokenizer)
