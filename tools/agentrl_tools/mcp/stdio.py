"""A server process and its pipes, as a transport of the official client: JSON-RPC messages, one a line.

The process leads a group of its own, and the whole group is killed when this ends: in good order, by failure, or by
cancellation, even where the server itself is dead and what it started lives on.
"""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from agentrl_tools.mcp.endpoint import Command, Diary, kill_group

GRACE_SECONDS = 1.0
"""How long a server may take to end by itself once its input is closed."""

_LONGEST = 64 << 20  # bytes of one message
_POLL_SECONDS = 0.05
_CHUNK = 1 << 16


@asynccontextmanager
async def serve(command: Command, env: Mapping[str, str], diary: Diary) -> AsyncIterator[Any]:
    """The two streams of a server that was started. Raises OSError when it cannot be."""
    process = await asyncio.create_subprocess_exec(
        command.command, *command.args, env=dict(env), cwd=command.cwd,
        stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True,
    )  # fmt: skip
    diary.process_group = process.pid
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as group, incoming, read, write, outgoing:
            group.start_soon(_receive, process, incoming, diary)
            group.start_soon(_send, process, outgoing, incoming)
            group.start_soon(_listen, process, diary)
            group.start_soon(_watch, process, diary)
            try:
                yield read, write
            finally:
                diary.ending = True
                with anyio.CancelScope(shield=True):
                    read.close()
                    write.close()
                    await _end(process)
                    await asyncio.sleep(_POLL_SECONDS)  # for its exit and its last words to be written down
                group.cancel_scope.cancel()
    finally:
        kill_group(process.pid)
        diary.process_group = None
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(_ended(process), GRACE_SECONDS)
        _close_pipes(process)


async def _receive(process: Process, incoming: Any, diary: Diary) -> None:
    """A line that is no message is handed on as an error, which the session passes over."""
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
        diary.silent = not diary.ending


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _send(process: Process, outgoing: Any, incoming: Any) -> None:
    assert process.stdin is not None
    try:
        async with outgoing:
            async for item in outgoing:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        await incoming.aclose()  # so that whoever waits for an answer learns that none will come


async def _listen(process: Process, diary: Diary) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(_CHUNK):
        diary.write(chunk.decode(errors="replace"))


async def _watch(process: Process, diary: Diary) -> None:
    """Once the server is dead, end what it started too: it holds the pipes, so that nobody would learn of the death."""
    await _ended(process)
    if diary.silent or not diary.ending:
        diary.exit_code = process.returncode
    kill_group(process.pid)


async def _end(process: Process) -> None:
    """The end that the protocol wants: close its input, wait, terminate, wait; killing it follows in any case."""
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
    """Not `process.wait()`, which waits for the pipes as well, and others may hold those."""
    while process.returncode is None:
        await asyncio.sleep(_POLL_SECONDS)


def _close_pipes(process: Process) -> None:
    """What asyncio would leave to the garbage collector, with a warning, where somebody else holds a pipe."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
