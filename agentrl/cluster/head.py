"""A program that runs a Ray node in a session of its own, out of reach of the terminal's Ctrl-C and of signals to our
process group, and ends all of it when its standard input closes, however its parent ended.

usage: python head.py FOLDER COMMAND [ARGUMENT ...]   (FOLDER is Ray's; it is deleted at the end)
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 5.0
"""Time for Ray to end its processes by itself."""
POLL_SECONDS = 0.2
ENDED = "ended"
"""Name of the file in FOLDER that marks that Ray ended by itself."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    if os.getsid(0) != os.getpid():
        os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what Ray's processes leave behind becomes ours, to be ended too
    ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_child)
    while ray.poll() is None and not _closed(POLL_SECONDS):
        pass
    failed = ray.poll() is not None
    if not failed:
        ray.terminate()
        until = time.monotonic() + GRACE_SECONDS
        while ray.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    _end_descendants()
    if failed:  # the parent has yet to see it, and to read why
        folder.joinpath(ENDED).touch()
        while not _closed(POLL_SECONDS):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def _end_descendants() -> None:
    """Kill what is below this process until nothing is, orphans of killed ones included."""
    until = time.monotonic() + GRACE_SECONDS
    while (found := _children(os.getpid())) and time.monotonic() < until:
        for pid in found:
            _kill(pid)
        time.sleep(0.02)
        _reap()


def _kill(pid: int) -> None:
    for child in _children(pid):
        _kill(child)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _children(pid: int) -> list[int]:
    """Return the children of a process by the kernel's list; none on systems without such a list."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, tasks.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _as_child() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    """Call prctl, which only Linux has; elsewhere Ray has to end when asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _closed(seconds: float) -> bool:
    """Return whether standard input has ended, after at most `seconds`."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main())
