"""What goes wrong with workers, each one line that names the worker; and the end of a log, which such a line quotes."""

from pathlib import Path

from agentrl.errors import UserError

TAIL_BYTES = 1 << 16
"""Bytes that `tail` reads, from the end."""


class ClusterError(UserError):
    """Ray, its resources or a worker's memory do not suffice, or a worker failed in a way that has a remedy."""


class WorkerLost(ClusterError):  # noqa: N818 - what happened reads better than WorkerLostError
    """A worker died or does not answer, and with it its group. The run can go on from its last checkpoint."""


def tail(path: Path, lines: int = 20, since: int = 0) -> list[str]:
    """The last `lines` lines that are not empty, from byte `since` on; none if the file does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
