"""Connections that all requests share. Who finds one dead has it opened again, once for all who wait for it."""

import asyncio

from agentrl_tools.mcp.connection import ConnectError, Connection, connect
from agentrl_tools.mcp.endpoint import Endpoint

_RECONNECT_SECONDS = 20.0  # with all its attempts: less than the 30 s that a tool has by default


class Pool:
    """Belongs to one event loop. size: connections; calls: under way at once."""

    def __init__(self, endpoint: Endpoint, size: int, calls: int, seconds: float, retries: int) -> None:
        self._endpoint, self._seconds, self._retries = endpoint, seconds, retries
        self._slots: list[Connection | None] = [None] * size
        self._opening: dict[int, asyncio.Task[Connection]] = {}
        self._retired: set[Connection] = set()
        self._next = 0
        self.turns = asyncio.Semaphore(calls)

    def adopt(self, connection: Connection) -> None:
        """Take over one that is open already."""
        self._slots[0] = connection

    async def connection(self) -> Connection:
        """One that is alive, in turn. Raises ConnectError."""
        slot = self._next = (self._next + 1) % len(self._slots)
        current = self._slots[slot]
        if current is not None and current.alive:
            return current
        if slot not in self._opening:
            task = self._opening[slot] = asyncio.create_task(self._open(slot))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody may have gone
        return await asyncio.shield(self._opening[slot])

    def drop(self, connection: Connection) -> None:
        """It serves no longer."""
        connection.retire()
        if connection in self._slots:
            self._slots[self._slots.index(connection)] = None
            self._retired.add(connection)

    async def close(self) -> None:
        for task in self._opening.values():
            task.cancel()
        if self._opening:
            await asyncio.wait(set(self._opening.values()))
        open_ones = [c for c in (*self._slots, *self._retired) if c is not None]
        self._slots = [None] * len(self._slots)
        self._retired.clear()
        await asyncio.gather(*(connection.close() for connection in open_ones))

    def kill(self) -> None:
        for connection in (*self._slots, *self._retired):
            if connection is not None:
                connection.kill()

    async def _open(self, slot: int) -> Connection:
        try:
            former, self._slots[slot] = self._slots[slot], None
            if former is not None:
                await former.close()
            for old in [c for c in self._retired if c.ended]:
                self._retired.discard(old)
            async with asyncio.timeout(_RECONNECT_SECONDS):
                made = await connect(self._endpoint, "auto", self._seconds, self._retries)
            self._slots[slot] = made
            return made
        except TimeoutError:
            raise ConnectError(f"no connection within {_RECONNECT_SECONDS:g} s") from None
        finally:
            del self._opening[slot]
