"""Handling of Ctrl-C and of a terminal that closes: the first signal stops the run and keeps the last whole step, the
second stops it immediately."""

import asyncio
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TypeVar

from agentrl.containment.event_loop import Runner
from agentrl.containment.watchdog import Ending, HeldError, held_in, interrupt
from agentrl.errors import UserError, printable

T = TypeVar("T")

LAST_RESORT_SECONDS = 3.0
"""Seconds after the second signal until the process exits, even if a plugin blocks the event loop."""
EXIT_CODE = 130
STUCK_EXIT_CODE = 2


class Interrupted(Exception):  # noqa: N818 - not an error
    """A stop of the run was requested: the current step is dropped, the last whole one is saved."""


class Interrupts(Ending):
    """The run's event loop, with signal handlers while entered.

    SIGINT, SIGTERM and SIGHUP (unless ignored, as under `nohup`) set `requested` and cancel the work of `run`; work of
    `complete` is never cancelled, so that no update is left half done.

    A plugin that holds up the loop for `seconds` ends the run: the work of `run` is cancelled, and UserError raised. If
    its code cannot be interrupted, `rescue` saves the run in another thread, and the process ends.

    Outside the main thread, where Python delivers no signals, entering does nothing. `run` and `close` may be called in
    another thread than the one that entered, but both in the same thread.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self.last_words: Sequence[str] = ()
        self.requested = False
        """Whether a stop was requested."""
        self.notify: Callable[[str], None] = print
        """Called with a line about a plugin that blocks the event loop."""
        self.rescue: Callable[[str], str] = lambda line: line
        """Called with the line that ends the run, in another thread than the run's, which does not go on; saves what
        can be saved, and returns the line with what became of that."""
        self._stuck: str | None = None  # the line that ends the run
        self._left = False  # the process ends in another thread
        self._runner = self._new_runner()
        self._task: asyncio.Task[object] | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._last_resort: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._last_resort is not None:
            self._last_resort.cancel()

    def close(self) -> None:
        """Cancel all running tasks, close the event loop, and open a new one for a run that is restarted."""
        self._runner.close()
        self._runner = self._new_runner()

    def _new_runner(self) -> Runner:
        return Runner(lambda line: self.notify(line), self)

    def begin(self, line: str, thread: int) -> None:
        """Implement `Ending.begin`."""
        if self._stuck is None:
            self._stuck = line
            self._cancel()
        if thread == threading.main_thread().ident and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.pthread_kill(thread, signal.SIGINT)  # ends a system call, too
        else:
            interrupt(thread)

    def leave(self, line: str) -> None:
        """Implement `Ending.leave`."""
        self._left = True
        line = self.rescue(line)
        with suppress(OSError, ValueError):  # nobody reads it any more
            print(printable(f"error: {line}"), file=sys.stderr, flush=True)
        _exit(STUCK_EXIT_CODE)

    def _cancel(self) -> None:
        if (task := self._task) is not None:
            self._runner.get_loop().call_soon_threadsafe(task.cancel)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stuck is not None and held_in(frame):
            raise HeldError
        if self.requested:
            if self._last_resort is None:
                self._last_resort = threading.Timer(LAST_RESORT_SECONDS, _exit, (EXIT_CODE,))
                self._last_resort.daemon = True
                self._last_resort.start()
            raise KeyboardInterrupt
        self.requested = True
        self._cancel()

    def check(self) -> None:
        """Raise Interrupted if a stop was requested, UserError if a plugin was stuck. Called between the parts of a
        step."""
        if self._left:
            threading.Event().wait()
        if self._stuck is not None:
            raise UserError(self._stuck)
        if self.requested:
            raise Interrupted

    def complete(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run asynchronous work to its end even if a stop is requested, such as publishing after an update."""
        result = self._runner.run(_await(work))
        if self._left:
            threading.Event().wait()
        return result

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
            result = self._runner.run(body())
        except asyncio.CancelledError:
            self.check()
            raise
        if self._left:
            threading.Event().wait()
        return result


async def _await(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _exit(code: int) -> None:
    """End the process immediately."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # show the cursor, which the live display hides
    os._exit(code)
