"""`Container`: one workspace of the provider `docker`, and the terminals in it."""

import asyncio
import contextlib
import math
import posixpath
import secrets
import socket
import tarfile
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from aiodocker.stream import Stream

from agentrl.workspace import egress
from agentrl.workspace.provider import WorkspaceSpec
from agentrl.workspace.workspace import (
    HOME,
    MIB,
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
from agentrl_tools.workspaces import inside, tars
from agentrl_tools.workspaces.daemon import LONG_SECONDS, Daemon, DaemonError, Image
from agentrl_tools.workspaces.loopback import listen_inside
from agentrl_tools.workspaces.running import ContainerTerminal, RunningCall

_KILL_SECONDS = 20.0  # for what a call left to end
_LISTING_SECONDS = 60.0
_LISTING_BYTES = 64 * MIB
_MEASURED = 1.0  # seconds between two looks at what was written
_MOST_WORDS = 120_000  # bytes of one argument: the kernel takes 128 KiB
_LOOKS = 8  # at paths at once
_LINKS = 40
_KILLED = 137
_FOLDER, _LINK = 1 << 31, 1 << 27
_KINDS = _FOLDER | _LINK | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19  # a device, a FIFO, a socket, ...
"""Bits of a mode, as Go numbers them."""
_MODIFIED, _ADDED, _DELETED = 0, 1, 2
_CHANGES = {_MODIFIED: ChangeKind.MODIFIED, _ADDED: ChangeKind.ADDED, _DELETED: ChangeKind.DELETED}
_OURS = ("/dev", "/proc", "/sys", "/run/.containerenv", "/run/secrets", "/.dockerenv", "/etc/hosts", "/etc/hostname",
         "/etc/resolv.conf", "/etc/mtab")  # fmt: skip
"""What runtimes put into a container."""
_NO_PROGRAM = ("executable file not found", "no such file or directory", "permission denied", "exec format error",
               "too many levels of symbolic links", "input/output error")  # fmt: skip
"""How a daemon says that the shell of the image is gone."""
_FULL = ("resource temporarily unavailable", "cannot allocate memory", "no space left", "too many open files")
"""How it says that a limit of the workspace is reached."""
_NO_SPACE = "no space left"
"""How it says that a disk is full: its own, unless the workspace has written what it may."""
_NO_USER = ("unable to find user", "no matching entries in passwd", "no users found", "unable to find group")
_NO_PATH = ("not a directory", "is a directory", "file exists", "read-only file system", "file name too long",
            "too many levels of symbolic links", "permission denied", "no such file")  # fmt: skip
"""How a daemon says that a path is wrong."""


class Opener(Protocol):
    """What opens containers, and knows which are open."""

    @property
    def measured(self) -> bool:
        """Whether what is written has to be measured."""

    @property
    def listens(self) -> bool:
        """Whether containers can listen."""

    async def keep(self, container: "Container", daemon: Daemon) -> Snapshot:
        """Keep the files of a container as an image. Raises DaemonError."""

    async def fresh(self, spec: WorkspaceSpec, snapshot: str) -> "Container":
        """Open a snapshot, or without one an image. Raises WorkspaceError, UserError."""

    async def closed(self, container: "Container", daemon: Daemon) -> None:
        """Note that one is closed."""


class Container(Workspace):
    """provider: whose it is. daemon: where it is. snapshot: the name of what it is opened from; empty: its image."""

    def __init__(
        self, provider: Opener, daemon: Daemon, name: str, spec: WorkspaceSpec, image: Image, snapshot: str
    ) -> None:
        self.id = name
        self.home = image.folder if image.folder not in ("", "/") else HOME
        self.container = ""
        """The daemon's name of it."""
        self._provider, self._daemon, self._spec, self._image = provider, daemon, spec, image
        self._snapshot = snapshot
        self.listens = provider.listens
        self._proxy = egress.EgressProxy(spec.network.hosts)
        self._owner: tuple[int, int] | None = None
        self._config: dict[str, Any] = {}
        self._why = ""
        self._stops, self._stopped = 0, ""
        self._restarts = asyncio.Lock()
        self._written, self._running = asyncio.Event(), 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def begin(self, config: dict[str, Any]) -> None:
        """Create and start the container. Raises DaemonError."""
        self._config = config
        containers = self._daemon.docker.containers
        made = await self._daemon.call("create a container", containers.create(config))
        self.container = made.id
        await self._daemon.call("start a container", made.start())
        await self._let_out()
        if self._provider.measured:
            self._later(self._measure())
        if self._spec.limits.seconds != math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._spec.limits.seconds, self._end_of_time)

    async def _let_out(self) -> None:
        """Let the hosts of a list be reached, anew where the container was started again. Raises WorkspaceError."""
        await self._proxy.close()
        if self._spec.network.hosts:
            await self._proxy.serve(await self.listen(egress.PORT))

    async def listen(self, port: int) -> socket.socket:
        if not self.listens:
            return await super().listen(port)
        pid, name = (await self._state()).get("Pid"), self._config["Entrypoint"][-1]
        try:
            return await listen_inside(int(pid or 0), name, port)
        except OSError as error:
            why = error.strerror or error
            raise WorkspaceError(f"workspace {self.id}: cannot listen at port {port} inside: {why}") from None

    def _end_of_time(self) -> None:
        self._why = "its time is over"
        self._later(self.close())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _check(self) -> None:
        if self._why:
            raise WorkspaceError(f"workspace {self.id}: {self._why}")

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
        call = RunningCall(stdin, output)
        limits, folder, began = self._spec.limits, self.absolute(cwd or "."), time.monotonic()
        blocks = str(max(1, limits.disk // 512))
        line = ["/bin/sh", "-c", inside.EXEC, "sh", str(len(stdin)), str(limits.descriptors), blocks, folder, *words]
        options = {
            "stdin": True,
            "environment": {**(env or {}), inside.MARK: call.name},
            "user": user or self._image.user,
        }
        stops = self._stops
        try:
            execution, stream = await self._started(line, options)
        except _NoProgramError as error:
            return ExecResult(127, b"", f"{error}\n".encode(), seconds=time.monotonic() - began)
        self._running += 1
        self._written.set()
        try:
            timed_out = await self._heard(call, execution, stream, seconds, str(options["user"]))
        except asyncio.CancelledError:
            self._later(self._killed(call.name, str(options["user"])))
            raise
        finally:
            self._running -= 1
            with contextlib.suppress(Exception):
                await stream.close()
            self._written.set()
        self._check()
        if call.code == inside.NO_FOLDER and call.err.ended and not call.err.data():
            raise PathError(f"{folder}: no such folder")
        stopped = self._stopped if self._stops != stops else ""
        return ExecResult(
            124 if timed_out else call.code, call.out.data(), call.err.data(), call.out.cut or call.err.cut, timed_out,
            stopped, time.monotonic() - began,
        )  # fmt: skip

    async def _started(self, words: Sequence[str], options: dict[str, Any]) -> tuple[Any, Stream]:
        """Start a program; where the container was stopped, it is started again. Raises PathError, WorkspaceError."""
        for again in (False, True):
            async with self._restarts:
                self._check()
            try:
                return await self._daemon.started("start a program", self.container, words, **options)
            except DaemonError as error:
                text = str(error).lower()
                if any(words in text for words in _NO_USER):
                    raise PathError(f"user {options.get('user')!r}: the image has no such user") from None
                state = await self._state()
                if _NO_SPACE in text and not await self._is_full():
                    raise
                if state.get("Running") and any(words in text for words in _FULL):
                    raise _NoProgramError("no program can be started: the workspace's limits are reached") from None
                if state.get("Running") and any(words in text for words in _NO_PROGRAM):
                    raise _NoProgramError("/bin/sh of the image cannot be started") from None
                if again or state.get("Running"):
                    raise
            self._stops, self._stopped = self._stops + 1, "its first process was killed"
            async with self._restarts:
                await self._daemon.call("start a container", self._handle.start())
                await self._let_out()
        raise AssertionError("not reached")

    async def _heard(self, call: RunningCall, execution: Any, stream: Stream, seconds: float, user: str) -> bool:
        """Wait for the end of a program, which is killed after `seconds`. True where it was. Raises WorkspaceError."""
        carrying = asyncio.ensure_future(call.carry(stream))
        try:
            try:
                async with asyncio.timeout(seconds):
                    await self._daemon.call("carry output", asyncio.shield(carrying), seconds + LONG_SECONDS)
                    call.code = await self._exit_code(execution, seconds + LONG_SECONDS)
                    if call.code == _KILLED:
                        await self._check_lives()
                    return False
            except TimeoutError:
                pass
            await self._killed(call.name, user)
            await asyncio.wait({carrying}, timeout=_KILL_SECONDS)  # a daemon waits until its output is read
            try:
                await self._exit_code(execution, _KILL_SECONDS)
            except DaemonError:
                raise
            except WorkspaceError:
                await self.end_processes()  # it shed its mark, and holds its shell
            return True
        finally:
            carrying.cancel()
            await asyncio.wait({carrying})

    async def _check_lives(self) -> None:
        """Raise WorkspaceError where a program was killed with its container, which may still be about to go."""
        async with self._restarts:  # our own kill programs, too
            for pause in (0.0, 0.2, 1.0):
                await asyncio.sleep(pause)
                if (await self._state()).get("Running"):
                    return
        raise WorkspaceError(f"workspace {self.id}: its container was ended")

    async def _exit_code(self, execution: Any, seconds: float) -> int:
        """Of a program whose output is at its end. Raises WorkspaceError where it runs on."""
        pause, end = 0.005, time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                said = await self._daemon.call("say how a program ended", execution.inspect())
            except DaemonError as error:
                if "exec session" in str(error) and await self._state():  # forgotten in a restart
                    return _KILLED
                raise
            if not isinstance(said.get("Running"), bool) or not isinstance(said.get("ExitCode"), int | None):
                raise DaemonError(f"workspace {self.id}: the daemon does not say how a program ended")
            if not said["Running"]:
                return int(said["ExitCode"] or 0)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.2)
        raise WorkspaceError(f"workspace {self.id}: a program cannot be ended")

    async def _killed(self, name: str, user: str) -> None:
        """Kill what a call started. Raises WorkspaceError."""
        await self._script(inside.KILL, f"{inside.MARK}={name}", user=user, seconds=_KILL_SECONDS)

    async def _script(
        self, script: str, *words: str, user: str = "0", stdin: bytes = b"", seconds: float = _KILL_SECONDS
    ) -> tuple[int, bytes]:
        """Run a script of ours inside: its exit code (124: it took too long) and output. Raises WorkspaceError."""
        call = RunningCall(b"", _LISTING_BYTES, marked=False)
        try:
            options = {"user": user, "stderr": False}
            execution, stream = await self._started(["/bin/sh", "-c", script, "sh", *words], options)
        except _NoProgramError:
            return 127, b""
        try:
            async with asyncio.timeout(seconds):
                await self._daemon.call("carry a script's output", call.carry(stream), seconds + LONG_SECONDS)
                return await self._exit_code(execution, seconds), call.out.data()
        except TimeoutError:
            return 124, b""
        finally:
            with contextlib.suppress(Exception):
                await stream.close()

    @property
    def _handle(self) -> Any:
        return self._daemon.docker.containers.container(self.container)

    async def _state(self) -> dict[str, Any]:
        """What the daemon says of the container. Raises WorkspaceError where it is gone."""
        self._check()
        try:
            said = await self._daemon.call("inspect a container", self._handle.show())
        except DaemonError as error:
            if error.status == 404:
                self._why = "its container is gone"
                self._check()
            raise
        state = said.get("State") if isinstance(said, dict) else None
        if not isinstance(state, dict):
            raise DaemonError(f"workspace {self.id}: the daemon does not say how the container is")
        return state

    async def check_running(self) -> None:
        """Raise WorkspaceError where the container is gone."""
        await self._state()

    async def run_on_call(self, script: str, name: str) -> None:
        """Run a script of ours on what a call started, as its user. Raises WorkspaceError."""
        await self._script(script, f"{inside.MARK}={name}", user=self._image.user)

    async def _measure(self) -> None:
        """Kill everything where more was written than may be. What a daemon does wrong the next call will say."""
        pause, before, excess = _MEASURED, 0, self._spec.limits.disk
        while True:
            if not self._running:
                await self._written.wait()
                self._written.clear()
                pause = _MEASURED
            await asyncio.sleep(pause)
            with contextlib.suppress(WorkspaceError):
                written = await self._size()
                pause = min(2 * pause, 8 * _MEASURED) if written == before else _MEASURED
                before = written
                if written > excess:
                    self._stops += 1
                    self._stopped = f"more than {self._spec.limits.disk // MIB} MiB were written"
                    await self.end_processes()
                excess = max(self._spec.limits.disk, written)  # so that there is time to remove what is too much

    async def _size(self) -> int:
        """Bytes that were written in it, as the daemon counts them. Raises DaemonError."""
        said = await self._daemon.json("measure", f"containers/{self.container}/json", {"size": "1"})
        written = said.get("SizeRw") if isinstance(said, dict) else 0
        return written if isinstance(written, int) else 0

    async def _is_full(self, more: int = 0) -> bool:
        """Whether what was written reaches the limit with `more` bytes. Raises DaemonError."""
        counted = 1 if self._provider.measured else 2  # a quota counts blocks, of which small files use a part
        return counted * (await self._size() + more) >= self._spec.limits.disk

    async def terminal(self, *, rows: int = 40, columns: int = 120, env: dict[str, str] | None = None) -> Terminal:
        name, limits = secrets.token_hex(8), self._spec.limits
        words = ["/bin/sh", "-c", inside.SHELL, "sh", str(rows), str(columns), str(limits.descriptors),
                 str(max(1, limits.disk // 512)), self.home]  # fmt: skip
        environment = {"TERM": "xterm", **(env or {}), inside.MARK: name}
        try:
            execution, stream = await self._started(
                words, {"tty": True, "stdin": True, "environment": environment, "user": self._image.user}
            )
        except _NoProgramError as error:
            raise PathError(str(error)) from None
        return ContainerTerminal(self, self._daemon, execution, stream, name)

    async def _look(self, path: str, container: str = "") -> dict[str, Any] | None:
        """What stands at a path, a link not followed; None: nothing. Raises WorkspaceError."""
        self._check()

        async def looked() -> dict[str, Any]:
            place = f"containers/{container or self.container}/archive"
            async with self._daemon.answer("HEAD", place, {"path": path}) as (status, _):
                return {**status, "mode": int(status["mode"]), "size": int(status["size"])}

        try:
            return await self._daemon.call("look at a path", looked())
        except DaemonError as error:
            if not 400 <= error.status < 900:
                raise
            await self._state()
            if error.status != 404:  # and no answer to say why
                raise PathError(f"{path}: too many links, or a file where a folder should be") from None
        return None

    async def read(self, path: str, *, offset: int = 0, limit: int = READ) -> bytes:
        place = self.absolute(path)
        for _ in range(_LINKS):
            self._check()
            reading = self._content(place, max(0, offset), max(0, min(limit, READ)))
            try:
                found = await self._daemon.call("read a file", reading, LONG_SECONDS)
            except DaemonError as error:
                if error.status != 404:
                    raise self._of_path(path, error) from None
                await self._state()
                raise PathError(f"{path}: no such file") from None
            if isinstance(found, bytes):
                return found
            place = posixpath.join(posixpath.dirname(place), found)
        raise PathError(f"{path}: too many links")

    async def _content(self, path: str, offset: int, limit: int) -> bytes | str:
        """Bytes of a file, or the path that a link names."""
        place = f"containers/{self.container}/archive"
        async with self._daemon.answer("GET", place, {"path": path}) as (_, response):
            pieces = tars.Pieces(response.content.iter_chunked(1 << 18))
            try:
                member = await tars.first_member(pieces)
            except tarfile.HeaderError:
                raise PathError(f"{path}: no such file") from None
            if member.issym():
                return member.linkname
            if not member.isreg():
                raise PathError(f"{path}: is a folder" if member.isdir() else f"{path}: is no file")
            await pieces.skip(min(offset, member.size))
            return await pieces.take(max(0, min(limit, member.size - offset)))

    def _of_path(self, path: str, error: DaemonError) -> Exception:
        """The error of a path, where a daemon's is one."""
        text = str(error).lower()
        said = next((words for words in _NO_PATH if words in text), None)
        return error if said is None or not 400 <= error.status < 900 else PathError(f"{path}: {said}")

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        if len(data) > self._spec.limits.disk:
            raise PathError(f"{path}: more than {self._spec.limits.disk // MIB} MiB")
        place = self.absolute(path)
        if place == "/":
            raise PathError(f"{path}: is a folder")
        status = await self._look(place)
        for _ in range(_LINKS):
            if status is None or not status["mode"] & _LINK:
                break
            target = str(status.get("linkTarget") or "")
            if target == place:
                break
            place = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            status = await self._look(place)
        if status is not None and status["mode"] & _KINDS:
            raise PathError(f"{path}: is a folder" if status["mode"] & _FOLDER else f"{path}: is no file")
        top = posixpath.dirname(place)
        while (above := await self._look(top)) is None:
            top = posixpath.dirname(top)
        if not above["mode"] & _FOLDER and not above.get("isDir") and not above["mode"] & _LINK:
            raise PathError(f"{path}: {top} is no folder")
        bits = mode if mode is not None else 0o644 if status is None else status["mode"] & 0o777
        tar = tars.of_file(top, place, data, bits & 0o7777, await self._owned())
        await self._put(path, top, tar)

    async def unpack(self, tar: bytes) -> None:
        if len(tar) > 2 * self._spec.limits.disk:
            raise PathError(f"a tar of more than {2 * self._spec.limits.disk // MIB} MiB")
        clean = await asyncio.to_thread(tars.cleaned, tar, await self._owned())
        await self._put("the tar", "/", clean)

    async def _put(self, path: str, top: str, tar: bytes) -> None:
        self._check()

        async def put() -> None:
            place = f"containers/{self.container}/archive"
            async with self._daemon.answer("PUT", place, {"path": top}, tar) as (_, response):
                await response.read()

        try:
            await self._daemon.call("write files", put(), LONG_SECONDS)
        except DaemonError as error:
            if error.status == 404:
                await self._state()
                raise PathError(f"{path}: {top}: no such folder") from None
            if _NO_SPACE in str(error).lower() and await self._is_full(len(tar)):
                raise PathError(f"{path}: {_NO_SPACE}") from None
            raise self._of_path(path, error) from None
        self._written.set()

    async def _owned(self) -> tuple[int, int]:
        """As whose files are written: those of the image's user."""
        if self._owner is None:
            self._owner = 0, 0
            if self._image.user not in ("", "0", "root"):
                said = (await self._script("id -u; id -g", user=self._image.user))[1].split()
                if len(said) == 2 and all(word.isdigit() for word in said):
                    self._owner = int(said[0]), int(said[1])
        return self._owner

    async def listing(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> list[FileInfo]:
        mark = secrets.token_hex(8)
        words = (self.absolute(path), str(depth), mark)
        code, said = await self._script(inside.LIST, *words, seconds=_LISTING_SECONDS)
        inside.check_listing(path, code)
        return inside.parsed_listing(said, mark)[:limit]

    async def pack(self, paths: Sequence[str]) -> bytes:
        most = 2 * self._spec.limits.disk
        found: dict[str, bytes] = {}
        others = []
        for path in dict.fromkeys(map(self.absolute, paths)):
            tar = await self._packed(path, most - sum(map(len, found.values())))
            if tar is None:
                others.append(path)
            else:
                found[path] = tar
        links = await self._links(others) if others else {}
        try:
            return await asyncio.to_thread(tars.joined, found, links)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise DaemonError(f"workspace {self.id}: the daemon's tar cannot be read: {error}") from None

    async def _packed(self, path: str, most: int) -> bytes | None:
        """The daemon's tar of a path; None where that is a link, or nothing. Raises PathError, WorkspaceError."""

        async def packed() -> bytes | None:
            place = f"containers/{self.container}/archive"
            async with self._daemon.answer("GET", place, {"path": path}) as (status, response):
                if int(status["mode"]) & _LINK:
                    return None
                data = bytearray()
                async for piece in response.content.iter_chunked(1 << 18):
                    data += piece
                    if len(data) > most:
                        raise PathError(f"{path}: more than {self._spec.limits.disk // MIB} MiB")
                return bytes(data)

        self._check()
        try:
            return await self._daemon.call("pack files", packed(), LONG_SECONDS)
        except DaemonError as error:
            if error.status != 404:
                raise self._of_path(path, error) from None
        await self._state()
        return None

    async def _links(self, paths: Sequence[str]) -> dict[str, str]:
        """Where links lead; what is no link is left out."""
        mark = secrets.token_hex(8)
        said = (await self._script(inside.LINKS, mark, *paths))[1].decode(errors="surrogateescape")
        answers = said.split(mark)[1:]
        return {path: answer.removesuffix("\n") for path, answer in zip(paths, answers, strict=False) if answer}

    async def end_processes(self) -> None:
        self._check()
        async with self._restarts:
            await self._daemon.call("restart a container", self._handle.restart(t=0))
            await self._let_out()
        if not (await self._state()).get("Running"):
            raise WorkspaceError(f"workspace {self.id}: its container does not run any more")

    async def snapshot(self) -> Snapshot:
        await self._state()
        return await self._provider.keep(self, self._daemon)

    async def diff(self, limit: int = 10_000) -> list[Change]:
        await self._state()
        said = await self._daemon.json("compare files", f"containers/{self.container}/changes", {}, LONG_SECONDS)
        try:
            changed = sorted((str(one["Path"]), int(one["Kind"])) for one in said or [])
        except (TypeError, KeyError, ValueError):
            raise DaemonError(f"workspace {self.id}: the daemon does not say what has changed") from None
        changed = [(path, kind) for path, kind in changed if not _is_ours(path)]
        before = await self._before() if any(kind == _DELETED for _, kind in changed) else ""
        changes: list[Change] = []
        try:
            while changed and len(changes) < limit:
                some, changed = changed[:_LOOKS], changed[_LOOKS:]
                for change in await asyncio.gather(*(self._change(path, kind, before) for path, kind in some)):
                    if change is not None:
                        changes.append(change)
        finally:
            if before:
                await self._daemon.remove_container(before)
        return changes[:limit]

    async def _before(self) -> str:
        """A container that does not run, to look at what was deleted."""
        creating = self._daemon.docker.containers.create(self._config)
        return str((await self._daemon.call("create a container", creating)).id)

    async def _change(self, path: str, kind: int, before: str) -> Change | None:
        status = await self._look(path, before if kind == _DELETED else "")
        file = _kind(int(status["mode"])) if status is not None else FileKind.LINK  # which leads nowhere
        size = int(status["size"]) if status is not None and file is FileKind.FILE and kind != _DELETED else 0
        if file is FileKind.FOLDER and (kind == _MODIFIED or (kind == _ADDED and self._made_by_us(path))):
            return None
        return Change(path, _CHANGES.get(kind, ChangeKind.MODIFIED), file, size)

    def _made_by_us(self, path: str) -> bool:
        """Whether a folder is there since programs begin in one that the image has not."""
        return not self._image.folder and (self.home == path or self.home.startswith(f"{path}/"))

    async def fresh(self, *, image: str = "", build: str = "") -> "Workspace":
        return await self._provider.fresh(self._spec.for_grader(image, build), "" if image or build else self._snapshot)

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
        await self._proxy.close()
        if self.container:
            with contextlib.suppress(WorkspaceError):  # a daemon that is gone; the sweep of a later run removes it
                await self._daemon.remove_container(self.container)
        await self._provider.closed(self, self._daemon)


class _NoProgramError(Exception):
    """The shell of the image cannot be started any more: somebody in it removed it."""


def _kind(mode: int) -> FileKind:
    if mode & _FOLDER:
        return FileKind.FOLDER
    if mode & _LINK:
        return FileKind.LINK
    return FileKind.OTHER if mode & _KINDS else FileKind.FILE


def _is_ours(path: str) -> bool:
    return any(path == ours or path.startswith(f"{ours}/") for ours in _OURS)
