"""`Sync`: the trainer's weights to servers, as `weights/` does it: from a model of this process, or by whoever holds
the weights in others. It knows which adapter each server's requests are to name.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from agentrl.engine.sglang.client import Client, ServerError, Sessions
from agentrl.errors import UserError
from agentrl.threads import in_thread


class Publisher(Protocol):
    """Who holds the weights in other processes; see `weights/publisher.py`. Its calls block."""

    def open(self, folder: str | None = None, way: str = "auto", key: str | None = None) -> None: ...

    def publish(self, order: Any) -> Any: ...

    def sleep(self, urls: Sequence[str]) -> dict[str, str]: ...

    def wake(self) -> dict[str, str]: ...

    def make_room(self) -> None: ...

    def close(self) -> None: ...


class Sync:
    """model: the trainer's, or its shape (on the meta device) where a `Publisher` comes. scratch: makes the folder that
    `from_disk` may write to. way: of `engine.args.weights`. apart: nobody computes with it here. adapted: only
    the adapter travels; the fleet decides.
    """

    def __init__(
        self, model: Any, sessions: Sessions, scratch: Callable[[], Path], way: str, say: Callable[[str], None]
    ) -> None:
        self._model, self._sessions, self._scratch, self._way, self._say = model, sessions, scratch, way, say
        self.apart = model.get_input_embeddings().weight.is_meta
        self._publisher: Publisher | None = None
        self._sender: Any = None
        self._adapters: dict[str, tuple[str, int]] = {}
        self._baseless: set[str] = set()
        self.adapted = False

    @property
    def ready(self) -> bool:
        """Whether there are weights to send."""
        return not self.apart or self._publisher is not None

    async def take(self, publisher: Publisher | None) -> None:
        """From now on it is who sends."""
        if publisher is not None and publisher is not self._publisher:
            await in_thread(publisher.open, None, self._way, self._sessions.key)
            self._publisher = publisher

    def adapt(self, foreign: Sequence[str]) -> None:
        """Only the adapter travels from now on. foreign: servers that others started: of what, nobody knows, where it
        cannot be compared here."""
        self.adapted = True
        self._baseless = set(foreign) if self.apart else set()

    def adapter_of(self, url: str) -> tuple[str, int] | None:
        """The adapter that a request to this server has to name, and its version; None: the server's own weights."""
        return self._adapters.get(url)

    async def send(
        self, clients: Sequence[Client], version: int, mode: str, keep: Mapping[str, frozenset[str]]
    ) -> dict[str, str]:
        """To all of them at once; URL -> why, for those that did not take all of it. keep: adapters in use."""
        from agentrl.weights import WeightRequest, What

        what = What.ADAPTER if self.adapted else What.WHOLE
        order = WeightRequest(tuple(c.url for c in clients), version, mode, what, keep=keep)
        failed = {}
        if due := tuple(url for url in order.urls if url in self._baseless):
            failed = await self._publish(WeightRequest(due, 0, what=What.BASE))
            self._baseless -= set(due) - failed.keys()
            order = replace(order, urls=tuple(url for url in order.urls if url not in failed))
        return failed | await self._publish(order)

    async def send_to(self, client: Client, version: int) -> None:
        """To one server alone. Raises ServerError when it did not take all of it, or the trainer has gone on since:
        until the next update its weights are those of no step."""
        from agentrl.weights import WeightRequest, What

        what = What.ADAPTER if self.adapted else What.WHOLE
        await self._to_one(client, WeightRequest((client.url,), version, what=what, again=True))

    async def send_base(self, client: Client) -> None:
        """To one server the weights that adapters are of; they are version 0 always. Raises ServerError likewise."""
        from agentrl.weights import WeightRequest, What

        await self._to_one(client, WeightRequest((client.url,), 0, what=What.BASE, again=True))

    async def sleep(self, clients: Sequence[Client]) -> dict[str, str]:
        """Pause the servers, which give their memory back until `send` (weights too, where all of them are sent). What
        failed, by URL."""
        urls = tuple(c.url for c in clients)
        if self._publisher is not None:
            return await in_thread(self._publisher.sleep, urls)
        return dict(await self._local().sleep(urls))

    async def wake(self) -> dict[str, str]:
        """Servers that sleep and were sent nothing go on where their weights are whole. What failed, by URL."""
        if self._publisher is not None:
            return await in_thread(self._publisher.wake)
        return dict(await self._sender.wake()) if self._sender is not None else {}

    async def make_room(self) -> None:
        """The trainer gives back GPU memory that it keeps for its next step: servers that share it will wake."""
        import torch

        if self._publisher is not None:
            await in_thread(self._publisher.make_room)
        torch.cuda.empty_cache()

    async def close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            with contextlib.suppress(UserError):  # its workers may be gone, and what they held with them
                await in_thread(publisher.close)
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.close()

    async def _to_one(self, client: Client, order: Any) -> None:
        if not self.ready:
            raise ServerError(f"{client.url}: there are no weights to send yet")
        if why := (await self._publish(order)).get(client.url):
            raise ServerError(f"{client.url}: {why}")

    async def _publish(self, order: Any) -> dict[str, str]:
        if self._publisher is not None:
            sent = await in_thread(self._publisher.publish, order)
        else:
            sent = await self._local().send(order)
        for line in sent.said:
            self._say(line)
        self._adapters |= {url: (name, order.version) for url, name in sent.adapters.items() if url not in sent.failed}
        return dict(sent.failed)

    def _local(self) -> Any:
        """Who sends from this process."""
        from agentrl.weights import Sender

        self._sender = self._sender or Sender(self._model, self._sessions.get, self._scratch, self._way, self._say)
        return self._sender
