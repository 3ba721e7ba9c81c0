"""Files that survive a power cut, and one line for what a disk refuses."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from os import fsync, rename, replace  # ours, whatever a plugin makes of those of the modules
from pathlib import Path
from shutil import rmtree

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk is full, or the user's quota is."""


def files(folder: Path) -> list[str]:
    """The paths of all files below `folder`, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def lies_in(folder: Path, name: str) -> bool:
    """Whether `name`, which may come from anybody, is a file below `folder`, links resolved."""
    path = folder / name
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def checksums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Name -> sha256 in hexadecimal digits. Raises OSError. (Without threads: none can be started while the
    process exits, and a save goes on then.)"""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def flush(folder: Path) -> None:
    """Flush `folder` and every file and folder below it to the disk."""
    for path in folder.rglob("*"):
        flush_file(path)
    flush_file(folder)


def flush_file(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write or replace a small file atomically: a reader sees the former text or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    flush_file(beside)
    replace(beside, path)
    flush_file(path.parent)


def remove(folder: Path) -> None:
    """Remove `folder`, renamed first: a kill in between must not leave a folder that looks complete."""
    gone = folder.with_name(f".{folder.name}.part")
    rename(folder, gone)
    rmtree(gone)


def _refusal(error: BaseException) -> str | None:
    """The operating system's message ("No space left on device") from `error` or its causes; None: it is about
    something else."""
    found = next((e for e in _chain(error) if isinstance(e, OSError) and e.strerror), None)
    if found is not None:
        return found.strerror
    written = any("file write failed" in str(e) for e in _chain(error))  # by torch's writer, without an errno
    return "a file could not be written completely" if written else None


def _chain(error: BaseException, depth: int = 8) -> Iterator[BaseException]:
    """Yield the error, its causes, and the errors that several ranks reported."""
    if not depth:
        return
    yield error
    for other in (error.__cause__, error.__context__, *_reported(error)):
        if other is not None:
            yield from _chain(other, depth - 1)


def _reported(error: BaseException) -> list[BaseException]:
    """The errors in torch's CheckpointException, whose `failures` is rank -> (error, traceback)."""
    failures = getattr(error, "failures", None)
    return [each[0] for each in failures.values()] if isinstance(failures, dict) else []


def line(error: BaseException) -> str:
    """One line for an error of reading, which may be torch's CheckpointException."""
    while failures := getattr(error, "failures", None):  # of several ranks: the first
        error = next(iter(failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__


def refused(folder: Path, error: BaseException) -> str | None:
    """One line if the file system refused to write `folder`; None: `error` is about something else."""
    reason = _refusal(error)
    return (
        reason and f"{folder.parent}: a checkpoint could not be written: {reason} ({_free(folder.parent)} free there)"
    )


def _free(folder: Path) -> str:
    """Format the free space of the disk that `folder` is on."""
    size = float(shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free)
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
