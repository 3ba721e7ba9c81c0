"""What a sandbox leaves behind: its processes, descriptors and files."""

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator

import processes
import psutil

MARK = 4_000_000 + os.getpid()
"""As a limit in bytes it stands in the commands of all sandboxes of this run, those that lost their parent too."""


def descendants() -> list[psutil.Process]:
    """All processes that this one started, at whatever depth, and all that bear the mark, but for dead ones."""
    marked = [process for process in psutil.process_iter() if str(MARK) in processes.command(process)]
    return list({*marked, *processes.descendants()})


def left() -> tuple[int, list[str], list[str]]:
    """The number of processes below this one, what its descriptors are open on, and the temporary files."""
    return len(descendants()), sorted(_opened()), os.listdir(tempfile.gettempdir())


def more_than(before: tuple[int, list[str], list[str]]) -> tuple[int, list[str], list[str]]:
    """What is left now that was not before; what an earlier test had left may end meanwhile."""
    processes, opened, files = left()
    new = Counter(opened) - Counter(before[1])
    return max(0, processes - before[0]), list(new.elements()), sorted(set(files) - set(before[2]))


def _opened() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{fd}")
