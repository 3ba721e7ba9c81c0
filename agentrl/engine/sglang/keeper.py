"""A program of its own: it runs a server and ends the whole process group when the server ends, when its standard input
closes, or when its parent is gone, however that came about. So no server outlives the run that started it.

usage: python keeper.py GRACE_SECONDS REMOVAL COMMAND [ARGUMENT ...]

REMOVAL: the command that ends what is not of the group, such as a container; may be empty. A byte on standard input
before it closes: end at once.
"""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

POLL_SECONDS = 0.5
LOOK_POLLS = 20
TIDY_SECONDS = 5.0
REMOVAL_SECONDS = 30.0
_SHARED = re.compile(rb" (/dev/shm/sgl(?:ang_loads|_shm)_\S+)$", re.M)
"""Memory that SGLang shares among its processes and leaves behind where they are killed, as it ends its own."""
_TRACKER = b"multiprocessing.resource_tracker"
"""Once the others are gone it removes the semaphores and the shared memory that they named, and ends."""


def main() -> int:
    grace, removal, command = float(sys.argv[1]), shlex.split(sys.argv[2]), sys.argv[3:]
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the server; this process ends after it
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)
    told: bytes | None = None
    polls, shared = 0, set[bytes]()
    while server.poll() is None and os.getppid() == parent and told is None:
        told = _told(POLL_SECONDS)
        polls += 1
        if polls % LOOK_POLLS == 0:  # one that crashes cannot be asked
            shared |= _shared()
    shared |= _shared()
    if removal:
        _remove(removal)
    if server.poll() is None and grace and not told:
        os.killpg(0, signal.SIGTERM)
        until = time.monotonic() + grace
        while server.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    print(f"the server ended with exit code {server.poll()}", file=sys.stderr, flush=True)
    _kill_others()
    for path in shared:
        with suppress(OSError):
            os.unlink(path)
    os.killpg(0, signal.SIGKILL)  # also itself
    return 0


def _remove(command: list[str]) -> None:
    try:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVAL_SECONDS, preexec_fn=_default_signals
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{shlex.join(command)}: {error}", file=sys.stderr, flush=True)


def _kill_others() -> None:
    """Everybody in the group but trackers, which get a moment to tidy up."""
    until = time.monotonic() + TIDY_SECONDS
    while (others := list(_others())) and time.monotonic() < until:
        for pid, tracker in others:
            if not tracker:
                _kill(pid)
        time.sleep(0.02)


def _others() -> Iterator[tuple[int, bool]]:
    """The other processes of the group that run, and whether they are trackers."""
    own, group = os.getpid(), os.getpgrp()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, found = _read(name, "stat").rpartition(b")")[2].split()[:3]
            if int(found) == group and int(name) != own and state != b"Z":
                yield int(name), _TRACKER in _read(name, "cmdline")
        except OSError:
            continue  # ended meanwhile


def _shared() -> set[bytes]:
    """Files of shared memory that processes of the group have open."""
    found: set[bytes] = set()
    for pid, _ in _others():
        with suppress(OSError):
            found.update(_SHARED.findall(_read(str(pid), "maps")))
    return found


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _told(seconds: float) -> bytes | None:
    """What came on standard input, after at most so many seconds; empty: it ended. None: nothing."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1) if ready else None


if __name__ == "__main__":
    sys.exit(main())
