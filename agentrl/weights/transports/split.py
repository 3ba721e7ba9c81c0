"""Weights to servers by the way that suits each: two transports read the trainer's weights once, in step."""

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from threading import Condition

from agentrl.weights.server import WeightServer
from agentrl.weights.source import NamedTensor, WeightSource
from agentrl.weights.transports.base import Failures, Transport


class SplitTransport:
    """near: sends to the servers at the URLs `close`; far: to the others. One transport alone is used as it is."""

    def __init__(self, near: Transport, far: Transport, close: Collection[str]) -> None:
        self._near, self._far, self._close = near, far, frozenset(close)
        self.name = f"{near.name} and {far.name}"

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        """Send to near and far servers at once, each by its transport."""
        near = [server for server in servers if server.url in self._close]
        far = [server for server in servers if server.url not in self._close]
        if not near or not far:
            return await (self._near if near else self._far).send(version, servers, weights, flush)
        reading = Shared(weights, 2)

        async def one(transport: Transport, some: list[WeightServer], branch: "Branch") -> Failures:
            try:
                return await transport.send(version, some, branch, flush)
            finally:
                branch.leave()  # or the other one would wait for it

        first, second = reading.branches
        found = await asyncio.gather(one(self._near, near, first), one(self._far, far, second), return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return {url: why for result in found if isinstance(result, dict) for url, why in result.items()}

    async def close(self) -> None:
        """Close both transports."""
        await asyncio.gather(self._near.close(), self._far.close())


class Shared:
    """Tensors of `weights`, read once for `readers` readers in threads: none is more than one tensor ahead of another,
    so that two whole tensors exist at most."""

    def __init__(self, weights: WeightSource, readers: int) -> None:
        self.weights = weights
        self.branches = tuple(Branch(self) for _ in range(readers))
        self._items: Iterator[NamedTensor] | None = None
        self._change = Condition()

    def next_for(self, branch: "Branch") -> NamedTensor | None:
        """The next tensor for a reader, None after the last; waits for the others to come as far. Raises what
        reading raised, for each reader."""
        others = [other for other in self.branches if other is not branch]
        with self._change:
            self._change.wait_for(lambda: branch.left or branch.ahead or not any(other.ahead for other in others))
            if branch.left:
                return None
            if not branch.ahead:
                self._read()
            item = branch.ahead.popleft()
            self._change.notify_all()
        if isinstance(item, BaseException):
            raise item
        return item

    def leave(self, branch: "Branch") -> None:
        """End the reading of `branch`: the others no longer wait for it."""
        with self._change:
            branch.left = True
            branch.ahead.clear()
            self._change.notify_all()

    def _read(self) -> None:
        """Read one tensor for all readers that are left."""
        item: NamedTensor | BaseException | None
        try:
            self._items = self._items or iter(self.weights)
            item = next(self._items, None)
        except Exception as error:  # noqa: BLE001 - each reader raises it
            item = error
        for branch in self.branches:
            if not branch.left:
                branch.ahead.append(item)


class Branch(WeightSource):
    """What one reader of `Shared` reads, the first time; a second time it reads alone, where that is possible."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.ahead: deque[NamedTensor | BaseException | None] = deque()
        """Read for it, and not taken yet."""
        self.left = False
        """Whether it reads no more."""
        self.repeatable, self.feed = shared.weights.repeatable, shared.weights.feed

    def __iter__(self) -> Iterator[NamedTensor]:
        if self.left:
            yield from self._shared.weights
            return
        while (item := self._shared.next_for(self)) is not None:
            yield item
        self.leave()

    def intact(self) -> bool:
        """Whether the underlying weights are intact."""
        return self._shared.weights.intact()

    def leave(self) -> None:
        """End this reading: the others no longer wait for it."""
        self._shared.leave(self)
