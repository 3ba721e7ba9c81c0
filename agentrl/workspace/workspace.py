"""`Workspace`: the files and processes of one rollout, behind one interface whatever provides them.

What a program does wrong is in its `ExecResult`; what is wrong with a path raises PathError, which a model can act on.
What the machinery does wrong raises WorkspaceError: the rollout is FAILED with the boundary `workspace`, and is tried
again. Every call ends within a deadline, and what it returns is bounded.
"""

import contextlib
import posixpath
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentrl.errors import PathError as PathError
from agentrl.errors import WorkspaceError as WorkspaceError
from agentrl.workspace.archive import packed_as, unpacked_to

MIB = 1 << 20
OUTPUT = 1 << 20
"""Bytes kept of each output of a program, unless said otherwise."""
READ = 16 * MIB
"""Bytes that one `read` returns at most."""
HOME = "/home/user"
"""Where programs begin, unless an image says otherwise."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a program came to."""

    exit_code: int
    """Of the program; 128 + N where signal N ended it; 124 where it ran out of time."""
    stdout: bytes = b""
    """What it printed: the beginning and the end where it is longer than was to be kept."""
    stderr: bytes = b""
    """What it wrote to standard error, kept likewise."""
    truncated: bool = False
    """Some output was left out."""
    timed_out: bool = False
    """It was killed since its time was over."""
    stopped: str = ""
    """The limit of the workspace for which everything in it was killed, in words; empty: none."""
    seconds: float = 0.0
    """Wall time."""

    @property
    def ok(self) -> bool:
        """True where it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and not self.stopped

    def text(self) -> str:
        """Both outputs as text, standard error last."""
        return (self.stdout + self.stderr).decode(errors="replace")


class FileKind(StrEnum):
    """What stands at a path."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"  # a FIFO, a socket, a device


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a folder."""

    path: str
    """Relative to the folder that was listed."""
    kind: FileKind
    """What it is; a link is not followed."""
    size: int
    """Bytes of a file; 0 of all else."""
    mode: int
    """Permission bits."""


class ChangeKind(StrEnum):
    """How a path differs from before."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """One path that is not as it was."""

    path: str
    """Absolute."""
    kind: ChangeKind
    """How it differs."""
    file: FileKind
    """What stands there now, or stood there."""
    size: int = 0
    """Bytes of a file as it is now."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a workspace at one moment, by the provider that has them; processes are not in it. It is kept until
    the provider is told to `forget` it, or closes."""

    provider: str
    """The name of the provider that made it."""
    name: str
    """In that provider's words."""


class Terminal(ABC):
    """A shell on a terminal of its own, which lives until it is closed or its workspace is: its variables, folder and
    background jobs last from one `send` to the next."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Type `data`. Raises WorkspaceError where the shell or its workspace is gone."""

    @abstractmethod
    async def read(self, seconds: float, most: int = 1 << 16) -> bytes | None:
        """What was written since, at most `most` bytes, as soon as there is any; b"" where there is none within
        `seconds`; None where the shell has ended and all was read. Raises WorkspaceError."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Interrupt what runs in the foreground, as Ctrl-C does; what ignores that is killed. The shell lives on."""

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal in characters."""

    @abstractmethod
    async def close(self) -> None:
        """End the shell and what it started. May be called twice."""


class Workspace(ABC):
    """One file system with its processes. Several calls may be under way at once. Paths are absolute, or relative to
    `home`."""

    id: str
    """Unique among those of a provider; for logs and for labels."""
    home: str = HOME
    """The folder in which programs start."""
    listens: bool = False
    """Whether it can `listen`."""

    @abstractmethod
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
        """Run a program to its end, or for `seconds`. command: its words, or a script for `sh`. env: what is added to
        the environment. user: one of the image's, where the provider has users. output: bytes kept of each output.

        What it leaves in the background runs on. Raises PathError (`cwd`, `command_words`), WorkspaceError."""

    @abstractmethod
    async def terminal(self, *, rows: int = 40, columns: int = 120, env: dict[str, str] | None = None) -> Terminal:
        """Open a shell on a terminal of its own, in `home`. Raises WorkspaceError."""

    @abstractmethod
    async def read(self, path: str, *, offset: int = 0, limit: int = READ) -> bytes:
        """Bytes of a file from `offset` on, at most `limit` (never above READ). Raises PathError, WorkspaceError."""

    @abstractmethod
    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file whole, with the folders above it. mode: permission bits; None: kept, or 0644 where it is new.
        Raises PathError, WorkspaceError."""

    @abstractmethod
    async def listing(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> list[FileInfo]:
        """Entries of a folder, sorted by path, at most `limit`. depth: 1 for its own, 2 for those of its folders, too,
        and so on; 0 for the path itself, which may be a file. Raises PathError, WorkspaceError."""

    @abstractmethod
    async def pack(self, paths: Sequence[str]) -> bytes:
        """Files and folders as a tar whose names are relative to /; a path that is not there is left out; links are
        packed as links, FIFOs, sockets and devices not at all. Raises PathError (more than the limit of the disk),
        WorkspaceError."""

    @abstractmethod
    async def unpack(self, tar: bytes) -> None:
        """Write what `pack` made, or any tar of files, folders and links relative to /. Raises PathError,
        WorkspaceError."""

    async def listen(self, port: int) -> socket.socket:
        """Listen at a port of the loopback inside, and return the socket, whose connections come to this process.
        Raises WorkspaceError, also where the provider cannot."""
        raise WorkspaceError(f"workspace {self.id}: its provider carries no connections from inside")

    async def upload(self, local: Path, remote: str) -> None:
        """Copy a file or folder of this machine to a path. Raises OSError, PathError, WorkspaceError."""
        await self.unpack(packed_as(local, self.absolute(remote)))

    async def download(self, remote: str, local: Path) -> None:
        """Copy a file or folder to this machine; what the tar names outside of it is refused. Raises OSError,
        PathError, WorkspaceError."""
        unpacked_to(await self.pack([remote]), self.absolute(remote), local)

    @abstractmethod
    async def end_processes(self) -> None:
        """Kill every process in it, whatever it ignores; files stay. Raises WorkspaceError."""

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """Keep the files as they are. Raises WorkspaceError."""

    @abstractmethod
    async def diff(self, limit: int = 10_000) -> list[Change]:
        """What differs from the image or snapshot that it was opened from, by path, at most `limit` changes. Folders
        are listed only where they were added or deleted. Raises WorkspaceError."""

    async def original(self, paths: Sequence[str], limit: int = READ) -> dict[str, bytes]:
        """Files as they were when it was opened, by absolute path, at most `limit` bytes of each; what was no file is
        left out. Raises WorkspaceError."""
        fresh, found = await self.fresh(), dict[str, bytes]()
        try:
            for path in paths:
                with contextlib.suppress(PathError):
                    found[path] = await fresh.read(path, limit=limit)
        finally:
            await fresh.close()
        return found

    @abstractmethod
    async def fresh(self, *, image: str = "", build: str = "") -> "Workspace":
        """Open another one from what this one was opened from, with the same limits, as the image's user and without a
        network: where a grader works. image, build: another image that it is opened from instead, as in
        `WorkspaceSpec`. Raises WorkspaceError, UserError: the provider cannot do that."""

    @abstractmethod
    async def close(self) -> None:
        """End its processes and drop its files. May be called twice, and during a call."""

    def absolute(self, path: str) -> str:
        """A path as an absolute one, without `..` and doubled slashes."""
        joined = posixpath.normpath(posixpath.join(self.home, path))
        return "/" + joined.lstrip("/")


def command_words(command: Sequence[str] | str, most: int, env: Mapping[str, str] | None = None) -> list[str]:
    """Check a command and return its words; a script's are those of `sh`. most: bytes that one word may have; the
    kernel takes 128 KiB. env: what is added to the environment. Raises PathError: no word, one that is too long, or
    text that no program can be given (zero bytes, lone surrogates, a variable's name that is empty or holds `=`)."""
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    variables = [f"{name}={value}" for name, value in (env or {}).items()]
    for name in env or {}:
        if not name or "=" in name:
            raise PathError(f"{name!a} is no name of a variable")
    for what, texts in (("a command", words), ("a variable", variables)):
        if any("\0" in text for text in texts):
            raise PathError(f"{what} holds no zero bytes")
        try:
            sizes = [len(text.encode(errors="surrogateescape")) for text in texts]
        except UnicodeEncodeError as error:
            raise PathError(f"{what} is text in UTF-8, and {error.object[error.start]!a} is no character") from None
        if max(sizes, default=0) > most:
            raise PathError(f"{what} has more than {most} bytes; write a longer one to a file")
    if not words:
        raise PathError("a command has at least one word")
    return words
