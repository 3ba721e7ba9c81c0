"""The provider `bwrap`: bubblewrap on this machine, a file system in memory over a read-only root for each workspace.

No daemon, no root. A script of ours forks a keeper for each workspace (see `agentrl/workspace/inside/keeper.py`), and
all speak to this process over sockets; what a program prints comes through pipes that we read ourselves.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import agentrl.workspace as workspace_room
from agentrl.containment.bubblewrap import NEEDS, ORDINARY_USER, SANDBOX_USER, isolation, socket_bytes
from agentrl.containment.process_tree import remove_tree
from agentrl.containment.seccomp import filter_program
from agentrl.errors import UserError
from agentrl.jsonable import Json
from agentrl.workspace import egress
from agentrl.workspace.provider import Capabilities, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import (
    HOME,
    OUTPUT,
    READ,
    Change,
    ChangeKind,
    ExecResult,
    FileInfo,
    FileKind,
    PathError,
    Snapshot,
    Terminal,
    Workspace,
    WorkspaceError,
    command_words,
)
from agentrl_tools.workspaces.output import HeadTail

_KEEPER = Path(workspace_room.__file__).parent / "inside" / "keeper.py"
_PREFIX = "agentrl-workspaces-"
_LOCK = "lock"  # held by the run, so that a sweep sees that it lives
_SYSTEM = ("/usr", "/nix/store", "/etc/ssl", "/etc/ca-certificates", "/etc/alternatives", "/etc/pki")
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "protocols", "services")
_FOLDERS = ("var/tmp", "srv", "opt", "mnt", "etc", "logs", "root", "app", "tests")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_LATE = 15.0  # seconds over a program's own, after which the keeper is not believed in any more
_READY_SECONDS = 75.0  # for it to start, on a machine that is busy with hundreds
_GET_SESSION = 0x5429  # TIOCGSID
_INTERRUPT_SECONDS = 1.0  # for a program to end by an interrupt
_CALL_SECONDS = 120.0  # of a call that moves files
_MOST_WORDS = 120_000  # bytes of one argument: the kernel takes 128 KiB
_MOST_REQUEST = 160_000  # bytes of a message to a keeper: sockets hold some 200 KB
_MOST_LISTED = 64 << 20  # bytes of a list of files
_NAMED = 6  # folders of an image that a warning names
_log = logging.getLogger("agentrl.workspaces.bwrap")
_LDD = re.compile(r"(?:=>\s*)?(/\S+)\s+\(0x")


class BwrapProvider(WorkspaceProvider):
    """folders: of this machine, which the default image shows besides the system's, read-only."""

    name = "bwrap"
    capabilities = Capabilities(images=True, hosts=True, everything=True, listens=True)

    def __init__(self, folders: Sequence[str] = ()) -> None:
        for folder in folders:
            if not (os.path.isabs(folder) and os.path.isdir(folder)):
                raise UserError(f"workspace.args.folders: {folder} is no folder; give absolute paths")
        self._folders = tuple(folders)
        self._bwrap = shutil.which("bwrap") or ""
        self._state: Path | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = -1
        self._open: set[BwrapWorkspace] = set()
        self._kept: set[str] = set()
        self._looked: set[str] = set()
        self._count = 0

    @property
    def state(self) -> Path | None:
        """The folder of this run's snapshots, while any workspace was opened."""
        return self._state

    @property
    def opened(self) -> int:
        """How many are open now."""
        return len(self._open)

    async def start(self, run: str) -> None:
        if not self._bwrap:
            raise UserError(
                "workspace.provider 'bwrap': bubblewrap is not installed; install the package `bubblewrap` of your "
                "distribution (apt-get install bubblewrap), or choose another provider"
            )
        _sweep()
        try:
            workspace = await self.open(WorkspaceSpec())
            await workspace.close()
        except WorkspaceError as error:
            await self.close()
            raise UserError(f"workspace.provider 'bwrap': it does not work here ({error}); {NEEDS}") from None

    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> "BwrapWorkspace":
        self.check(spec)
        if spec.image and not os.path.isdir(spec.image):
            raise UserError(f"workspace.image: {spec.image} is no folder; the provider 'bwrap' takes root folders")
        if spec.image and spec.image not in self._looked:
            self._looked.add(spec.image)
            _say_what_others_own(spec.image)
        chain = snapshot.name.split("+") if snapshot is not None else []
        self._count += 1
        workspace = BwrapWorkspace(self, f"w{os.getpid()}-{self._count}", spec, chain)
        self._open.add(workspace)
        try:
            await workspace.begin(self._keep(spec, chain))
        except BaseException:
            await workspace.close()
            raise
        return workspace

    def _keep(self, spec: WorkspaceSpec, chain: Sequence[str]) -> socket.socket:
        """Ask for a keeper. Raises WorkspaceError."""
        if self._zygote is None or self._zygote.poll() is not None:
            self._begin()
        assert self._control is not None
        limits = {name: value for name, value in asdict(spec.limits).items() if name != "seconds"}
        asked = {"image": os.path.realpath(spec.image) if spec.image else "", "layers": list(chain), "limits": limits,
                 "everything": spec.network.everything, "env": environment(spec)}  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [json.dumps(asked).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise WorkspaceError(f"the keeper of workspaces has ended: {self._last_words() or error}") from None
        ours.setblocking(False)
        return ours

    def _begin(self) -> None:
        self._end()
        ordinary = os.getuid() == 0
        self._state = made_state(self._folders, ordinary)
        self._lock = os.open(self._state / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {**_config(self._bwrap, self._folders), "state": str(self._state), "socket": theirs.fileno(),
                  "uid": ORDINARY_USER if ordinary else None}  # fmt: skip
        python = getattr(sys, "_base_executable", None) or sys.executable
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._zygote = subprocess.Popen(
                [python, "-I", "-S", str(_KEEPER), json.dumps(config)], pass_fds=(theirs.fileno(),), cwd="/",
                env={"LANG": "C.UTF-8"}, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._control = ours

    def _last_words(self) -> str:
        assert self._control is not None
        self._control.settimeout(1.0)
        with contextlib.suppress(OSError):
            return self._control.recv(4096).decode(errors="replace")
        return ""

    async def forget(self, snapshot: Snapshot) -> None:
        self._kept.discard(snapshot.name)
        await self._remove_unused(snapshot.name.split("+"))

    async def _remove_unused(self, names: Sequence[str]) -> None:
        """Remove layers that no workspace and no snapshot stands on any more."""
        if self._state is None:
            return
        used = {layer for one in self._open for layer in one.layers}
        used |= {layer for name in self._kept for layer in name.split("+")}
        for name in names:
            if name not in used:
                await asyncio.to_thread(remove_tree, self._state / "snapshots" / name)

    def keep(self, snapshot: Snapshot) -> Snapshot:
        """Keep a snapshot until it is to be forgotten."""
        self._kept.add(snapshot.name)
        return snapshot

    async def closed(self, workspace: "BwrapWorkspace") -> None:
        """Note that a workspace is closed."""
        if workspace in self._open:
            self._open.discard(workspace)
            await self._remove_unused(workspace.layers)

    async def close(self) -> None:
        for workspace in list(self._open):
            await workspace.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._zygote is not None:
            try:
                self._zygote.wait(10.0)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
        if self._state is not None:
            remove_tree(self._state)
            os.close(self._lock)
        self._control = self._zygote = self._state = None


class BwrapWorkspace(Workspace):
    """One workspace, and the socket of its keeper."""

    def __init__(self, provider: BwrapProvider, name: str, spec: WorkspaceSpec, chain: Sequence[str]) -> None:
        self.home = spec.folder or HOME
        self.id, self.listens = name, not spec.network.everything  # where it shares this machine's loopback
        self._provider, self._spec, self.layers = provider, spec, tuple(chain)
        self._channel: socket.socket | None = None
        self._calls: dict[int, _Call] = {}
        self._count = 0
        self._why = ""
        self._proxy = egress.EgressProxy(spec.network.hosts)
        self._shell = ""
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, channel: socket.socket) -> None:
        """Wait until the keeper is ready. Raises WorkspaceError."""
        self._channel = channel
        loop = asyncio.get_running_loop()
        ready = self._calls[0] = _Call(loop.create_future())
        loop.add_reader(channel, self._hear)
        await self._ended(ready, 0, _READY_SECONDS)
        await self._let_out()
        if self._spec.folder:
            await self.exec(["mkdir", "-p", "--", self.home], cwd="/")
        if self._spec.limits.seconds != float("inf"):
            self._timer = loop.call_later(self._spec.limits.seconds, self._lose, "its time is over")

    async def _let_out(self) -> None:
        """Let the hosts of a list be reached, anew where all that ran inside was ended, and the network with it."""
        await self._proxy.close()
        if self._spec.network.hosts:
            await self._proxy.serve(await self.listen(egress.PORT))

    async def listen(self, port: int) -> socket.socket:
        call, name = await self._ask({"op": "listen", "port": port}, ())
        try:
            await self._ended(call, name, _CALL_SECONDS)
        except PathError as error:
            raise WorkspaceError(f"workspace {self.id}: cannot listen at port {port} inside: {error}") from None
        if not call.fds:
            raise WorkspaceError(f"workspace {self.id}: no socket came for port {port}")
        return socket.socket(fileno=call.fds.pop())

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
        if user not in (None, "user"):
            raise PathError(f"user {user!r}: a workspace of the provider 'bwrap' has one user, `user`")
        began = time.monotonic()
        with _Pipes(stdin, output) as pipes:
            request = {"op": "exec", "words": words, "cwd": self.absolute(cwd or "."), "env": env or {}}
            call, name = await self._ask(request, pipes.theirs())
            timed_out = await self._ended(call, name, seconds, killed=True)
            if call.stopped:
                await self._let_out()
            pipes.drain()
            code = 124 if timed_out else call.code if call.code >= 0 else 128 - call.code
            return ExecResult(
                code, pipes.out.data(), pipes.err.data(), pipes.out.cut or pipes.err.cut, timed_out, call.stopped,
                time.monotonic() - began,
            )  # fmt: skip

    async def terminal(self, *, rows: int = 40, columns: int = 120, env: dict[str, str] | None = None) -> Terminal:
        if not self._shell:
            self._shell = "/bin/sh"
            for shell in _SHELLS:
                with contextlib.suppress(PathError):
                    await self.listing(shell, depth=0)
                    self._shell = shell
                    break
        given = {"TERM": "xterm", **(env or {})}
        request = {"op": "terminal", "words": [self._shell], "cwd": self.home, "env": given, "rows": rows,
                   "columns": columns}  # fmt: skip
        call, name = await self._ask(request, ())
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await call.handed.wait()
        except TimeoutError:
            self._lose("a terminal did not open")
        if not call.fds:
            await self._ended(call, name, _CALL_SECONDS)
            raise WorkspaceError(f"workspace {self.id}: no terminal came")
        return BwrapTerminal(self, call, name, call.fds.pop())

    async def read(self, path: str, *, offset: int = 0, limit: int = READ) -> bytes:
        request = {"op": "read", "path": self.absolute(path), "offset": max(0, offset), "limit": min(limit, READ)}
        return await self._file_call(request, READ)

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        await self._file_call({"op": "write", "path": self.absolute(path), "mode": mode}, 0, data)

    async def listing(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> list[FileInfo]:
        request = {"op": "listing", "path": self.absolute(path), "depth": depth, "limit": limit}
        lines = (await self._file_call(request, _MOST_LISTED)).decode("utf-8", "replace").splitlines()
        return [FileInfo(name, FileKind(kind), size, mode) for name, kind, size, mode in map(json.loads, lines)]

    async def pack(self, paths: Sequence[str]) -> bytes:
        most = 2 * self._spec.limits.disk
        asked = json.dumps([self.absolute(path) for path in paths]).encode()
        return await self._file_call({"op": "pack", "limit": most}, most, asked)

    async def unpack(self, tar: bytes) -> None:
        await self._file_call({"op": "unpack"}, 0, tar)

    async def diff(self, limit: int = 10_000) -> list[Change]:
        lines = (await self._file_call({"op": "diff", "limit": limit}, _MOST_LISTED)).decode("utf-8", "replace")
        return [
            Change(path, ChangeKind(change), FileKind(kind), size)
            for path, change, kind, size in map(json.loads, lines.splitlines())
        ]

    async def original(self, paths: Sequence[str], limit: int = READ) -> dict[str, bytes]:
        asked = [self.absolute(path) for path in paths]
        lines = await self._file_call(
            {"op": "original", "paths": asked, "limit": limit}, len(paths) * (2 * limit + 8192)
        )
        return {path: bytes.fromhex(data) for path, data in map(json.loads, lines.splitlines())}

    async def _file_call(self, request: dict[str, Json], most: int, data: bytes = b"") -> bytes:
        """A call that moves bytes, tried twice where a program in the workspace kills it, such as one that kills
        everything. Raises PathError with what the system said of a path, WorkspaceError."""
        for _ in range(2):
            with _Pipes(data, most, whole=True) as pipes:
                call, name = await self._ask(request, pipes.theirs()[:2])
                await self._ended(call, name, _CALL_SECONDS)
                if call.code:
                    continue
                pipes.drain()
                if pipes.out.cut:
                    raise PathError(f"{request['op']}: more than {most >> 20} MiB")
                return pipes.out.data()
        raise PathError(f"{request['op']}: a program in the workspace killed it {call.stopped}".rstrip())

    async def end_processes(self) -> None:
        call, name = await self._ask({"op": "end"}, ())
        await self._ended(call, name, _CALL_SECONDS)
        await self._let_out()

    async def snapshot(self) -> Snapshot:
        own = f"{self.id}-{self._count}"
        call, name = await self._ask({"op": "snapshot", "name": own}, ())
        try:
            await self._ended(call, name, _CALL_SECONDS)
        except PathError as error:
            if call.errno == errno.ELOOP:  # what the program made, and not this machine's disk
                raise
            raise WorkspaceError(f"workspace {self.id}: a snapshot cannot be kept: {error}") from None
        return self._provider.keep(Snapshot(self._provider.name, "+".join((own, *self.layers))))

    async def fresh(self, *, image: str = "", build: str = "") -> "Workspace":
        spec = self._spec.for_grader(image, build)
        if image or build:
            return await self._provider.open(spec)
        return await self._provider.open(spec, Snapshot("bwrap", "+".join(self.layers)) if self.layers else None)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._lose("it is closed")
        await self._proxy.close()
        await self._provider.closed(self)

    def kill(self, name: int) -> None:
        """Kill what a request started."""
        self._count += 1
        killing = asyncio.ensure_future(self._send({"op": "kill", "of": name, "id": self._count}, ()))
        killing.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is gone already

    async def _ask(self, request: dict[str, Json], fds: Sequence[int]) -> tuple["_Call", int]:
        """Send a request. Raises PathError for one that is too long, WorkspaceError."""
        self._count += 1
        name = self._count
        call = self._calls[name] = _Call(asyncio.get_running_loop().create_future())
        try:
            await self._send({**request, "id": name}, fds)
        except BaseException:
            del self._calls[name]
            raise
        return call, name

    async def _send(self, request: dict[str, Json], fds: Sequence[int]) -> None:
        data = json.dumps(request).encode()
        if len(data) > _MOST_REQUEST:
            raise PathError(f"{request['op']}: its arguments have more than {_MOST_REQUEST} bytes; use a file")
        end = time.monotonic() + _CALL_SECONDS
        while True:
            if self._channel is None:
                raise WorkspaceError(f"workspace {self.id}: {self._why or 'it is closed'}")
            try:
                socket.send_fds(self._channel, [data], list(fds))
                return
            except BlockingIOError:  # the keeper has much to do
                if time.monotonic() > end:
                    self._lose("its keeper takes no requests")
                await asyncio.sleep(0.01)
            except OSError as error:
                self._lose(f"its keeper is gone ({error.strerror})")

    async def _ended(self, call: "_Call", name: int, seconds: float, *, killed: bool = False) -> bool:
        """Wait for the end of a request. True where it took longer than `seconds` and was killed, which is allowed
        where `killed`. Raises PathError, WorkspaceError."""
        late = False
        try:
            for patience in (seconds, _LATE):
                done, _ = await asyncio.wait({call.end}, timeout=patience)
                if done:
                    break
                if late or not killed:
                    self._lose(f"its keeper did not answer within {seconds:g} s")
                late = True
                self.kill(name)
            call.end.result()
        except asyncio.CancelledError:
            self.kill(name)
            raise
        finally:
            self._calls.pop(name, None)
        return late

    def _hear(self) -> None:
        """Take what the keeper says."""
        assert self._channel is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose("its keeper is gone")
            return
        said = json.loads(data)
        call = self._calls.get(said["id"])
        if call is None or call.end.done():
            for fd in fds:
                os.close(fd)
            return
        call.hear(said, fds, self.id)

    def _lose(self, why: str) -> None:
        """Give the workspace up; whoever waits hears it."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        self._why = why
        with contextlib.suppress(RuntimeError):  # the loop is closed
            asyncio.get_running_loop().remove_reader(channel)
        channel.close()
        for call in self._calls.values():
            call.lose(f"workspace {self.id}: {why}")


class _Call:
    """One request to a keeper."""

    def __init__(self, end: "asyncio.Future[None]") -> None:
        self.end, self.code, self.errno, self.stopped = end, 0, 0, ""
        self.fds: list[int] = []
        self.handed = asyncio.Event()

    def hear(self, said: Mapping[str, Json], fds: Sequence[int], workspace: str) -> None:
        """Take what is said of it."""
        self.fds += fds
        if said["event"] == "fd":
            self.handed.set()
            return
        self.code, self.stopped = int(said.get("code", 0)), str(said.get("stopped", ""))
        if said["event"] == "broken":
            self.lose(f"workspace {workspace}: {said['error']}")
        elif "error" in said and isinstance(said["error"], dict):
            self.errno = int(said["error"].get("errno") or 0)
            self.end.set_exception(PathError(str(said["error"]["text"])))
        else:
            self.end.set_result(None)
        self.handed.set()

    def lose(self, why: str) -> None:
        """End it as the machinery's fault."""
        self.handed.set()
        if not self.end.done():
            self.end.set_exception(WorkspaceError(why))
            self.end.exception()  # nobody may wait for it


class BwrapTerminal(Terminal):
    """The other end of a terminal inside."""

    def __init__(self, workspace: BwrapWorkspace, call: _Call, name: int, master: int) -> None:
        self._workspace, self._call, self._name = workspace, call, name
        self._master = master
        os.set_blocking(master, False)

    async def send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data:
            self._check()
            if self._call.end.done():
                raise WorkspaceError("the shell has ended")
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                ready = loop.create_future()
                loop.add_writer(self._master, _resolve, ready)
                try:
                    async with asyncio.timeout(_CALL_SECONDS):
                        await ready
                except TimeoutError:
                    raise WorkspaceError("a terminal takes no input") from None
                finally:
                    loop.remove_writer(self._master)
            except OSError:
                raise WorkspaceError("the shell has ended") from None

    async def read(self, seconds: float, most: int = 1 << 16) -> bytes | None:
        loop, end = asyncio.get_running_loop(), time.monotonic() + seconds
        while True:
            self._check()
            try:
                return os.read(self._master, most) or None
            except BlockingIOError:
                pass
            except OSError:  # nothing holds the other end any more
                return None
            if self._call.end.done():  # what it left in the background may still hold the terminal
                return None
            left = end - time.monotonic()
            if left <= 0:
                return b""
            ready = loop.create_future()
            loop.add_reader(self._master, _resolve, ready)
            try:
                await asyncio.wait({ready, self._call.end}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                loop.remove_reader(self._master)

    def _check(self) -> None:
        if self._master < 0:
            raise WorkspaceError("the terminal is closed")
        if self._call.end.done() and isinstance(error := self._call.end.exception(), WorkspaceError):
            raise error

    async def interrupt(self) -> None:
        running = self._foreground()
        await self.send(b"\x03")
        end = time.monotonic() + _INTERRUPT_SECONDS
        while running and running == self._foreground():
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running, signal.SIGKILL)
                return
            await asyncio.sleep(0.02)

    def _foreground(self) -> int:
        """The process group in the foreground; 0: the shell's own, or none."""
        with contextlib.suppress(OSError):
            own, group = (
                struct.unpack("i", fcntl.ioctl(self._master, request, bytes(4)))[0]
                for request in (_GET_SESSION, termios.TIOCGPGRP)
            )
            return 0 if group == own else int(group)
        return 0

    async def resize(self, rows: int, columns: int) -> None:
        self._check()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def close(self) -> None:
        if self._master >= 0:
            self._workspace.kill(self._name)
            os.close(self._master)
            self._master = -1


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


class _Whole:
    """A stream of at most `most` bytes; what is beyond is left out."""

    def __init__(self, most: int) -> None:
        self._most, self._data = most, bytearray()
        self.cut = False

    def add(self, data: bytes) -> None:
        """Take what comes next."""
        room = self._most - len(self._data)
        self._data += data[:room]
        self.cut = self.cut or len(data) > room

    def data(self) -> bytes:
        """What was kept."""
        return bytes(self._data)


class _Pipes:
    """The standard streams of a program, of which we hold the other ends."""

    def __init__(self, stdin: bytes, most: int, *, whole: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._stdin = memoryview(stdin)
        kind = _Whole if whole else HeadTail
        self.out, self.err = kind(most), kind(most)
        self._fds: list[int] = []
        self._theirs: list[int] = []

    def __enter__(self) -> "_Pipes":
        read, write = os.pipe()
        self._theirs.append(read)
        self._input = write
        os.set_blocking(write, False)
        for kept in (self.out, self.err):
            read, write = os.pipe()
            self._theirs.append(write)
            self._fds.append(read)
            os.set_blocking(read, False)
            self._loop.add_reader(read, self._take, read, kept)
        self._feed()
        if self._input >= 0:
            self._loop.add_writer(self._input, self._feed)
        return self

    def theirs(self) -> list[int]:
        """The program's ends: input, output, errors."""
        return self._theirs

    def _feed(self) -> None:
        try:
            while self._stdin:
                self._stdin = self._stdin[os.write(self._input, self._stdin[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it
            pass
        self._loop.remove_writer(self._input)
        os.close(self._input)
        self._input = -1

    def _take(self, fd: int, kept: HeadTail | _Whole) -> bool:
        """Take what has come; False where nothing has."""
        try:
            data = os.read(fd, 1 << 18)
        except BlockingIOError:
            return False
        if data:
            kept.add(data)
            return True
        self._loop.remove_reader(fd)
        return False

    def drain(self) -> None:
        """Take what lies in the pipes; what runs on in the background may write more, which nobody reads."""
        for fd, kept in zip(self._fds, (self.out, self.err), strict=True):
            for _ in range(64):  # a pipe's content, and a bit: somebody may go on writing
                if not self._take(fd, kept):
                    break

    def __exit__(self, *error: object) -> None:
        if self._input >= 0:
            self._loop.remove_writer(self._input)
            os.close(self._input)
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        for fd in self._theirs:
            os.close(fd)


def environment(spec: WorkspaceSpec) -> dict[str, str]:
    """What every program has."""
    base = getattr(sys, "base_prefix", sys.prefix)
    path = _PATH if os.path.exists("/usr/bin/python3") else f"{_PATH}:{base}/bin"
    given = {"PATH": path, "HOME": HOME, "USER": "user", "LOGNAME": "user", "LANG": "C.UTF-8", "TZ": "UTC",
             "TMPDIR": "/tmp", "SHELL": "/bin/sh"}  # fmt: skip
    if spec.network.hosts:
        given |= egress.VARIABLES
    return {**given, **spec.env}


def _shown(folders: Sequence[str]) -> list[str]:
    """What the default image shows of this machine."""
    base = os.path.realpath(getattr(sys, "base_prefix", sys.prefix))
    python = [] if os.path.exists("/usr/bin/python3") or base == "/" else [base]
    own = [link for link in _LINKS if os.path.isdir(link) and not os.path.islink(link)]
    return [place for place in dict.fromkeys([*_SYSTEM, *own, *python, *folders]) if os.path.exists(place)]


def _config(bwrap: str, folders: Sequence[str]) -> dict[str, Json]:
    """What the script is told."""
    cat = os.path.realpath(shutil.which("cat") or "/bin/cat")
    listed = subprocess.run(["ldd", cat], capture_output=True, text=True, check=False).stdout
    libraries = [os.path.realpath(path) for path in _LDD.findall(listed)]
    places = {path: f"/run/agentrl/{os.path.basename(name)}" for path, name in
              zip(libraries, _LDD.findall(listed), strict=True)}  # fmt: skip
    loader = next((place for place in places.values() if "/ld-" in place), "")
    wait = [loader, "--library-path", "/run/agentrl", "/run/agentrl/cat"] if loader else ["/run/agentrl/cat"]
    waiter = [["--ro-bind", path, place] for path, place in {**places, cat: "/run/agentrl/cat"}.items()]
    return {
        "bwrap": bwrap, "home": HOME, "filter": filter_program(watching=True).hex(), "socket_bytes": socket_bytes(),
        "apart": isolation({}, init=True), "everything": isolation({}, network=True, init=True),
        "binds": [["--ro-bind", place, place] for place in _shown(folders)], "waiter": waiter, "wait": wait,
    }  # fmt: skip


def made_state(folders: Sequence[str], ordinary: bool) -> Path:
    """Make the folder of a run's workspaces: the default image's own files, snapshots, and a place to mount. ordinary:
    give it to the ordinary user that keeps them."""
    state = Path(tempfile.mkdtemp(prefix=_PREFIX))
    skeleton = state / "skeleton"
    for name in ("mountpoint", "snapshots"):
        (state / name).mkdir(mode=0o755)
    for name in (*_FOLDERS, *(place[1:] for place in _shown(folders))):
        (skeleton / name).mkdir(parents=True, exist_ok=True)
    for top in (skeleton, state / "points"):  # the latter lies below an image, and has what may be missing there
        for name in ("proc", "dev", "run/agentrl", HOME[1:], "tmp"):
            (top / name).mkdir(parents=True, exist_ok=True)
        (top / "tmp").chmod(0o1777)
    for link in filter(os.path.islink, _LINKS):
        (skeleton / link[1:]).symlink_to(os.readlink(link))
    for name in _ETC:
        with contextlib.suppress(OSError):
            shutil.copyfile(f"/etc/{name}", skeleton / "etc" / name)
    with contextlib.suppress(OSError):
        shutil.copyfile("/etc/resolv.conf", skeleton / "etc/resolv.conf")
    user = f"{SANDBOX_USER}:{SANDBOX_USER}"
    (skeleton / "etc/passwd").write_text(f"root:x:0:0::/root:/bin/sh\nuser:x:{user}::{HOME}:/bin/sh\n")
    (skeleton / "etc/group").write_text(f"root:x:0:\nuser:x:{SANDBOX_USER}:\n")
    (skeleton / "etc/hosts").write_text("127.0.0.1 localhost sandbox\n")
    state.chmod(0o755)
    if ordinary:
        for place, _, files in os.walk(state):
            for path in (place, *(os.path.join(place, file) for file in files)):
                os.chown(path, ORDINARY_USER, ORDINARY_USER, follow_symlinks=False)
    return state


def _say_what_others_own(image: str) -> None:
    """Warn of what programs cannot change in a root folder, by what stands at its top. Permissions do not help: a copy
    in the workspace would have an owner or a group that it does not know."""
    own, found = (ORDINARY_USER, ORDINARY_USER) if os.getuid() == 0 else (os.getuid(), os.getgid()), {}
    with contextlib.suppress(OSError), os.scandir(image) as entries:
        found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries if not entry.is_symlink()}
    if others := sorted(name for name, has in found.items() if (has.st_uid, has.st_gid) != own):
        named = ", ".join([f"/{name}" for name in others[:_NAMED]] + ["..."] * (len(others) > _NAMED))
        _log.warning(
            "workspace.image %s: programs run as %d:%d, and can neither change nor make files in what belongs to "
            "others: %s; `chown -R %d:%d %s` gives it to them", image, *own, named, *own, image,
        )  # fmt: skip


def _sweep() -> None:
    """Remove what runs left that are dead: their processes have ended with them, their snapshots may lie about."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or not yet locked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(path)
        except OSError:
            continue  # its run lives
        finally:
            os.close(lock)
