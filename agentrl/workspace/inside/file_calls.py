"""Reads and writes files for the host, in a fork that has the rights of a program inside: what it cannot, we cannot.

Everything is imported before the fork, since what could be imported in it would be the image's.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import socket
import stat
import struct
import tarfile
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CHUNK = 1 << 18
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_GET_NUMBER, _UNLOCK = 0x80045430, 0x40045431  # TIOCGPTN, TIOCSPTLCK
_BACKLOG = 1024
MARK = "AGENTRL_EXEC"
"""The environment variable by which what a request started is found again."""
_ROUNDS = 200


def read(request: dict[str, Any], source: int, target: int) -> None:
    """Write bytes of a file to `target`. Raises OSError."""
    fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(os.fstat(fd).st_mode) else errno.EINVAL, "is no file",
                      request["path"])  # fmt: skip
    os.lseek(fd, request["offset"], os.SEEK_SET)
    left = request["limit"]
    while left > 0 and (data := os.read(fd, min(left, _CHUNK))):
        _write_all(target, data)
        left -= len(data)


def write(request: dict[str, Any], source: int, target: int) -> None:
    """Write what comes from `source` to a file, whole. Raises OSError."""
    path = request["path"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "is no file", path)
    os.ftruncate(fd, 0)
    while data := os.read(source, _CHUNK):
        _write_all(fd, data)
    if request["mode"] is not None:
        os.fchmod(fd, request["mode"])


def listing(request: dict[str, Any], source: int, target: int) -> None:
    """Write the entries of a folder as lines of JSON. Raises OSError."""
    top, limit = request["path"], request["limit"]
    entries = [(".", os.lstat(top))] if request["depth"] == 0 else []
    folders = [(top, "", request["depth"])] if request["depth"] else []
    while folders and len(entries) < limit:
        folder, below, depth = folders.pop()
        try:
            names = os.listdir(folder)
        except OSError:
            if folder == top:
                raise
            continue  # it may not be read, or is gone
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            entries.append((below + name, status))
            if stat.S_ISDIR(status.st_mode) and depth > 1:
                folders.append((path, f"{below}{name}/", depth - 1))
    lines = []
    for path, status in sorted(entries)[:limit]:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
        size = status.st_size if kind == "file" else 0
        lines.append(json.dumps([path, kind, size, stat.S_IMODE(status.st_mode)]))
    _write_all(target, "\n".join(lines).encode("utf-8", "surrogateescape"))


class _Bounded(io.RawIOBase):
    """Writes to a descriptor, and raises OSError beyond a number of bytes: a file may be far larger than what it takes
    on a disk."""

    def __init__(self, fd: int, most: int) -> None:
        self._fd, self._left = fd, most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.EFBIG, "it is more than may be packed")
        _write_all(self._fd, bytes(data))
        return len(data)


def pack(request: dict[str, Any], source: int, target: int) -> None:
    """Write files and folders, whose paths come from `source` as JSON, as a tar of at most `limit` bytes. Raises
    OSError."""

    def packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with io.FileIO(source, closefd=False) as asked:
        paths = json.loads(asked.readall())
    with tarfile.open(fileobj=_Bounded(target, request["limit"]), mode="w|") as tar:
        for path in paths:
            if os.path.lexists(path):
                tar.add(path, arcname=path.lstrip("/"), filter=packed)


def unpack(request: dict[str, Any], source: int, target: int) -> None:
    """Write what a tar holds, relative to /. Raises OSError."""
    with io.FileIO(source, closefd=False) as raw:
        try:
            with tarfile.open(fileobj=io.BufferedReader(raw, _CHUNK), mode="r|") as tar:
                tar.extraction_filter = lambda member, path: member  # all of it; Python before 3.11.4 knows no other
                for member in tar:
                    _extract(tar, member)
        except (tarfile.TarError, EOFError) as error:
            raise OSError(errno.EINVAL, f"the tar cannot be read: {error}") from None


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    path = os.path.normpath("/" + member.name)
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return
    member = copy.copy(member)
    member.name = path.lstrip("/")
    if os.path.lexists(path) and not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    tar.extract(member, "/", numeric_owner=True)


def kill(request: dict[str, Any], *fds: int) -> None:
    """Kill what another request started, however far it has gone from its parent."""
    mark = f"{MARK}={request['of']}".encode()
    for _ in range(_ROUNDS):
        left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_marked(pid, mark)]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.005)


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read(1 << 20).split(b"\0")
    except OSError:
        return False


CALLS: dict[str, Callable[..., None]] = {
    "read": read, "write": write, "listing": listing, "pack": pack, "unpack": unpack, "kill": kill,
}  # fmt: skip
"""By the name in a request."""


def open_terminal(rows: int, columns: int, hand: Callable[[int, int], None], request: int) -> int:
    """Open a terminal of the sandbox's own, make it ours, and hand its other end to the host. Raises OSError."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, _UNLOCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(master, _GET_NUMBER, bytes(4)))[0]
    slave = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    hand(request, master)
    os.close(master)
    return slave


def listen(port: int, hand: Callable[[int, int], None], request: int) -> None:
    """Listen at a port of the sandbox's loopback, and hand the socket to the host. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    hand(request, listener.fileno())


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
