"""A program of its own: it runs a server and ends the whole process group when the server ends, when its standard input
closes, or when its parent is gone, however that came about. So no server outlives the run that started it.

usage: python keeper.py GRACE_SECONDS COMMAND [ARGUMENT ...]
"""

import os
import select
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.5


def main() -> int:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the server; this process ends after it
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)
    while server.poll() is None and os.getppid() == parent and not _closed(POLL_SECONDS):
        pass
    code = server.poll()
    if code is None:
        os.killpg(0, signal.SIGTERM)
        until = time.monotonic() + grace
        while server.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    print(f"the server ended with exit code {server.poll()}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)  # also itself, and children that the server left behind
    return 0


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _closed(seconds: float) -> bool:
    """Whether standard input ended, after at most so many seconds."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main())
