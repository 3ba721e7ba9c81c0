"""`ForeignProcess`: an adapter in the interpreter of its environment, and its calls, each a line of JSON.

Strangers' code may do anything there. One thread here reads and writes, so that no call blocks the event loop; what the
process says is bounded, its printed output is read and forgotten but for its end, and it can be killed with all that it
started.
"""

import asyncio
import itertools
import json
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.containment.process_tree import ProcessTree
from agentrl.containment.threads import in_thread
from agentrl.errors import EnvironmentLostError
from agentrl.jsonable import Json

RUNNER = Path(__file__).parent / "inside" / "runner.py"
ADAPTERS = Path(__file__).parent / "adapters"
LARGEST = 33 << 20
"""Bytes of one line that a process sends."""
PING_SECONDS = 1.0
"""Between two questions whether a process still answers."""
HELD_SECONDS = 60.0
"""Without an answer, while it has something to do, after which a process is killed: code holds its interpreter."""
_KEPT = 1 << 14  # bytes of printed output
_CHUNK = 1 << 16
_POLL_SECONDS = 0.02
_SAID = 300  # characters of printed output in an error
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONSAFEPATH", "VIRTUAL_ENV")
MAIN = 0
"""The episode number of calls of the adapter itself."""


class ForeignError(EnvironmentLostError):
    """What a foreign environment did wrong, or its process: one line."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """What runs where."""

    python: str
    """Path of the interpreter."""
    module: str
    """The adapter: the name of a shipped one, `module` or `module:Class` in that interpreter, or `file.py:Class`."""
    args: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of the adapter."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of this process."""
    alone: bool = False
    """Whether a process serves one episode at a time, in its main thread."""

    @property
    def path(self) -> str:
        """What the runner loads."""
        name, _, kind = self.module.partition(":")
        shipped = ADAPTERS / f"{name}.py"
        module = str(shipped) if name.isidentifier() and shipped.is_file() else name
        return f"{module}:{kind}" if kind else module

    @property
    def name(self) -> str:
        """The adapter, for messages."""
        return Path(self.module.partition(":")[0]).stem


class ForeignProcess:
    """A process that serves the adapter `foreign`. The constructor starts it; `ready` is what the adapter describes."""

    def __init__(self, foreign: Foreign) -> None:
        self._name = foreign.name
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-foreign-"))
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Any]] = {}
        self._left: dict[int, int] = {}  # calls that nobody waits for any more and that still run: of which episode
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._printed = b""
        self._why = ""
        self._closed = False
        self._answered = time.monotonic()
        self.ready: Future[Any] = Future()
        self._calls[0] = self.ready
        self._listener = socket.socket(socket.AF_UNIX)
        self._wake, self._woken = os.pipe()
        self._output, writer = os.pipe()
        os.set_blocking(self._woken, False)
        try:
            path = self._folder / "s"
            self._listener.bind(str(path))
            self._listener.listen(1)
            with open(writer, "wb", buffering=0) as output:
                command = [foreign.python, "-s", str(RUNNER), str(path), os.getcwd()]
                self._tree = ProcessTree(command, output, _variables(foreign), folder=self._folder)
        except BaseException:
            self._listener.close()
            for fd in (self._wake, self._woken, self._output):
                os.close(fd)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._write({"module": foreign.path, "args": dict(foreign.args), "alone": foreign.alone})
        self._thread = threading.Thread(target=self._serve, name=f"foreign-{self._name}", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closed

    @property
    def hangs(self) -> bool:
        """Whether a call still runs that nobody waits for any more."""
        return bool(self._left)

    def hangs_in(self, episode: int) -> bool:
        """Whether such a call is one of this episode."""
        with self._lock:
            return episode in self._left.values()

    def ask(self, call: str, episode: int, *given: Json) -> "Future[Any]":
        """Call a method, and return what will be its value. The future raises ForeignError."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(ForeignError(self._ended()))
                return future
            number = next(self._numbers)
            if not self._calls:
                self._answered = time.monotonic()
            self._calls[number] = future
        future.add_done_callback(lambda done: self._leave(number, episode) if done.cancelled() else None)
        self._write({"id": number, "call": call, "episode": episode, "given": list(given)})
        return future

    async def wait(self, call: str, episode: int, *given: Json) -> Any:
        """The value of a call. Raises ForeignError."""
        return await asyncio.wrap_future(self.ask(call, episode, *given))

    def _leave(self, number: int, episode: int) -> None:
        """Note that nobody waits for a call any more; an async one is cancelled."""
        with self._lock:
            if self._calls.pop(number, None) is None:
                return
            self._left[number] = episode
        self._write({"cancel": number})

    def _write(self, told: Mapping[str, Json]) -> None:
        line = json.dumps(told, default=str).encode("utf-8", "surrogatepass") + b"\n"
        with self._lock:
            if self._closed:
                return
            self._outgoing += line
            self._nudge()

    def _nudge(self) -> None:
        """Let the thread look anew."""
        with suppress(BlockingIOError):  # it has been told often enough
            os.write(self._woken, b"w")

    def _serve(self) -> None:
        """Read and write until the process ends or is ended."""
        channel: socket.socket | None = None
        selector = selectors.DefaultSelector()
        os.set_blocking(self._output, False)
        self._listener.setblocking(False)
        try:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._why and (channel is not None or self._tree.running):
                if channel is not None:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
                    selector.modify(channel, events)
                for key, ready in selector.select(PING_SECONDS):
                    if key.fileobj is self._listener:
                        channel, _ = self._listener.accept()
                        channel.setblocking(False)
                        selector.register(channel, selectors.EVENT_READ)
                        selector.unregister(self._listener)
                    elif key.fileobj is channel:
                        self._exchange(channel, ready)
                    else:
                        self._drain(selector, key.fd)
                self._ping(channel)
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - the last who can say what happened to the calls that wait
            self._why = self._why or f"{type(error).__name__}: {error}"
        finally:
            selector.close()
            if channel is not None:
                channel.close()
            self._finish()

    def _drain(self, selector: selectors.BaseSelector, fd: int) -> None:
        """Take what was printed, or the word that there is something to write."""
        data = os.read(fd, _CHUNK)
        if fd == self._output:
            self._printed = (self._printed + data)[-_KEPT:]
            if not data:
                selector.unregister(fd)

    def _exchange(self, channel: socket.socket, ready: int) -> None:
        """Write what waits to be written, and take the lines that came. Raises _Ended."""
        try:
            if ready & selectors.EVENT_WRITE:
                with self._lock:
                    del self._outgoing[: channel.send(self._outgoing[: 16 * _CHUNK])]
            if ready & selectors.EVENT_READ:
                data = channel.recv(16 * _CHUNK)
                if not data:
                    raise _Ended
                self._take(data)
        except BlockingIOError:
            return
        except OSError:
            raise _Ended from None

    def _take(self, data: bytes) -> None:
        start = len(self._incoming)
        self._incoming += data
        begin = 0
        while (end := self._incoming.find(b"\n", max(begin, start))) >= 0:
            self._answer(bytes(self._incoming[begin:end]))
            begin = end + 1
        del self._incoming[:begin]
        if len(self._incoming) > LARGEST:
            self._why = f"its process sent a line of more than {LARGEST >> 20} MiB, and was killed"

    def _answer(self, line: bytes) -> None:
        try:
            told = json.loads(line)
            number = told.get("id")
        except (ValueError, AttributeError, RecursionError):
            self._why = f"its process sent what is no answer ({line[:60]!r}), and was killed"
            return
        self._answered = time.monotonic()
        with self._lock:
            self._left.pop(number, None)
            future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if "error" in told:
            future.set_exception(ForeignError(f"{self._name}: {str(told['error'])[:1000]}"))
        else:
            future.set_result(told.get("value"))

    def _ping(self, channel: socket.socket | None) -> None:
        """Ask whether it still answers, where it has something to do; kill it where it has not for too long."""
        if channel is None or not (self._calls or self._left) or not self.ready.done():
            return
        silent = time.monotonic() - self._answered
        if silent > HELD_SECONDS:
            self._why = (
                f"its process did not answer for {HELD_SECONDS:g} s (code that holds the interpreter, or it was "
                "stopped), and was killed"
            )
        elif silent > PING_SECONDS and not self._outgoing:
            self._write({"ping": 1})

    def _finish(self) -> None:
        """Fail what still waits, and end the process with all that it started."""
        ended_itself = not self._why
        until = time.monotonic() + 1.0
        while ended_itself and self._tree.running and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        code = self._tree.exit_code
        self._tree.ask_to_end(at_once=True)
        self._read_rest()
        with self._lock:
            self._closed = True
            how = "its process ended" if code is None else _how(code)
            self._why = self._why or how
            waiting, self._calls = list(self._calls.values()), {}
            self._left.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ForeignError(self._ended()))
        self._listener.close()
        self._tree.end(at_once=True)
        for fd in (self._wake, self._woken, self._output):
            os.close(fd)

    def _read_rest(self) -> None:
        try:
            for _ in range(64):  # what a pipe holds; who writes on may do so faster than this reads
                if not (data := os.read(self._output, _CHUNK)):
                    break
                self._printed = (self._printed + data)[-_KEPT:]
        except OSError:
            pass

    def _ended(self) -> str:
        said = " ".join(self._printed.decode("utf-8", "replace").split())[-_SAID:]
        return f"{self._name}: {self._why}" + (f"; it had printed: {said}" if said else "")

    def end(self, why: str = "its process was ended") -> None:
        """Kill it and what it started, and wait until they are gone. May be called twice."""
        with self._lock:
            if not self._closed and not self._why:
                self._why = why
                self._nudge()
        self._thread.join()

    async def end_in_thread(self, why: str = "its process was ended") -> None:
        """End it without blocking the event loop."""
        await in_thread(self.end, why)


class _Ended(Exception):  # noqa: N818 - no error
    """The process closed its socket."""


def _how(code: int) -> str:
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended by exit code {code}"


def _variables(foreign: Foreign) -> dict[str, str]:
    """The environment of the process: this one's, without what is about this interpreter, and a fixed order of sets."""
    kept: dict[str, str] = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return {**kept, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **foreign.variables}
