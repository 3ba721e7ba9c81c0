"""The last lines of a log."""

from pathlib import Path

LONGEST = 1 << 16
"""Bytes that are read, from the end."""


def tail(path: Path, lines: int = 20, since: int = 0) -> list[str]:
    """The last lines that are not empty, at most so many, from byte `since` on; none of a file that is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, file.seek(0, 2) - LONGEST))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
