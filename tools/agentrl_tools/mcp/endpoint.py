"""Where an MCP server is: a command that is started here, or a URL. It makes transports for the official client.

A command speaks JSON-RPC over its pipes, one message a line. Its process leads a process group, which is killed as a
whole when the transport ends, by failure or cancellation too, even where the server itself is dead.
"""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from agentrl.errors import UserError
from agentrl.recipe.secrets import masked_words
from agentrl.secrets import masked_text

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

_KEPT_LINES = 6
_KEPT_CHARACTERS = 300  # of a line


class ServerLog:
    """What a server let us know besides its answers: the last lines of its standard error, its exit, HTTP refusals."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._open = ""
        self.exit_code: int | None = None  # where it ended unasked
        self.ending = self.silent = False  # whether it was asked to end; whether it closed its output before
        self.process_group: int | None = None  # until it was killed

    def write(self, text: str) -> None:
        """Add text that the server wrote; the last lines are kept."""
        *lines, self._open = (self._open + text).split("\n")
        self._lines.extend(line.strip()[:_KEPT_CHARACTERS] for line in lines if line.strip())
        self._open = self._open[-_KEPT_CHARACTERS:]

    def summary(self) -> str:
        """It as the end of a sentence, on one line."""
        ended = "" if self.exit_code is None else f"; it ended with exit code {self.exit_code}"
        lines = [*self._lines, *([self._open.strip()] if self._open.strip() else [])][-_KEPT_LINES:]
        return ended + (f"; its last words: {' | '.join(lines)}" if lines else "")


@dataclass(frozen=True)
class Command:
    """env: besides the few harmless variables that the official client hands on (PATH, HOME, ...)."""

    command: str
    """The program, by name or path."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    """Its working folder; None: this process's own."""

    def __str__(self) -> str:
        return f"MCP server {Path(self.command).name} {' '.join(masked_words(self.args))}".strip()[:120]

    def check(self) -> None:
        """Raise UserError where the working folder is missing."""
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise UserError(f"{self}: its cwd {self.cwd} is not a folder")

    @asynccontextmanager
    async def transport(self, log: ServerLog) -> "AsyncIterator[TransportStreams]":
        """Start the server, and yield its two streams."""
        from mcp.client.stdio import get_default_environment

        async with serve(self, get_default_environment() | dict(self.env), log) as streams:
            yield streams


@dataclass(frozen=True)
class Url:
    """A server that is reached over streamable HTTP."""

    url: str
    """Its address, with http:// or https://."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers of every request."""

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"MCP server {parts._replace(netloc=parts.netloc.rpartition('@')[2], query='').geturl()}"

    def check(self) -> None:
        """Raise UserError for an address without http:// or https://."""
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"tool source 'mcp': url {masked_text(self.url)!r} does not begin with http:// or https://")

    @asynccontextmanager
    async def transport(self, log: ServerLog) -> "AsyncIterator[TransportStreams]":
        """Connect to the server, and yield its two streams."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def note(response: httpx2.Response) -> None:
            if response.status_code >= 400 and response.request.method == "POST":
                log.write(f"HTTP {response.status_code} {response.reason_phrase}\n")

        patient = httpx2.Timeout(connect=10.0, write=30.0, read=None, pool=None)  # a call has a deadline of its own
        client = httpx2.AsyncClient(
            headers=dict(self.headers),
            timeout=patient,
            limits=httpx2.Limits(max_connections=None),
            event_hooks={"response": [note]},
        )
        async with client, streamable_http_client(self.url, http_client=client) as streams:
            yield streams


Endpoint = Command | Url


def kill_group(process_group: int) -> None:
    """Kill all that a server started and that did not leave its process group, at once."""
    with suppress(ProcessLookupError, PermissionError):  # gone already, or only zombies are left of it
        os.killpg(process_group, signal.SIGKILL)


GRACE_SECONDS = 1.0
"""How long a server may take to end by itself once its input is closed."""

_LONGEST = 64 << 20  # bytes of one message
_POLL_SECONDS = 0.05
_CHUNK = 1 << 16


@asynccontextmanager
async def serve(command: Command, env: Mapping[str, str], log: ServerLog) -> "AsyncIterator[TransportStreams]":
    """Start a server, and yield its two streams. Raises OSError when it cannot be."""
    process = await asyncio.create_subprocess_exec(
        command.command, *command.args, env=dict(env), cwd=command.cwd,
        stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
    )  # fmt: skip
    log.process_group = process.pid
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as group, incoming, read, write, outgoing:
            group.start_soon(_receive, process, incoming, log)
            group.start_soon(_send, process, outgoing, incoming)
            group.start_soon(_listen, process, log)
            group.start_soon(_watch, process, log)
            try:
                yield read, write
            finally:
                log.ending = True
                with anyio.CancelScope(shield=True):
                    read.close()
                    write.close()
                    await _end(process)
                    await asyncio.sleep(_POLL_SECONDS)  # for its exit and its last words to be written down
                group.cancel_scope.cancel()
    finally:
        kill_group(process.pid)
        log.process_group = None
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(_ended(process), GRACE_SECONDS)
        _close_pipes(process)


async def _receive(
    process: Process, incoming: "MemoryObjectSendStream[SessionMessage | Exception]", log: ServerLog
) -> None:
    """Hand the messages on; a line that is no message becomes an error, which the session passes over."""
    assert process.stdout is not None
    rest = b""
    async with incoming:
        while chunk := await process.stdout.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST:
                return
            for line in lines:
                if line.strip():
                    try:
                        await incoming.send(_message(line))
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return
        log.silent = not log.ending


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _send(
    process: Process,
    outgoing: "MemoryObjectReceiveStream[SessionMessage]",
    incoming: "MemoryObjectSendStream[SessionMessage | Exception]",
) -> None:
    assert process.stdin is not None
    try:
        async with outgoing:
            async for item in outgoing:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        await incoming.aclose()  # so that whoever waits for an answer learns that none will come


async def _listen(process: Process, log: ServerLog) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(_CHUNK):
        log.write(chunk.decode(errors="replace"))


async def _watch(process: Process, log: ServerLog) -> None:
    """Wait for the end of the server, and end what it started too: it holds the pipes, so that nobody would learn of
    the death."""
    await _ended(process)
    if log.silent or not log.ending:
        log.exit_code = process.returncode
    kill_group(process.pid)


async def _end(process: Process) -> None:
    """End the server as the protocol wants: close its input, wait, terminate, wait; killing it follows in any case."""
    assert process.stdin is not None
    process.stdin.close()
    for last in (False, True):
        with suppress(TimeoutError):
            await asyncio.wait_for(_ended(process), GRACE_SECONDS)
            return
        if not last:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)


async def _ended(process: Process) -> None:
    """Wait for the exit; not by `process.wait()`, which waits for the pipes as well, and others may hold those."""
    while process.returncode is None:
        await asyncio.sleep(_POLL_SECONDS)


def _close_pipes(process: Process) -> None:
    """Close what asyncio would leave to the garbage collector, with a warning, where somebody else holds a pipe."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
