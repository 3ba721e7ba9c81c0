"""`Transport`: how tensors get to servers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import WeightServer
from agentrl.weights.source import WeightSource

Failures = dict[str, str]
"""URL -> one line that says what went wrong."""


class Transport(Protocol):
    """Reads `weights` once, to their end, also when every server has failed: other ranks gather in step."""

    name: str
    """One of `channel.TRANSPORTS`."""

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        """Load `weights` into the servers, which are paused. Returns the failures; servers without one hold all of
        them.

        flush: whether the first load drops the caches, so that it is done once. (The call `/flush_cache` also collects
        a server's garbage, which took a CPU up to two seconds.)
        """

    async def close(self) -> None:
        """Release connections, memory and files."""


async def each(
    servers: Iterable[WeightServer], call: Callable[[WeightServer], Awaitable[object]], failures: Failures
) -> list[WeightServer]:
    """Call `call` on all servers at once. Adds those that fail to `failures` and returns the others."""

    async def one(server: WeightServer) -> WeightServer | None:
        try:
            await call(server)
        except WeightUpdateError as error:
            failures[server.url] = str(error)
            return None
        return server

    found = await asyncio.gather(*(one(server) for server in servers))
    return [server for server in found if server is not None]
