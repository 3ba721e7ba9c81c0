"""Handling of Ctrl-C and of a terminal that closes: the first signal stops the run and keeps the last whole step, the
second stops it immediately."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from agentrl.rollout.event_loop import Runner

T = TypeVar("T")

LAST_RESORT_SECONDS = 3.0
"""Seconds after the second signal until the process exits, even if a plugin blocks the event loop."""
EXIT_CODE = 130


class Interrupted(Exception):  # noqa: N818 - not an error
    """A stop of the run was requested: the current step is dropped, the last whole one is saved."""


class Interrupts:
    """The run's event loop, with signal handlers while entered.

    SIGINT, SIGTERM and SIGHUP (unless ignored, as under `nohup`) set `requested` and cancel the work of `run`; work of
    `complete` is never cancelled, so that no update is left half done.

    Outside the main thread, where Python delivers no signals, entering does nothing. `run` and `close` may be called in
    another thread than the one that entered, but both in the same thread.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether a stop was requested."""
        self.notify: Callable[[str], None] = print
        """Called with a line about a plugin that blocks the event loop."""
        self._runner = self._new_runner()
        self._task: asyncio.Task[Any] | None = None
        self._former: dict[int, Any] = {}
        self._last_resort: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._last_resort is not None:
            self._last_resort.cancel()

    def close(self) -> None:
        """Cancel all running tasks, close the event loop, and open a new one for a run that is restarted."""
        self._runner.close()
        self._runner = self._new_runner()

    def _new_runner(self) -> Runner:
        return Runner(lambda line: self.notify(line))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if self._last_resort is None:
                self._last_resort = threading.Timer(LAST_RESORT_SECONDS, _exit)
                self._last_resort.daemon = True
                self._last_resort.start()
            raise KeyboardInterrupt
        self.requested = True
        if (task := self._task) is not None:
            self._runner.get_loop().call_soon_threadsafe(task.cancel)

    def check(self) -> None:
        """Raise Interrupted if a stop was requested. Called between the parts of a step."""
        if self.requested:
            raise Interrupted

    def complete(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run asynchronous work to its end even if a stop is requested, such as publishing after an update."""
        return self._runner.run(_await(work))

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run asynchronous work and return its result. Raises Interrupted if a stop is or was requested."""
        self.check()

        async def body() -> T:
            self._task = asyncio.current_task()
            try:
                self.check()  # a signal may have arrived before there was a task to cancel
                return await work()
            finally:
                self._task = None

        try:
            return self._runner.run(body())
        except asyncio.CancelledError:
            if self.requested:
                raise Interrupted from None
            raise


async def _await(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _exit() -> None:
    """End the process immediately."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # show the cursor, which the live display hides
    os._exit(EXIT_CODE)
