"""What a sandbox leaves behind: its processes, descriptors and files."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    owner: int
    command: str


MARK = 4_000_000 + os.getpid()
"""As a limit in bytes it stands in the commands of all sandboxes of this run, those that lost their parent too."""


def descendants() -> list[Process]:
    """All processes that this one started, at whatever depth, and all that bear the mark, but for dead ones."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            process = Process(int(folder.name), int(parent), folder.stat().st_uid, command)
        except OSError:
            continue
        if state != "Z":
            children.setdefault(process.parent, []).append(process)
    found = {one.pid: one for some in children.values() for one in some if str(MARK) in one.command}
    queue = [os.getpid()]
    while queue:
        mine = children.get(queue.pop(), [])
        found |= {process.pid: process for process in mine}
        queue += [process.pid for process in mine]
    return list(found.values())


def left() -> tuple[int, list[str], list[str]]:
    """How many processes below this one, what its descriptors are open on, what lies in the temporary folder."""
    return len(descendants()), sorted(_opened()), os.listdir(tempfile.gettempdir())


def _opened() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{fd}")
