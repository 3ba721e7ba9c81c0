"""Interpreters started through the launcher: no thread, no event loop, nothing that a former loop could hold."""

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.errors import InfrastructureError

_LAUNCHER = Path(__file__).parent / "launcher.py"
_END_SECONDS = 6.0


class Process:
    """One sandbox that starts or runs. `socket` speaks with its supervisor and does not block."""

    def __init__(self, spawner: "Spawner", name: str, connection: socket.socket) -> None:
        self.socket = connection
        self._spawner = spawner
        self._name = name

    def end(self) -> None:
        """Kill everything in it; who waits at its socket hears the end. May be called twice."""
        with contextlib.suppress(OSError):  # it has ended, or is closed
            self.socket.shutdown(socket.SHUT_RDWR)
        self._spawner.kill(self._name)

    def kill(self) -> None:
        """End it when nobody waits at its socket. May be called twice."""
        if self.socket.fileno() >= 0:
            self.end()
            self.socket.close()


class Spawner:
    """One launcher process, which ends with this object at the latest."""

    def __init__(self, config: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", str(_LAUNCHER)]
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(
                [*command, json.dumps(config | {"socket": theirs.fileno()})],
                pass_fds=(theirs.fileno(),), env={"LANG": "C.UTF-8"}, cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._control = ours
        self._names = itertools.count()

    @property
    def alive(self) -> bool:
        """True where the launcher runs and can be reached."""
        return self._control.fileno() >= 0 and self._process.poll() is None

    def spawn(self) -> Process:
        """Ask for one more; its socket says when it is ready. Raises InfrastructureError when the launcher is gone."""
        ours, theirs = socket.socketpair()
        name = str(next(self._names))
        try:
            with theirs:
                socket.send_fds(self._control, [b"s" + name.encode()], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"the sandbox's launcher ended: {self.last_words() or error}") from None
        ours.setblocking(False)
        return Process(self, name, ours)

    def kill(self, name: str) -> None:
        """Kill the sandbox `name`, and all in it."""
        with contextlib.suppress(OSError):  # the launcher is gone, and all that it started with it
            self._control.send(b"k" + name.encode())

    def last_words(self) -> str:
        """Why the launcher ended, in its own words."""
        try:
            readable = select.select([self._control], [], [], 1.0)[0]
            return self._control.recv(4096).decode(errors="replace") if readable else ""
        except (OSError, ValueError):
            return ""

    def close(self) -> None:
        """End it and all that it started, and wait until they are gone. May be called twice."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __del__(self) -> None:
        self._control.close()
        self._process.poll()


def wait_ready(process: Process, seconds: float) -> str | None:
    """Block until the sandbox is ready: None. Otherwise what it said instead. Sessions wait in their loop."""
    end, heard = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0:
        if not select.select([process.socket], [], [], left)[0]:
            break
        data = process.socket.recv(4096)
        heard += data
        if heard == READY:
            return None
        if not data:
            break
    return heard.decode(errors="replace").strip() or "it did not start"


READY = b"ready\n"
