"""Ctrl-C during a run: the first ends it in good order, the second at once."""

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
"""What the second signal leaves to plugins to let go; a tool that holds the event loop is not waited for longer."""
EXIT_CODE = 130


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The run was asked to stop: what is under way is dropped, what is complete is saved."""


class Interrupts:
    """While entered, SIGINT and SIGTERM set `requested` and cancel what `run` awaits, so that no update is cut in two.

    Entered outside the main thread, where Python takes no signals, it only offers `run`. The work may be done in
    another thread than the one that entered; it ends with `close`, in its own thread. say: told of a plugin that holds
    up the event loop.
    """

    def __init__(self) -> None:
        self.requested = False
        self.say: Callable[[str], None] = print
        self._runner = self._new_runner()
        self._task: asyncio.Task[Any] | None = None
        self._former: dict[int, Any] = {}
        self._last_resort: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._last_resort is not None:
            self._last_resort.cancel()

    def close(self) -> None:
        """Close the event loop, after what still runs in it is cancelled. A run that is taken up again gets another."""
        self._runner.close()
        self._runner = self._new_runner()

    def _new_runner(self) -> Runner:
        return Runner(lambda line: self.say(line))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if self._last_resort is None:
                self._last_resort = threading.Timer(LAST_RESORT_SECONDS, _leave)
                self._last_resort.daemon = True
                self._last_resort.start()
            raise KeyboardInterrupt
        self.requested = True
        if (task := self._task) is not None:
            self._runner.get_loop().call_soon_threadsafe(task.cancel)

    def check(self) -> None:
        """Raises Interrupted when a stop was asked for. Called between the parts of a step."""
        if self.requested:
            raise Interrupted

    def complete(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run asynchronous work to its end, whatever is requested: what must follow an update."""

        async def body() -> T:
            return await work()

        return self._runner.run(body())

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run asynchronous work on the run's one event loop. Raises Interrupted when it was cancelled by a signal."""
        self.check()

        async def body() -> T:
            self._task = asyncio.current_task()
            try:
                self.check()  # for a signal that came before there was a task to cancel
                return await work()
            finally:
                self._task = None

        try:
            return self._runner.run(body())
        except asyncio.CancelledError:
            if self.requested:
                raise Interrupted from None
            raise


def _leave() -> None:
    """End the process as it is."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a live display had hidden the cursor
    os._exit(EXIT_CODE)
