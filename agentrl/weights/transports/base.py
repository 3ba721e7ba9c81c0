"""What every way of sending weights promises."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from agentrl.weights.server import WeightServer, WeightUpdateError
from agentrl.weights.source import NamedTensor

Failures = dict[str, str]  # URL -> one line


class Transport(Protocol):
    """`weights` are read once, to their end, also when every server has failed: other ranks gather in step."""

    name: str

    async def send(
        self, version: int, servers: Sequence[WeightServer], weights: Iterable[NamedTensor], flush: bool
    ) -> Failures:
        """Load `weights` into the servers, which are paused; those left out of the result hold all of them.

        flush: whether the first load drops the caches, so that it is done once. (The call `/flush_cache` also collects
        a server's garbage, which took a CPU up to two seconds.)
        """
        ...

    async def close(self) -> None: ...


async def each(
    servers: Iterable[WeightServer], call: Callable[[WeightServer], Awaitable[object]], failures: Failures
) -> list[WeightServer]:
    """`call` on all servers at once. Those that fail are noted; the others are returned."""

    async def one(server: WeightServer) -> WeightServer | None:
        try:
            await call(server)
        except WeightUpdateError as error:
            failures[server.url] = str(error)
            return None
        return server

    found = await asyncio.gather(*(one(server) for server in servers))
    return [server for server in found if server is not None]
