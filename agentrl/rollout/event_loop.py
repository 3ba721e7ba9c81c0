"""The event loop that plugins run in: it survives their exits, and ends whatever they leave behind.

asyncio hands SystemExit and KeyboardInterrupt of any task or callback to whoever runs the event loop, which ends the
run. `errors.contained` catches those of requests before they leave their task; `PluginProofLoop` goes on after those
of tasks and callbacks that a plugin starts itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from agentrl.errors import describe, from_signal
from agentrl.rollout.deadline import GRACE, leave_behind
from agentrl.rollout.watchdog import Watchdog
from agentrl.threads import Abandoned, DaemonThreads

T = TypeVar("T")
_THREADS = 32  # calls of `asyncio.to_thread` at once
_ROUNDS = 3  # times that what still runs at the end is cancelled
_log = logging.getLogger("agentrl.plugins")


SIGNAL_SECONDS = 0.2
"""Seconds until the thread that waits in `blocking` handles a signal that the system gave to another thread."""


def blocking(work: Callable[[], T]) -> T:
    """Call `work()`, which runs an event loop of its own: here, or in a thread where this one has a loop already, as in
    a notebook. What a signal's handler raises while the thread is waited for is raised within SIGNAL_SECONDS."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    thread = ThreadPoolExecutor(1, "agentrl")
    try:
        running = thread.submit(work)
        while not wait([running], SIGNAL_SECONDS).done:
            pass  # a signal that another thread was given is handled here, where Python code runs again
        return running.result()
    finally:
        thread.shutdown(wait=False)


class PluginProofLoop(asyncio.SelectorEventLoop):
    """An event loop that goes on when a task or a callback raises SystemExit or KeyboardInterrupt, unless it is the
    work that it runs, or a signal's handler, that raised it. Whoever awaits such a task is told as ever."""

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run the work to its end, whatever other tasks and callbacks raise; return its result."""
        work: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        while True:
            try:
                return super().run_until_complete(work)
            except (SystemExit, KeyboardInterrupt) as error:
                if from_signal(error):
                    raise
                if work.done():
                    return work.result()
                _log.warning(
                    "a task or a callback that a plugin started raised %s; the run goes on",
                    describe(error, place=False),
                )


class Runner:
    """An `asyncio.Runner` whose end waits neither for a thread that a plugin started by `asyncio.to_thread`, nor for a
    task that ignores its cancellation. say: told of a plugin that holds up the loop (`Watchdog`)."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._runner = asyncio.Runner(loop_factory=PluginProofLoop)
        self._say = say
        self._threads: DaemonThreads | None = None
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self._runner.get_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop, and return its result."""
        if self._threads is None:
            abandoned = Abandoned("asyncio.to_thread:", "give it a time-out of its own")
            self._threads = DaemonThreads("asyncio", _THREADS, abandoned)
            self.get_loop().set_default_executor(self._threads)
            self._watchdog = Watchdog(self._say) if self._say is not None else None
        if self._watchdog is None:
            return self._runner.run(work)
        with self._watchdog.over(self.get_loop()):
            return self._runner.run(work)

    def close(self) -> None:
        """End the event loop without waiting for what plugins left in it."""
        try:
            if self._threads is not None:
                self._runner.run(_end_tasks())
        finally:
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None
            self._runner.close()


def run(work: Coroutine[Any, Any, T], say: Callable[[str], None] | None = None) -> T:
    """Run a coroutine like `asyncio.run`, in a `Runner`."""
    with Runner(say) as runner:
        return runner.run(work)


async def _end_tasks() -> None:
    for _ in range(_ROUNDS):
        if not (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=GRACE)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        leave_behind(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is said already
        asyncio._unregister_task(task)  # the loop's own end waits for those that it knows of
