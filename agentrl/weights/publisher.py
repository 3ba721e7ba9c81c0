"""`Publisher`: the sending end in the processes of a sharded trainer, called alike on every rank.

    publisher = Publisher(model, rank)            # in each worker
    publisher.open(folder, way)
    sent = publisher.publish(Order(urls, step))   # rank 0: what became of it; the others: None

Each call blocks. An order is carried out on all ranks or none: rank 0 reads the weights to their end also when every
server failed, so nobody waits in a collective for ever.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from agentrl.weights.reach import authorization
from agentrl.weights.request import WeightRequest, WeightResult
from agentrl.weights.scratch import WEIGHTS, Scratch
from agentrl.weights.sender import Sender

T = TypeVar("T")


class Publisher:
    """model: a transformers module, its parameters sharded (FSDP2) or not. rank: of this process; 0 speaks to servers,
    in an event loop of its own."""

    def __init__(self, model: Any, rank: int = 0) -> None:
        self._model, self._rank = model, rank
        self._runner: asyncio.Runner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._key: str | None = None
        self._sender: Sender | None = None
        self._folder: Path | None = None
        self._own = Scratch(WEIGHTS)
        self._said: list[str] = []

    def open(self, folder: str | None = None, way: str = "auto", key: str | None = None) -> None:
        """folder: where `from_disk` writes, which servers must see by the same path (None: a temporary one). way: see
        `engine.args.weights`. key: what servers ask for. Raises UserError for an unknown way once it is used."""
        self.close()
        self._key = key
        self._folder = Path(folder) if folder is not None else None
        self._sender = Sender(self._model, self._get_session, self._scratch, way, self._said.append)

    def publish(self, order: WeightRequest) -> WeightResult | None:
        """Send the weights where `order` says."""
        sender = self._opened()
        if self._rank != 0:
            sender.follow(order)
            return None
        sent = self._run(lambda: sender.send(order))
        said, self._said[:] = tuple(self._said), ()
        return WeightResult(sent.failed, sent.adapters, said)

    def sleep(self, urls: Sequence[str]) -> dict[str, str]:
        """Let the servers give their memory back until the next `publish`. What failed, by URL."""
        sender = self._opened()
        return self._run(lambda: sender.sleep(urls)) if self._rank == 0 else {}

    def wake(self) -> dict[str, str]:
        """After `sleep`, where nothing was published since. What failed, by URL."""
        sender = self._opened()
        return self._run(sender.wake) if self._rank == 0 else {}

    def close(self) -> None:
        """Leave process groups, remove what was written. It may be opened again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.run(self._close())
            runner.close()
        self._own.close()
        self._sender = None

    async def _close(self) -> None:
        if self._sender is not None:
            await self._sender.close()
        if self._session is not None:
            await self._session.close()
        self._session = None

    def _opened(self) -> Sender:
        if self._sender is None:
            self.open()
        assert self._sender is not None
        return self._sender

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """In the loop that connections and channels belong to."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(work())

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            self._session = aiohttp.ClientSession(connector=connector, headers=authorization(self._key))
        return self._session

    def _scratch(self) -> Path:
        return self._own.path() if self._folder is None else self._folder
