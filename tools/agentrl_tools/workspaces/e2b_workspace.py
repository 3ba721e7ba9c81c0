"""`E2bWorkspace`: a sandbox of the service E2B, whose daemon (envd) runs programs in it; and the terminals in it."""

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agentrl.workspace.provider import WorkspaceSpec
from agentrl.workspace.workspace import (
    MIB,
    OUTPUT,
    ExecResult,
    PathError,
    Snapshot,
    Terminal,
    Workspace,
    WorkspaceError,
    command_words,
)
from agentrl_tools.workspaces import inside
from agentrl_tools.workspaces.output import HeadTail
from agentrl_tools.workspaces.scripted import ROOT, SPOOL, STOPS, ScriptedWorkspace

if TYPE_CHECKING:
    from e2b import AsyncSandbox

_KILL_SECONDS = 20.0  # for what a call left to end
_LISTING_BYTES = 64 * MIB
_PIECE = 1 << 16  # bytes of standard input in one call
_MOST_WORDS = 120_000  # bytes of one argument: the kernel takes 128 KiB
_CLOSE_SECONDS = 2.0
_GRACE = 0.5  # seconds in which the last output of a shell that has ended may come
_AGAIN = 1.0  # before a watch that was ended is started again
_CODE = 3  # digits of an exit code beside the mark
_NO_USER = ("user", "unknown")

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Await `work` of the SDK, which makes an error of its own of a cancellation. Raises TimeoutError."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


@dataclass(frozen=True, slots=True)
class Origin:
    """What a workspace is opened from."""

    template: str
    """A template, or a snapshot, as the service names it."""
    processes: bool = False
    """Whether it is a snapshot that has processes, too."""


class Owner(Protocol):
    """What opens sandboxes, and calls the service."""

    deadline: float

    async def call(self, what: str, work: Awaitable[T], seconds: float = 0.0) -> T:
        """Await `work` of the SDK, for so long (0: the deadline). Raises WorkspaceError."""

    async def keep(self, sandbox: "AsyncSandbox") -> Snapshot:
        """Keep the files of a sandbox. Raises WorkspaceError."""

    async def fresh(self, spec: WorkspaceSpec, origin: Origin, image: str, build: str) -> "E2bWorkspace":
        """Open an origin, or another image, without a network. Raises WorkspaceError, UserError."""

    async def baseline(self, spec: WorkspaceSpec, origin: Origin) -> dict[str, str]:
        """The kind of each path of an origin. Raises WorkspaceError."""

    def closed(self, workspace: "E2bWorkspace") -> None:
        """Note that one is closed."""


_EXEC = r"""
IFS= read -r mark; stdin=$1 descriptors=$2 blocks=$3 processes=$4 folder=$5; shift 5
exec 3>&2 2>/dev/null
ulimit -c 0; ulimit -n "$descriptors"; ulimit -f "$blocks"; ulimit -u "$processes" || ulimit -p "$processes"
cd -- "$folder" || { printf '125%s' "$mark" >&3; exit 125; }
if [ "$stdin" = 0 ]; then ( exec "$@" ) </dev/null 2>&3 3>&-; else head -c "$stdin" | ( exec "$@" ) 2>&3 3>&-; fi
code=$?; printf '%s' "$mark"; printf '%03d%s' "$code" "$mark" >&3; exit $code
"""
"""As `inside.EXEC`; the exit code stands before the mark, since the daemon waits for what holds the outputs open."""

_SHELL = """ulimit -u "$6" 2>/dev/null || ulimit -p "$6" 2>/dev/null\n""" + inside.SHELL


_SHELL_ENDS = r"""
leader=; tries=0; while [ -z "$leader" ] && [ $tries -lt 50 ]; do
for file in $(grep -ls "$1" /proc/[0-9]*/environ 2>/dev/null); do
IFS= read -r line 2>/dev/null <"${file%environ}stat" || continue; set -- "$1" ${line##*) }
[ "$6" = 0 ] || grep -qs "$1" "/proc/$3/environ" || { leader=${line%% *}; break; }; done
[ -z "$leader" ] && sleep 0.1; tries=$((tries + 1)); done
while kill -0 "$leader" 2>/dev/null; do sleep 0.2; done
"""
"""Ends with the shell that carries a mark: its terminal may be held open by what it left in the background."""


class Process:
    """A program that the daemon runs."""

    def __init__(self, workspace: "E2bWorkspace", events: AsyncIterator[Any], pid: int) -> None:
        self._workspace, self._events, self._pid = workspace, events, pid

    async def next(self) -> tuple[str, Any]:
        """What comes next: (`stdout`, `stderr` or `pty`, bytes), or (`end`, exit code). Raises WorkspaceError."""
        while True:
            try:
                event = (await anext(self._events)).event.event
            except StopAsyncIteration:
                raise WorkspaceError(f"workspace {self._workspace.id}: a program was left by its daemon") from None
            except Exception as error:  # noqa: BLE001 - whatever the SDK makes of what the service says
                raise self._workspace.failed("carry output", error) from None
            if event is None:
                continue
            if event.field == "data" and event.value.output is not None:
                return event.value.output.field, event.value.output.value
            if event.field == "end":
                code = event.value.exit_code
                return "end", code if event.value.exited and code >= 0 else 128 + 9

    async def send(self, data: bytes, *, terminal: bool = False) -> None:
        """Give it input, or type it. Raises WorkspaceError."""
        await self._workspace.input(self._pid, data, terminal=terminal)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal. Raises WorkspaceError."""
        await self._workspace.resized(self._pid, rows, columns)

    async def close(self) -> None:
        """Hear no more of it; it runs on."""
        with contextlib.suppress(Exception):
            await within(_CLOSE_SECONDS, self._events.aclose())  # type: ignore[attr-defined]


class E2bWorkspace(ScriptedWorkspace):
    """provider: whose it is. sandbox: of the SDK. origin: what it was opened from."""

    service = "the service e2b"

    def __init__(
        self, provider: Owner, sandbox: "AsyncSandbox", name: str, spec: WorkspaceSpec, origin: Origin
    ) -> None:
        from e2b.envd.client_async import create_rpc_client
        from e2b.envd.process import process_connect

        super().__init__(name, spec, provider.deadline)
        self._provider, self._sandbox, self._origin = provider, sandbox, origin
        config = sandbox.connection_config
        self._rpc = create_rpc_client(process_connect.ProcessClient, sandbox.envd_api_url, config)
        self._closing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Prepare it. Raises WorkspaceError."""
        await self._prepare()
        if self._origin.processes:
            await self._script(inside.KILL, f"{inside.MARK}=")
        await self._begin()
        started = asyncio.Event()
        self._later(self._watch(started))
        await asyncio.wait_for(started.wait(), self._deadline)
        self._end_in_time()

    async def _before(self) -> dict[str, str]:
        return await self._provider.baseline(self._spec, self._origin)

    async def _watch(self, started: asyncio.Event) -> None:
        """Have the limits watched. What the service does wrong the next call will say."""
        while True:
            with contextlib.suppress(WorkspaceError, PathError):
                watch = await self._started(self._watch_words(), ROOT)
                try:
                    await self._watched(watch, started)
                finally:
                    await watch.close()
            started.set()
            await asyncio.sleep(_AGAIN)

    async def _watched(self, watch: Process, started: asyncio.Event) -> None:
        while True:
            stream, said = await watch.next()
            if stream == "end":
                return
            for word in said.decode(errors="replace").split():
                if word.isdigit():
                    self._watch_pid = word
                    started.set()
                elif word in STOPS:
                    self._stops, self._stopped = self._stops + 1, STOPS[word]

    async def _call(self, what: str, work: Awaitable[T], seconds: float = 0.0) -> T:
        """Await a call to the daemon. Raises WorkspaceError."""
        try:
            return await self._provider.call(what, work, seconds)
        except WorkspaceError:
            self._check()  # it was closed meanwhile
            raise

    async def _started(
        self, words: Sequence[str], user: str, env: dict[str, str] | None = None, size: tuple[int, int] | None = None,
        stdin: bool = False,
    ) -> Process:  # fmt: skip
        """Start a program. user: empty for the image's. size: of its terminal. Raises PathError, WorkspaceError."""
        from connectrpc.errors import ConnectError
        from e2b.envd.process import process_pb

        self._check()
        try:
            "".join(words).encode()
        except UnicodeEncodeError:
            raise PathError("the service e2b carries no paths or words that are not UTF-8") from None
        config = process_pb.ProcessConfig(cmd=words[0], args=list(words[1:]), envs=env or {})
        pty = process_pb.PTY(size=process_pb.PTY.Size(rows=size[0], cols=size[1])) if size else None
        headers = {"Keepalive-Ping-Interval": "50"}
        user = user or self._spec.user
        if user:
            headers["Authorization"] = f"Basic {base64.b64encode(f'{user}:'.encode()).decode()}"
        events = self._rpc.start(process_pb.StartRequest(process=config, pty=pty, stdin=stdin), headers=headers)
        try:
            first = (await within(self._provider.deadline, anext(events))).event
        except TimeoutError:
            raise self.failed("start a program", TimeoutError("no answer")) from None
        except Exception as error:  # noqa: BLE001 - whatever the SDK makes of what the service says
            unknown = isinstance(error, ConnectError) and all(word in str(error).lower() for word in _NO_USER)
            if user and unknown:
                raise PathError(f"user {user!r}: the image has no such user") from None
            raise self.failed("start a program", error) from None
        event: Any = first.event if first is not None else None
        if event is not None and event.field == "start":
            return Process(self, events, event.value.pid)
        raise self.failed("start a program", ValueError("it was not started"))

    async def input(self, pid: int, data: bytes, *, terminal: bool = False) -> None:
        """Give a program input. Raises WorkspaceError."""
        from e2b.envd.process import process_pb
        from protobuf import Oneof

        kind: Any = Oneof("pty" if terminal else "stdin", data)
        given = process_pb.ProcessInput(input=kind)
        request = process_pb.SendInputRequest(process=self._selector(pid), input=given)
        await self._call("give input", self._rpc.send_input(request))

    async def resized(self, pid: int, rows: int, columns: int) -> None:
        """Set the size of a terminal. Raises WorkspaceError."""
        from e2b.envd.process import process_pb

        pty = process_pb.PTY(size=process_pb.PTY.Size(rows=rows, cols=columns))
        request = process_pb.UpdateRequest(process=self._selector(pid), pty=pty)
        await self._call("resize a terminal", self._rpc.update(request))

    def _selector(self, pid: int) -> Any:
        from e2b.envd.process import process_pb
        from protobuf import Oneof

        number: Any = Oneof("pid", pid)
        return process_pb.ProcessSelector(selector=number)

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        seconds: float = 60.0,
        stdin: bytes = b"",
        output: int = OUTPUT,
    ) -> ExecResult:
        words = command_words(command, _MOST_WORDS, env)
        limits, folder, began, stops = self._spec.limits, self.absolute(cwd or "."), time.monotonic(), self._stops
        call = _Call(output)
        sizes = map(str, (len(stdin), limits.descriptors, max(1, limits.disk // 512), limits.processes))
        line = ["/bin/sh", "-c", _EXEC, "sh", *sizes, folder, *words]
        process = await self._started(line, user or "", {**(env or {}), inside.MARK: call.name}, stdin=True)
        try:
            timed_out = await self._heard(call, process, stdin, seconds)
        except asyncio.CancelledError:
            self._later(self._killed(call.name))
            raise
        finally:
            await process.close()
        self._check()
        code, err = call.result()
        if code == inside.NO_FOLDER and call.err.ended and not err:
            raise PathError(f"{folder}: no such folder")
        if not call.err.ended and not timed_out:
            await self.check_lives()
        stopped = self._stopped if self._stops != stops else ""
        return ExecResult(
            124 if timed_out else code, call.out.data(), err, call.out.cut or call.err.cut, timed_out, stopped,
            time.monotonic() - began,
        )  # fmt: skip

    async def check_lives(self) -> None:
        """Raise WorkspaceError where a program was killed with its sandbox, rather than in it."""
        await self._script("sleep 0.1")

    async def _heard(self, call: "_Call", process: Process, stdin: bytes, seconds: float) -> bool:
        """Wait for the end of a program, which is killed after `seconds`. True where it was. Raises WorkspaceError."""
        feeding = asyncio.ensure_future(call.feed(process, stdin))
        hearing = asyncio.ensure_future(call.hear(process))
        try:
            await asyncio.wait({hearing}, timeout=seconds)
            timed_out = not hearing.done()
            if timed_out:
                await self._killed(call.name)
                await asyncio.wait({hearing}, timeout=_KILL_SECONDS)
            if not hearing.done():
                await self.end_processes()  # it shed its mark, and holds its shell
                await asyncio.wait({hearing}, timeout=_KILL_SECONDS)
            if not hearing.done():
                raise WorkspaceError(f"workspace {self.id}: a program cannot be ended")
            hearing.result()
            return timed_out
        finally:
            feeding.cancel()
            hearing.cancel()
            await asyncio.wait({feeding, hearing})

    async def _killed(self, name: str) -> None:
        """Kill what a call started. Raises WorkspaceError."""
        await self._script(inside.KILL, f"{inside.MARK}={name}")

    async def _script(
        self, script: str, *words: str, user: str = ROOT, seconds: float = 0.0, most: int = _LISTING_BYTES
    ) -> tuple[int, bytes]:
        """Run a script of ours: its exit code and output. user: empty for the image's. Raises WorkspaceError."""
        process = await self._started(["/bin/sh", "-c", script, "sh", *words], user)
        said = bytearray()

        async def heard() -> tuple[int, bytes]:
            while True:
                stream, data = await process.next()
                if stream == "end":
                    return data, bytes(said)
                if stream == "stdout" and len(said) < most:
                    said.extend(data)

        try:
            return await within(seconds or self._provider.deadline, heard())
        except TimeoutError:
            raise self.failed("run a script", TimeoutError("no end")) from None
        finally:
            await process.close()

    async def terminal(self, *, rows: int = 40, columns: int = 120, env: dict[str, str] | None = None) -> Terminal:
        name, limits = secrets.token_hex(8), self._spec.limits
        sizes = map(str, (rows, columns, limits.descriptors, max(1, limits.disk // 512)))
        words = ["/bin/sh", "-c", _SHELL, "sh", *sizes, self.home, str(limits.processes)]
        environment = {"TERM": "xterm", **(env or {}), inside.MARK: name}
        shell = await self._started(words, "", environment, (rows, columns))
        ends = await self._started(["/bin/sh", "-c", _SHELL_ENDS, "sh", f"{inside.MARK}={name}"], ROOT)
        return E2bTerminal(self, shell, ends, name)

    async def run_on_call(self, script: str, name: str) -> None:
        """Run a script of ours on what a call started. Raises WorkspaceError."""
        await self._script(script, f"{inside.MARK}={name}")

    async def _brought(self, data: bytes) -> str:
        """Bring bytes to a place where only root sees them."""
        self._check()
        self._blobs += 1
        path = f"{SPOOL}/{self._blobs}"
        writing = self._sandbox.files.write(path, data, user=ROOT)
        await self._call("write a file", writing, self._patience(len(data)))
        return path

    async def _fetched(self, path: str, most: int) -> bytes:
        """Bytes of a file of ours, which is removed. Raises PathError: it is larger than `most`."""

        async def fetched() -> bytes:
            data = bytearray()
            async with await self._sandbox.files.read(path, format="stream", user=ROOT) as pieces:
                async for piece in pieces:
                    data += piece
                    if len(data) > most:
                        raise PathError(f"more than {most // MIB} MiB")
            return bytes(data)

        try:
            return await self._call("read a file", fetched(), self._patience(most))
        finally:
            self._later(self._removed(path))

    async def _removed(self, path: str) -> None:
        await self._script('rm -f "$1"', path)

    async def snapshot(self) -> Snapshot:
        self._check()
        await self._script("sync")
        return await self._provider.keep(self._sandbox)

    async def fresh(self, *, image: str = "", build: str = "") -> Workspace:
        return await self._provider.fresh(self._spec, self._origin, image, build)

    async def renew(self, seconds: int) -> None:
        """Let the service keep it for so long from now."""
        with contextlib.suppress(WorkspaceError):
            await self._call("renew a sandbox", self._sandbox.set_timeout(seconds))

    async def close(self) -> None:
        self._why = self._why or "it is closed"
        if self._timer is not None:
            self._timer.cancel()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        with contextlib.suppress(WorkspaceError):  # the service ends it in time
            await self._provider.call("end a sandbox", self._sandbox.kill())
        self._provider.closed(self)


class _Call:
    """What a program prints, until both its outputs end."""

    def __init__(self, output: int) -> None:
        self.name = secrets.token_hex(8)
        mark = secrets.token_hex(16).encode()
        self._line = mark + b"\n"
        self.out, self.err = HeadTail(output, mark), HeadTail(output + _CODE, mark)
        self._code = 128 + 9

    async def feed(self, process: Process, stdin: bytes) -> None:
        """Send the mark and the input; what reads no more is left alone."""
        rest = memoryview(self._line + stdin)
        with contextlib.suppress(WorkspaceError):
            while rest:
                await process.send(bytes(rest[:_PIECE]))
                rest = rest[_PIECE:]

    async def hear(self, process: Process) -> None:
        """Raises WorkspaceError."""
        while not (self.out.ended and self.err.ended):
            stream, data = await process.next()
            if stream == "end":
                self._code = data
                return
            (self.err if stream == "stderr" else self.out).add(data)

    def result(self) -> tuple[int, bytes]:
        """The exit code, and standard error."""
        err = self.err.data()
        if self.err.ended and err[-_CODE:].isdigit():
            return int(err[-_CODE:]), err[:-_CODE]
        return self._code, err


class E2bTerminal(Terminal):
    """A shell on a terminal in a sandbox."""

    def __init__(self, workspace: E2bWorkspace, process: Process, ends: Process, name: str) -> None:
        self._workspace, self._process, self._ends, self._name = workspace, process, ends, name
        self._next: asyncio.Task[tuple[str, Any]] | None = None
        self._ending = asyncio.ensure_future(ends.next())
        self._rest, self._ended, self._closed = b"", False, False

    def _check(self) -> None:
        if self._closed:
            raise WorkspaceError("the terminal is closed")

    async def send(self, data: bytes) -> None:
        self._check()
        if self._ended:
            raise WorkspaceError("the shell has ended")
        await self._process.send(data, terminal=True)

    async def read(self, seconds: float, most: int = 1 << 16) -> bytes | None:
        self._check()
        if not self._rest and not self._ended:
            self._next = self._next or asyncio.ensure_future(self._process.next())
            waited = {self._next, self._ending}
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not self._next.done() and self._ending.done():
                self._ending.result()
                await asyncio.wait({self._next}, timeout=_GRACE)
                self._ended = not self._next.done()
            if not self._next.done():
                return None if self._ended else b""
            done, self._next = self._next, None
            stream, data = done.result()
            self._ended = stream == "end"
            self._rest = b"" if self._ended else data
            if self._ended:
                await self._workspace.check_lives()
        data, self._rest = self._rest[:most], self._rest[most:]
        return data or (None if self._ended else b"")

    async def interrupt(self) -> None:
        await self.send(b"\x03")
        await self._workspace.run_on_call(inside.INTERRUPT, self._name)

    async def resize(self, rows: int, columns: int) -> None:
        self._check()
        await self._process.resize(rows, columns)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        waiting = {task for task in (self._next, self._ending) if task is not None}
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await asyncio.gather(self._process.close(), self._ends.close())
        with contextlib.suppress(WorkspaceError):  # then it ends with the sandbox
            await self._workspace.run_on_call(inside.KILL, self._name)
