"""The event loop that plugins run in: it survives their exits, and ends whatever they leave behind.

asyncio hands SystemExit and KeyboardInterrupt of any task or callback to whoever runs the event loop, which ends the
run. `errors.contained` catches those of requests before they leave their task; `PluginProofLoop` goes on after those
of tasks and callbacks that a plugin starts itself.
"""

import asyncio
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from agentrl.containment.deadline import GRACE, leave_behind
from agentrl.containment.threads import Abandoned, DaemonThreads
from agentrl.containment.watchdog import Ending, Watchdog
from agentrl.errors import UserError, describe, from_signal, is_own, signal_handlers

T = TypeVar("T")
_THREADS = 32  # calls of `asyncio.to_thread` at once
_OURS = str(Path(__file__).parents[1])
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


def _caller() -> str | None:
    """The function of a plugin that calls this one's caller, and its line; None where none does: where a signal
    came in the midst of it, its handler does."""
    handlers = signal_handlers()
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        code = frame.f_code
        if is_own(code.co_filename):
            return f"{code.co_qualname} ({Path(code.co_filename).name}:{line})"
        if code.co_filename.startswith(_OURS) or code in handlers:
            return None
    return None


class _Work(asyncio.Task[object]):
    """The task that a loop is run for."""

    canceller: str | None = None
    """The function of a plugin that cancelled it."""

    def cancel(self, msg: Any | None = None) -> bool:
        self.canceller = self.canceller or _caller()
        return super().cancel(msg)


class PluginProofLoop(asyncio.SelectorEventLoop):
    """An event loop that goes on when a task or a callback raises SystemExit or KeyboardInterrupt, unless it is the
    work that it runs, or a signal's handler, that raised it. Whoever awaits such a task is told as ever."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        super().__init__()

    _work: "asyncio.Future[Any] | None" = None  # what `run_until_complete` runs

    def stop(self) -> None:
        """Stop, unless it is a plugin that asks for it while the work goes on: that is told, and nothing else."""
        if self._work is None or self._work.done() or (owner := _caller()) is None:
            super().stop()
        else:
            self._say(f"{owner} stops the event loop, which is not its own; the run goes on")

    def create_task(self, coro: Any, **given: Any) -> "asyncio.Task[Any]":
        """Make a task; the one that is run to its end remembers who cancelled it."""
        if self.is_running():
            return super().create_task(coro, **given)
        return _Work(coro, loop=self, **given)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Say in one line, once, what a task or a callback that nobody awaits has raised."""
        error = context.get("exception")
        if sys.is_finalizing():
            return
        if error is None:
            super().call_exception_handler(context)
            return
        task = context.get("task") or context.get("future")
        code = getattr(task.get_coro(), "cr_code", None) if isinstance(task, asyncio.Task) else None
        what = f"a task in the background ({code.co_qualname})" if code is not None else "a callback in the background"
        self._say(f"{what} raised {describe(error)}; nobody awaits it, and the run goes on")

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            _log.warning("%s", line)

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run the work to its end, whatever other tasks and callbacks raise; return its result."""
        work: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        self._work = work
        while True:
            try:
                return super().run_until_complete(work)
            except asyncio.CancelledError as error:
                if not isinstance(work, _Work) or work.canceller is None:
                    raise
                raise UserError(
                    f"{work.canceller} cancelled the task that the run is in, not one of its own"
                ) from error
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
    task that ignores its cancellation. say: told of a plugin that holds up the loop (`Watchdog`). ending: how the run
    ends where that lasts."""

    def __init__(self, say: Callable[[str], None] | None = None, ending: Ending | None = None) -> None:
        self._runner = asyncio.Runner(loop_factory=PluginProofLoop)
        self._say, self._ending = say, ending
        self._threads: DaemonThreads | None = None
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop."""
        return self._runner.get_loop()

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Run a coroutine in the event loop, and return its result."""
        if self._threads is None:
            abandoned = Abandoned("asyncio.to_thread:", "give it a time-out of its own")
            self._threads = DaemonThreads("asyncio", _THREADS, abandoned)
            self.get_loop().set_default_executor(self._threads)
            self._watchdog = Watchdog(self._say, ending=self._ending) if self._say is not None else None
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


def run(work: Coroutine[object, None, T], say: Callable[[str], None] | None = None) -> T:
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
