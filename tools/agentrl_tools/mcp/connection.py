"""Connections to an MCP server, each in a task of its own, in which the client is entered and left.

Calls come from any task of the same event loop and share a connection. A call that finds it dead has it opened again,
once for all that wait for it.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.plugins.types import Json
from agentrl_tools.mcp.endpoint import Endpoint, ServerLog, kill_group

if TYPE_CHECKING:
    from mcp_types import CallToolResult, Tool

_CLOSE_SECONDS = 8.0  # after which closing is no longer waited for, but cancelled
_PAGES = 100  # of a listing of tools
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0  # seconds of back-off between attempts to connect


class ConnectError(Exception):
    """No connection could be had; one line says why."""


class BrokenError(Exception):
    """The server did not answer as the protocol wants. dead: this connection will not serve again."""

    def __init__(self, what: str, dead: bool) -> None:
        super().__init__(what)
        self.dead = dead


class RefusedError(Exception):
    """The server says that the call itself is wrong."""


class Connection:
    """mode: of the official client, `auto` or `legacy` (a handshake, and over HTTP a session)."""

    def __init__(self, endpoint: Endpoint, mode: str) -> None:
        self._endpoint, self._mode = endpoint, mode
        self._server_log = ServerLog()
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None  # once it is open
        self._error: BaseException | None = None
        self._calls = 0
        self._retired = False

    @property
    def alive(self) -> bool:
        """True where calls can be made."""
        return not self.ended and not self._retired and self._server_log.exit_code is None

    @property
    def ended(self) -> bool:
        """True where nothing of it runs."""
        return self._task is None or self._task.done()

    async def open(self, seconds: float) -> None:
        """Open the connection. Raises ConnectError: the server cannot be started, ends, refuses, or does not answer
        within `seconds`."""
        self._task = asyncio.create_task(self._live(), name=f"mcp {self._endpoint}")
        try:
            await asyncio.wait({self._task, self._ready}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._client is not None:
                return
            late = not self._ready.done()
            await self.close()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        what = f"no answer to the handshake within {seconds:g} s" if late else _why(self._error)
        raise ConnectError(what + self._server_log.summary()) from self._error

    async def close(self) -> None:
        """End it in good order, or at once where it is not open yet; returns when nothing of it is left."""
        self._closing.set()
        if self._task is None or self._task.done():
            return
        try:
            if self._client is not None:
                await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        finally:
            if not self._task.done():
                self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)

    def retire(self) -> None:
        """Serve no new call, and end when those under way have ended."""
        self._retired = True
        if self._calls == 0:
            self._closing.set()

    def kill(self) -> None:
        """End its process without the event loop, which is closed."""
        if self._server_log.process_group is not None:
            kill_group(self._server_log.process_group)

    async def tools(self) -> "Sequence[Tool]":
        """What the server offers, as `mcp_types.Tool`. Raises ConnectError."""
        found: list[Tool] = []
        cursor = None
        try:
            for _ in range(_PAGES):
                page = await self._client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        except _protocol_errors() as error:
            raise ConnectError(f"it does not list its tools: {_why(error)}{self._server_log.summary()}") from error
        return found

    async def call(self, name: str, arguments: dict[str, Json]) -> "CallToolResult":
        """The `mcp_types.CallToolResult`. Raises RefusedError and BrokenError."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

        self._calls += 1
        try:
            answer: CallToolResult = await self._client.call_tool(name, arguments)
            return answer
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise RefusedError(error.message) from error
            dead = error.code in (CONNECTION_CLOSED, INVALID_REQUEST) or not self.alive
            if error.code == CONNECTION_CLOSED:
                await asyncio.sleep(0.1)  # for its exit code and last words to arrive
            raise BrokenError(f"{_why(error)}{self._server_log.summary()}", dead) from error
        except _protocol_errors() as error:
            raise BrokenError(f"{_why(error)}{self._server_log.summary()}", not self.alive) from error
        finally:
            self._calls -= 1
            if self._retired and self._calls == 0:
                self._closing.set()

    async def _live(self) -> None:
        from mcp import Client

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what it logs, our errors say
        try:
            async with Client(self._endpoint.transport(self._server_log), mode=self._mode, cache=None) as client:
                self._client = client
                self._ready.set_result(None)
                await self._closing.wait()
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - boundary: whoever opens or calls is told
            self._error = error
        finally:
            if not self._ready.done():
                self._ready.set_result(None)


async def connect(endpoint: Endpoint, mode: str, seconds: float, retries: int) -> Connection:
    """An open connection, after a back-off with jitter for each failure. Raises ConnectError of the last
    attempt."""
    attempt = 0
    while True:
        connection = Connection(endpoint, mode)
        try:
            await connection.open(seconds)
            return connection
        except ConnectError as error:
            attempt += 1
            if attempt > retries:
                raise ConnectError(
                    f"{error} (attempt {attempt} of {retries + 1})" if retries else str(error)
                ) from error
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 1))
        await asyncio.sleep(pause * (0.5 + 0.5 * random.random()))


def _why(error: BaseException | None) -> str:
    """The innermost of an exception group, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return "it closed the connection"
    if isinstance(error, FileNotFoundError):
        return f"the command {error.filename!r} is not found"
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    return text if kind == "MCPError" and text else f"{kind}: {text}"


def _protocol_errors() -> tuple[type[Exception], ...]:
    """What the client raises for a server that does not keep to the protocol, or is gone."""
    import anyio
    from mcp import MCPError
    from pydantic import ValidationError

    return MCPError, ValidationError, RuntimeError, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError


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
        """Stop using this connection."""
        connection.retire()
        if connection in self._slots:
            self._slots[self._slots.index(connection)] = None
            self._retired.add(connection)

    async def close(self) -> None:
        """Close all connections, and wait for their ends."""
        for task in self._opening.values():
            task.cancel()
        if self._opening:
            await asyncio.wait(set(self._opening.values()))
        open_ones = [c for c in (*self._slots, *self._retired) if c is not None]
        self._slots = [None] * len(self._slots)
        self._retired.clear()
        await asyncio.gather(*(connection.close() for connection in open_ones))

    def kill(self) -> None:
        """Kill the processes of all connections, without an event loop."""
        for connection in (*self._slots, *self._retired):
            if connection is not None:
                connection.kill()

    async def _open(self, slot: int) -> Connection:
        try:
            previous, self._slots[slot] = self._slots[slot], None
            if previous is not None:
                await previous.close()
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
