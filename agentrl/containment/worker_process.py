"""`WorkerProcess`: a plugin's code in a process of its own, which can be killed whatever that code does; and what the
program of such a process begins with.

It imports the plugin by its name in the recipe, so that nothing but what it works on is pickled. It has the
environment, the import path and the seed of this process.
"""

import fcntl
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar, cast

from agentrl.jsonable import Json
from agentrl.secrets import known, remember

T = TypeVar("T")
SIZE = 8
"""Bytes before each message, which hold its length."""


class WorkerProcess:
    """A process that runs the program of a module, and the socket to it."""

    def __init__(self, module: str) -> None:
        self.channel, theirs = socket.socketpair()
        alive, self._alive = os.pipe()  # its end closes with this process, however that ends
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(alive)]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), alive), start_new_session=True
            )
        except BaseException:
            self.channel.close()
            os.close(self._alive)
            raise
        finally:
            theirs.close()
            os.close(alive)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._child.poll() is not None

    def how_it_ended(self, seconds: float | None = None) -> str:
        """Wait until it has ended, and say how; after `seconds` it is killed."""
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._child.wait()
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return f"its process ended by {how}"

    def kill(self) -> None:
        """Kill it and what it started; who waits for its answer gets none."""
        with suppress(ProcessLookupError):  # the whole session
            os.killpg(self._child.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and free what belongs to it."""
        self.kill()
        self._child.wait()
        self.channel.close()
        with suppress(OSError):
            os.close(self._alive)
        self._alive = -1


def stream_of(channel: socket.socket) -> BinaryIO:
    """A socket as a file, whose calls block."""
    return cast("BinaryIO", channel.makefile("rwb"))


def framed(payload: bytes) -> bytes:
    """A message as it is written."""
    return len(payload).to_bytes(SIZE, "big") + payload


def beginning(**facts: Json) -> bytes:
    """The first message to a process: `facts`, which `begun` gives its program, and what is this process's."""
    return json.dumps({**facts, "path": sys.path, "seed": _seed(), "secrets": known()}).encode()


def _seed() -> int | None:
    """The seed of the run, which is torch's here."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.initial_seed())


def connected() -> socket.socket:
    """The socket of this program, given by its arguments. The program ends with the process that started it."""
    channel, alive = map(int, sys.argv[1:])
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # the kernel's, which needs nothing of an interpreter that is busy
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:
        sys.exit()
    return socket.socket(fileno=channel)


def begun(message: bytes, make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` makes of the facts of a first message, with the path and the seeds that it says."""
    begin = json.loads(message)
    remember(begin["secrets"])
    sys.path[:] = begin["path"]
    seed = begin["seed"]
    if seed is not None:
        random.seed(seed)
    made = make(begin)
    if seed is not None:
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        if (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(seed)
    return made
