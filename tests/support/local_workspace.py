"""A workspace without walls, in a temporary folder: for tests of tools, where no provider may be had."""

import asyncio
import fcntl
import io
import os
import pty
import shutil
import signal
import struct
import subprocess
import tarfile
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import PathError, WorkspaceError
from agentrl.workspace.workspace import (
    OUTPUT,
    READ,
    Change,
    ExecResult,
    FileInfo,
    FileKind,
    Snapshot,
    Terminal,
    Workspace,
)


class LocalTerminal(Terminal):
    """A shell on a pty of this machine."""

    def __init__(self, shell: Sequence[str], home: str, env: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        os.set_blocking(self.master, False)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            list(shell), stdin=slave, stdout=slave, stderr=slave, cwd=home, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    async def send(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self.master, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError as error:
                raise WorkspaceError(f"the terminal is gone: {error}") from None

    async def read(self, seconds: float, most: int = 1 << 16) -> bytes | None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        try:
            return os.read(self.master, most) or None
        except BlockingIOError:
            pass
        except OSError:
            return None
        loop.add_reader(self.master, ready.set)
        try:
            async with asyncio.timeout(seconds):
                await ready.wait()
            return os.read(self.master, most) or None
        except (TimeoutError, BlockingIOError):
            return b""
        except OSError:
            return None
        finally:
            loop.remove_reader(self.master)

    async def interrupt(self) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            group = struct.unpack("i", fcntl.ioctl(self.master, termios.TIOCGPGRP, b"\0\0\0\0"))[0]
            if number == signal.SIGKILL and group == self.process.pid:
                return
            os.killpg(group, number)
            await asyncio.sleep(0.2)

    async def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def close(self) -> None:
        if self.process.returncode is None:
            listed = subprocess.run(["ps", "-o", "pid=", "-s", str(self.process.pid)], capture_output=True, text=True)
            for pid in listed.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.wait()
            os.close(self.master)


class LocalWorkspace(Workspace):
    """A folder of this machine, which is also its home."""

    def __init__(self, shell: Sequence[str] = ("bash", "--norc"), begin: bytes = b"") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="workspace-")).resolve()
        self.id = self.folder.name
        self.home = str(self.folder)
        self.shell = shell
        self.env = {"PATH": os.environ["PATH"], "HOME": self.home, "TERM": "dumb"}
        self.terminals: list[LocalTerminal] = []

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
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        process = await asyncio.create_subprocess_exec(
            *words, cwd=cwd or self.home, env=self.env | (env or {}), stdin=-1, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(process.communicate(stdin), seconds)
        return ExecResult(process.returncode or 0, out, err)

    async def terminal(self, *, rows: int = 40, columns: int = 120, env: dict[str, str] | None = None) -> Terminal:
        self.terminals.append(LocalTerminal(self.shell, self.home, self.env | (env or {})))
        return self.terminals[-1]

    async def read(self, path: str, *, offset: int = 0, limit: int = READ) -> bytes:
        try:
            return Path(self.absolute(path)).read_bytes()[offset : offset + limit]
        except OSError as error:
            raise PathError(f"{path}: {error.strerror}") from None

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        file = Path(self.absolute(path))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:
            raise PathError(f"{path}: {error.strerror}") from None

    async def listing(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> list[FileInfo]:
        top = Path(self.absolute(path))
        if not top.exists():
            raise PathError(f"{path}: No such file or directory")
        if depth == 0:
            return [_info(top, ".")]
        if not top.is_dir():
            raise PathError(f"{path}: Not a directory")
        found = [p for p in top.rglob("*") if len(p.relative_to(top).parts) <= depth]
        return sorted((_info(p, str(p.relative_to(top))) for p in found), key=lambda info: info.path)[:limit]

    async def pack(self, paths: Sequence[str]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for path in map(self.absolute, paths):
                if os.path.lexists(path):
                    tar.add(path, arcname=path.lstrip("/"))
        return buffer.getvalue()

    async def unpack(self, tar: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(tar)) as source:
            source.extractall("/", filter="tar")

    async def end_processes(self) -> None:
        for terminal in self.terminals:
            await terminal.close()

    async def snapshot(self) -> Snapshot:
        raise WorkspaceError("this one keeps nothing")

    async def diff(self, limit: int = 10_000) -> list[Change]:
        return []

    async def fresh(self) -> "Workspace":
        return LocalWorkspace(self.shell)

    async def close(self) -> None:
        await self.end_processes()
        shutil.rmtree(self.folder, ignore_errors=True)


def _info(path: Path, name: str) -> FileInfo:
    kind = (
        FileKind.LINK if path.is_symlink()
        else FileKind.FOLDER if path.is_dir() else FileKind.FILE if path.is_file() else FileKind.OTHER
    )  # fmt: skip
    stat = path.lstat()
    return FileInfo(name, kind, stat.st_size if kind is FileKind.FILE else 0, stat.st_mode & 0o7777)
