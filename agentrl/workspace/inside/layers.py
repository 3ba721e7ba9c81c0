"""The upper layer of an overlay: copied as it is, so that others start from it, and compared with what lies below it.

Both walk by descriptors and follow no link: what the layer holds is a stranger's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 1 << 18
_OPAQUE = "user.overlay.opaque"
_OWN = ("/proc", "/dev", "/sys", "/run/agentrl")
"""What bubblewrap makes."""
_DEEP = 128
"""Folders within folders that are walked into: what lies deeper holds no descriptors and no stack of ours."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def copy(upper: str, target: str) -> None:
    """Copy a layer to a folder that is not there yet. Raises OSError; what was written is removed then."""
    links: dict[int, str] = {}
    source = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    os.mkdir(target, 0o755)
    try:
        _copy_folder(source, target, links)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _copy_folder(source: int, target: str, links: dict[int, str], deep: int = 0) -> None:
    if deep > _DEEP:
        raise OSError(errno.ELOOP, f"more than {_DEEP} folders lie within each other")
    for name in os.listdir(source):
        status = os.lstat(name, dir_fd=source)
        place, kind = f"{target}/{name}", stat.S_IFMT(status.st_mode)
        if kind != stat.S_IFDIR and status.st_nlink > 1 and status.st_ino in links:
            os.link(links[status.st_ino], place, follow_symlinks=False)
            continue
        links[status.st_ino] = place
        if kind == stat.S_IFDIR:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=source)
            os.mkdir(place, 0o700)
            if _opaque(fd):
                os.setxattr(place, _OPAQUE, b"y")
            _copy_folder(fd, place, links, deep + 1)
            os.close(fd)
        elif kind == stat.S_IFREG:
            _copy_file(name, source, place)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), place)
            continue
        elif kind == stat.S_IFCHR and status.st_rdev == 0:
            os.mknod(place, stat.S_IFCHR, 0)  # deleted
            continue
        elif kind == stat.S_IFIFO:
            os.mkfifo(place)
        else:
            continue  # a socket, which is of no use without its process
        os.chmod(place, stat.S_IMODE(status.st_mode))
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_file(name: str, source: int, target: str) -> None:
    read = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    while data := os.read(read, _CHUNK):
        os.write(write, data)
    os.close(read)
    os.close(write)


def read(before: str, paths: list[str], limit: int, target: int) -> None:
    """Write lines of JSON, [path, content in hexadecimal], for those of `paths` that are files below `before`."""
    for path in paths:
        with contextlib.suppress(OSError):
            *folders, name = path.strip("/").split("/")
            folder = os.open(before, os.O_RDONLY | os.O_DIRECTORY)
            for part in folders:
                folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                line = json.dumps([path, os.pread(fd, limit, 0).hex()]) + "\n"
                data = line.encode()
                while data:
                    data = data[os.write(target, data) :]


def compare(upper: str, before: str, limit: int, target: int) -> None:
    """Write lines of JSON, [path, added | modified | deleted, kind, size], for what differs from `before`. Raises
    OSError."""
    source = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    for change in itertools.islice(_changes(source, before, ""), limit):
        os.write(target, (json.dumps(change) + "\n").encode())


def _changes(source: int, before: str | None, below: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield the changes of one folder. before: the root below it; None where there was no such folder."""
    names = os.listdir(source)
    for name in sorted(names):
        path = f"{below}/{name}"
        if path in _OWN:
            continue
        try:
            now = os.lstat(name, dir_fd=source)
        except FileNotFoundError:
            continue
        then = _status(before + path) if before is not None else None
        kind = stat.S_IFMT(now.st_mode)
        if kind == stat.S_IFCHR and now.st_rdev == 0:
            if then is not None:
                yield path, "deleted", _kind(then), 0
        elif kind == stat.S_IFDIR:
            if then is None or not stat.S_ISDIR(then.st_mode):
                yield path, "added" if then is None else "modified", "folder", 0
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=source)
            if path.count("/") <= _DEEP:
                yield from _changes(fd, before if then is not None and stat.S_ISDIR(then.st_mode) else None, path)
            os.close(fd)
        elif then is None:
            yield path, "added", _kind(now), now.st_size if kind == stat.S_IFREG else 0
        elif not _same(name, source, now, f"{before}{path}", then):
            yield path, "modified", _kind(now), now.st_size if kind == stat.S_IFREG else 0
    if before is not None and below and _opaque(source):
        yield from _hidden(before, below, set(names))


def _hidden(before: str, below: str, kept: set[str]) -> Iterator[tuple[str, str, str, int]]:
    """Yield what a folder that was made anew no longer has."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(before + below)):
            then = _status(f"{before}{below}/{name}")
            if name not in kept and then is not None:
                yield f"{below}/{name}", "deleted", _kind(then), 0


def _same(name: str, source: int, now: os.stat_result, before: str, then: os.stat_result) -> bool:
    if now.st_mode != then.st_mode:
        return False
    if stat.S_ISLNK(now.st_mode):
        return os.readlink(name, dir_fd=source) == os.readlink(before)
    if not stat.S_ISREG(now.st_mode):
        return True
    if now.st_size != then.st_size:
        return False
    one = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    try:
        other = os.open(before, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:  # an image's, of somebody else
        os.close(one)
        return False
    try:
        while True:
            data = os.read(one, _CHUNK)
            if data != os.read(other, _CHUNK):
                return False
            if not data:
                return True
    finally:
        os.close(one)
        os.close(other)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "other")


def _opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) in (b"y", b"x")
    except OSError:
        return False
