"""`Sync`: the trainer's weights to servers, from a model of this process or by a publisher in others. It knows which
adapter each server's requests are to name.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.containment.threads import in_thread
from agentrl.engine.servers.client import Client, ServerError, Sessions
from agentrl.errors import UserError
from agentrl.models.load import embeddings
from agentrl.weights.publisher import Sender
from agentrl.weights.request import ServerRank, WeightContent, WeightPublisher, WeightRequest, WeightResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sync:
    """kind: of the servers, of `weights.kinds.SERVERS`. model: the trainer's, or its shape (on the meta
    device) where a publisher sends the weights. scratch: makes the folder that `from_disk` may write to. transport: of
    `engine.args.weights`. say: called with lines for people.

    apart: whether the weights are in other processes. adapted: whether only the adapter travels; the fleet decides.
    """

    def __init__(
        self,
        kind: str,
        model: "PreTrainedModel",
        sessions: Sessions,
        scratch: Callable[[], Path],
        transport: str,
        say: Callable[[str], None],
    ) -> None:
        self._kind = kind
        self._sessions, self._transport, self._say = sessions, transport, say
        self._sender = Sender(model, sessions.get, scratch, transport, say, kind)
        self.apart: bool = embeddings(model).is_meta
        self._publisher: WeightPublisher | None = None
        self._adapters: dict[str, tuple[str, int]] = {}
        self._baseless: set[str] = set()
        self.adapted = False
        self.nccl: str | None = None
        """Version of NCCL in launched servers; None: not known."""
        self.places: dict[str, tuple[ServerRank, ...]] = {}
        """URL -> where each rank of a launched server is."""

    @property
    def ready(self) -> bool:
        """Whether there are weights to send."""
        return not self.apart or self._publisher is not None

    @property
    def _content(self) -> WeightContent:
        return WeightContent.ADAPTER if self.adapted else WeightContent.WHOLE

    async def use(self, publisher: WeightPublisher | None) -> None:
        """Have it send from now on; None changes nothing."""
        if publisher is not None and publisher is not self._publisher:
            await in_thread(publisher.open, None, self._transport, self._sessions.key, self._kind, self.nccl)
            self._publisher = publisher

    def adapt(self, foreign: Sequence[str]) -> None:
        """Send only the adapter from now on. foreign: servers that others started: they are sent the base first where
        theirs cannot be compared with ours here."""
        self.adapted = True
        self._baseless = set(foreign) if self.apart else set()

    def adapter_of(self, url: str) -> tuple[str, int] | None:
        """The adapter that a request to this server has to name, and its version; None: the server's own
        weights."""
        return self._adapters.get(url)

    async def send(
        self, clients: Sequence[Client], version: int, mode: str, keep: Mapping[str, frozenset[str]]
    ) -> dict[str, str]:
        """Send to all of them at once. Returns URL -> why, for those that did not take all of it. keep: adapters in
        use."""
        request = WeightRequest(tuple(c.url for c in clients), version, mode, self._content, keep=keep)
        failed = {}
        if due := tuple(url for url in request.urls if url in self._baseless):
            failed = await self._publish(WeightRequest(due, 0, content=WeightContent.BASE))
            self._baseless -= set(due) - failed.keys()
            request = replace(request, urls=tuple(url for url in request.urls if url not in failed))
        return failed | await self._publish(request)

    async def send_to(self, client: Client, version: int) -> None:
        """Send to one server alone. Raises ServerError when it did not take all of it, or the trainer has gone on
        since: until the next update the server's weights are those of no step."""
        await self._to_one(client, WeightRequest((client.url,), version, content=self._content, again=True))

    async def send_base(self, client: Client) -> None:
        """Send one server the weights that adapters belong to, always as version 0. Raises ServerError likewise."""
        await self._to_one(client, WeightRequest((client.url,), 0, content=WeightContent.BASE, again=True))

    async def sleep(self, clients: Sequence[Client]) -> dict[str, str]:
        """Pause the servers, which release their memory until `send` (that of weights too, where whole weights are
        sent). Returns what failed, by URL."""
        urls = tuple(c.url for c in clients)
        if self._publisher is not None:
            return await in_thread(self._publisher.sleep, urls)
        return await self._sender.sleep(urls)

    async def wake(self) -> dict[str, str]:
        """Resume servers that sleep and were sent nothing, where their weights are whole. Returns what failed, by
        URL."""
        if self._publisher is not None:
            return await in_thread(self._publisher.wake)
        return await self._sender.wake()

    async def make_room(self) -> None:
        """Free GPU memory that the trainer caches for its next step: servers on the same GPU will wake."""
        if self._publisher is not None:
            await in_thread(self._publisher.make_room)
        torch.cuda.empty_cache()

    async def close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            with contextlib.suppress(UserError):  # its workers may be gone
                await in_thread(publisher.close)
        await self._sender.close()

    async def _to_one(self, client: Client, request: WeightRequest) -> None:
        if not self.ready:
            raise ServerError(f"{client.url}: there are no weights to send yet")
        if why := (await self._publish(request)).get(client.url):
            raise ServerError(f"{client.url}: {why}")

    async def _publish(self, request: WeightRequest) -> dict[str, str]:
        result: WeightResult
        if self._publisher is not None:
            known = {url: self.places[url] for url in request.urls if url in self.places}
            result = await in_thread(self._publisher.publish, replace(request, places=known))
        else:
            self._sender.nccl = self.nccl
            result = await self._sender.send(request)
        for line in result.messages:
            self._say(line)
        new = {url: (name, request.version) for url, name in result.adapters.items() if url not in result.failed}
        self._adapters |= new
        return result.failed
