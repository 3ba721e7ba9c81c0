"""Tars between this machine and workspaces. What comes from a workspace is strangers' and is bounded and checked."""

import copy
import io
import posixpath
import tarfile
from pathlib import Path

from agentrl.errors import PathError


def packed_as(local: Path, remote: str) -> bytes:
    """A file or folder of this machine as a tar that puts it at the absolute path `remote`. Raises OSError."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(local, arcname=remote.lstrip("/"), filter=_anonymous)
    return buffer.getvalue()


def packed(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """Files by absolute path as a tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpacked_to(tar: bytes, remote: str, local: Path) -> None:
    """Write the part of a tar that stands at `remote` to `local`, without links that lead out of it. Raises OSError,
    PathError."""
    top = remote.lstrip("/")
    try:
        with tarfile.open(fileobj=io.BytesIO(tar)) as source:
            members = [m for m in source.getmembers() if m.name == top or m.name.startswith(f"{top}/")]
            if not members:
                raise PathError(f"{remote}: no such file or folder")
            for member in members:
                below = posixpath.relpath(member.name, top)
                if member.isfile() and below == ".":
                    local.parent.mkdir(parents=True, exist_ok=True)
                    local.write_bytes(_content(source, member))
                elif below == ".":
                    local.mkdir(parents=True, exist_ok=True)
                elif not hasattr(tarfile, "data_filter"):
                    raise PathError(
                        f"{remote}: folders are fetched by Python 3.11.4 or later alone, which checks links"
                    )
                else:
                    renamed = copy.copy(member)
                    renamed.name = below
                    source.extract(renamed, local, filter="data")
    except tarfile.TarError as error:
        raise PathError(f"{remote}: {error}") from None


def _content(source: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = source.extractfile(member)
    return b"" if file is None else file.read()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
