"""What runs in a container: a program whose output is carried, and a terminal."""

import asyncio
import contextlib
import secrets
from typing import Any, Protocol

from aiodocker.stream import Stream

from agentrl.workspace.workspace import Terminal, WorkspaceError
from agentrl_tools.workspaces import inside
from agentrl_tools.workspaces.daemon import LONG_SECONDS, Daemon
from agentrl_tools.workspaces.output import HeadTail


class RunsScripts(Protocol):
    """The container of a terminal."""

    async def check_running(self) -> None:
        """Raise WorkspaceError where it is gone."""

    async def run_on_call(self, script: str, name: str) -> None:
        """Run a script of ours on what a call started. Raises WorkspaceError."""


class RunningCall:
    """A program that runs, and what it prints."""

    def __init__(self, stdin: bytes, output: int, *, marked: bool = True) -> None:
        self.name = secrets.token_hex(8)
        """What marks it in its environment."""
        mark = secrets.token_hex(16).encode() if marked else b""
        self.input = mark + b"\n" + stdin if marked else b""
        self.out, self.err = HeadTail(output, mark), HeadTail(output, mark)
        self.code = 0

    async def carry(self, stream: Stream) -> None:
        """Carry the streams, until the program has ended."""
        writing = asyncio.ensure_future(self._feed(stream))
        try:
            while not (self.out.ended and self.err.ended):
                message = await stream.read_out()
                if message is None:
                    break
                (self.err if message.stream == 2 else self.out).add(message.data)
        finally:
            writing.cancel()
            await asyncio.wait({writing})

    async def _feed(self, stream: Stream) -> None:
        rest = memoryview(self.input)
        with contextlib.suppress(Exception):  # it reads no more
            while rest:
                await stream.write_in(bytes(rest[: 1 << 16]))
                rest = rest[1 << 16 :]


class ContainerTerminal(Terminal):
    """A program on a terminal in a container."""

    def __init__(self, workspace: RunsScripts, daemon: Daemon, execution: Any, stream: Stream, name: str) -> None:
        self._workspace, self._daemon, self._execution, self._stream = workspace, daemon, execution, stream
        self._name, self._rest, self._ended, self._closed = name, b"", False, False

    async def send(self, data: bytes) -> None:
        self._check()
        if self._ended:
            raise WorkspaceError("the shell has ended")
        await self._daemon.call("type into a terminal", self._stream.write_in(data))

    async def read(self, seconds: float, most: int = 1 << 16) -> bytes | None:
        self._check()
        if not self._rest and not self._ended:
            try:
                async with asyncio.timeout(seconds):
                    message = await self._daemon.call(
                        "read a terminal", self._stream.read_out(), seconds + LONG_SECONDS
                    )
            except TimeoutError:
                return b""
            if message is None:
                self._ended = True
                await self._workspace.check_running()
            else:
                self._rest = bytes(message.data)
        data, self._rest = self._rest[:most], self._rest[most:]
        return data or (None if self._ended else b"")

    def _check(self) -> None:
        if self._closed:
            raise WorkspaceError("the terminal is closed")

    async def interrupt(self) -> None:
        await self.send(b"\x03")
        await self._workspace.run_on_call(inside.INTERRUPT, self._name)

    async def resize(self, rows: int, columns: int) -> None:
        self._check()
        await self._daemon.call("resize a terminal", self._execution.resize(h=rows, w=columns))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            await self._stream.close()
        with contextlib.suppress(WorkspaceError):  # then it ends with the workspace
            await self._workspace.run_on_call(inside.KILL, self._name)
