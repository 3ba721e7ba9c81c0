"""Tars of a daemon or a service, which are strangers': their members are renamed, and checked."""

import copy
import io
import posixpath
import tarfile
from collections.abc import AsyncIterator, Mapping

from agentrl.errors import PathError

_BLOCK = tarfile.BLOCKSIZE
_EXTENSIONS = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"X"}
_EXTENSION = 1 << 20
"""Bytes that an extended header has at most."""


class Pieces:
    """Bytes that come piece by piece. Raises ValueError where they end too early."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source, self._data = source, b""

    async def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        parts, left = [self._data[:count]], count - len(self._data)
        self._data = self._data[count:]
        while left > 0:
            piece = await self._next()
            parts.append(piece[:left])
            self._data = piece[left:]
            left -= len(piece)
        return b"".join(parts)

    async def skip(self, count: int) -> None:
        """Pass over the next `count` bytes."""
        while count > len(self._data):
            count -= len(self._data)
            self._data = await self._next()
        self._data = self._data[count:]

    async def _next(self) -> bytes:
        async for piece in self._source:
            return piece
        raise ValueError("a tar ends too early")


async def first_member(pieces: Pieces) -> tarfile.TarInfo:
    """The first file, folder, link or other thing of a tar; its content comes next. Raises TarError, ValueError."""
    link = ""
    while True:
        header = tarfile.TarInfo.frombuf(await pieces.take(_BLOCK), "utf-8", "surrogateescape")
        if header.type not in _EXTENSIONS:
            if link:
                header.linkname = link
            return header
        if header.size > _EXTENSION:
            raise ValueError("a tar with an extended header of more than 1 MiB")
        data = await pieces.take(-(-header.size // _BLOCK) * _BLOCK)
        if header.type == tarfile.GNUTYPE_LONGLINK:
            link = data[: header.size].rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif header.type == tarfile.XHDTYPE:
            for record in data[: header.size].split(b"\n"):
                key, _, value = record.partition(b" ")[2].partition(b"=")
                link = value.decode("utf-8", "surrogateescape") if key == b"linkpath" else link


def joined(tars: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    """One tar of several, each of what stands at an absolute path under the name of its last part, and of links; with
    names relative to /. FIFOs, sockets and devices are left out. Raises TarError."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for path, target_of in links.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.type, info.linkname = tarfile.SYMTYPE, target_of
            target.addfile(info)
        for path, tar in tars.items():
            with tarfile.open(fileobj=io.BytesIO(tar)) as source:
                for member in source:
                    name = _below(path, member.name)
                    if not name or not _is_plain(member):
                        continue
                    link = _below(path, member.linkname) if member.islnk() else member.linkname
                    kept = _changed(member, name, link, 0, 0)
                    kept.pax_headers = {}
                    target.addfile(kept, source.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


def _below(path: str, name: str) -> str:
    """A name in the tar of `path`, relative to /."""
    top, _, rest = posixpath.normpath(name).lstrip("/").partition("/")
    if path == "/" and top not in ("", "."):
        rest = posixpath.join(top, rest) if rest else top
    return posixpath.normpath(posixpath.join(path, rest)).lstrip("/")


def cleaned(tar: bytes, owner: tuple[int, int]) -> bytes:
    """A tar of files, folders and links, all below /, whose owner is `owner` unless they name one. Raises PathError."""
    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(tar)) as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target,
        ):
            for member in source:
                name = posixpath.normpath("/" + member.name).lstrip("/")
                if not name or not _is_plain(member):
                    continue
                link = posixpath.normpath("/" + member.linkname).lstrip("/") if member.islnk() else member.linkname
                uid, gid = (member.uid, member.gid) if member.uid else owner
                kept = _changed(member, name, link, uid, gid)
                kept.pax_headers = {}
                target.addfile(kept, source.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise PathError(f"the tar cannot be read: {error}") from None
    return buffer.getvalue()


def others_than_folders(tar: bytes) -> list[str]:
    """The names of what is no folder in a tar that was cleaned."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as source:
        return [member.name for member in source if not member.isdir()]


def of_file(top: str, path: str, data: bytes, mode: int, owner: tuple[int, int]) -> bytes:
    """A tar, to be unpacked in `top`, of a file at `path` and the folders between them."""
    buffer = io.BytesIO()
    parts = posixpath.relpath(path, top).split("/")
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for count in range(1, len(parts) + 1):
            info = tarfile.TarInfo("/".join(parts[:count]))
            info.uid, info.gid = owner
            if count < len(parts):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            else:
                info.size, info.mode = len(data), mode
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() or member.isdir() or member.issym() or member.islnk()


def _changed(member: tarfile.TarInfo, name: str, link: str, uid: int, gid: int) -> tarfile.TarInfo:
    made = copy.copy(member)
    made.name, made.linkname, made.uid, made.gid, made.uname, made.gname = name, link, uid, gid, "", ""
    return made
