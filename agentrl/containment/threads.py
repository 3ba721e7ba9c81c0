"""Pools of daemon threads for synchronous code, one pool for each purpose.

The threads of `concurrent.futures` are joined when the process ends, and a call that hangs occupies its thread forever,
so that a function that hangs now and then uses up the pool. Here, a call that is cancelled while it runs is abandoned:
its thread is left to end by itself, and another thread replaces it. Too many abandoned calls of one function end the
run.
"""

import asyncio
import contextvars
import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from agentrl.errors import UserError

T = TypeVar("T")
MOST_ABANDONED = 32
"""Number of abandoned calls of one function at which the run ends."""
IDLE_SECONDS = 60.0
"""Time after which a thread without a call ends."""

_full: "dict[Abandoned, str]" = {}  # those with too many abandoned calls, and the error line of each


class Abandoned:
    """Counts of abandoned calls that still run, by function.

    what: the kind of function, for the error line. remedy: what its author can do, for the error line.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def total(self) -> int:
        """How many there are."""
        with self._lock:
            return sum(self._counts.values())

    def add(self, name: str) -> None:
        """Count an abandoned call of the function `name`."""
        with self._lock:
            self._counts[name] += 1
            if (count := self._counts[name]) >= MOST_ABANDONED and not self._closed:
                line = f"{self._what} {name}: {count} calls hang, each in a thread of its own; {self._remedy}"
                _full.setdefault(self, line)

    def remove(self, name: str) -> None:
        """Count an abandoned call of the function `name` as ended."""
        with self._lock:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
            if max(self._counts.values(), default=0) < MOST_ABANDONED:
                _full.pop(self, None)

    def close(self) -> None:
        """Report nothing from now on: the run has ended."""
        with self._lock:
            _full.pop(self, None)
            self._closed = True


def check_abandoned() -> None:
    """Raise UserError, one line, if MOST_ABANDONED calls of one function hang."""
    for line in list(_full.values()):
        raise UserError(line)


class Call(Future[Any]):
    """A call of a function in a thread. A call that is cancelled while it runs is abandoned."""

    def __init__(
        self, function: Callable[[], object], abandoned: Abandoned | None, on_abandon: Callable[[], None] = lambda: None
    ) -> None:
        """abandoned: counts the call if it is abandoned. on_abandon: called when it is abandoned."""
        super().__init__()
        self._function, self._abandoned, self._on_abandon = function, abandoned, on_abandon
        self._lock = threading.Lock()
        self._is_abandoned = self._ended = False
        self.name = name_of(function)
        """`module.name` of the function."""

    def cancel(self) -> bool:
        """Cancel the call before it starts, and return True; abandon it if it runs, and return False."""
        if super().cancel():
            return True
        with self._lock:
            if self._is_abandoned or self._ended:
                return False
            self._is_abandoned = True
            if self._abandoned is not None:
                self._abandoned.add(self.name)
        self._on_abandon()
        return False

    def run(self) -> bool:
        """Call the function, unless the call was cancelled. Return False if the call was abandoned meanwhile."""
        if not self.set_running_or_notify_cancel():
            return True
        result, failure = None, None
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - boundary of the thread: the future raises it
            failure = _raisable(error)
        del self._function
        with self._lock:
            self._ended = True
            if self._is_abandoned and self._abandoned is not None:
                self._abandoned.remove(self.name)
        if failure is None:
            self.set_result(result)
        else:
            self.set_exception(failure)
            del failure  # its traceback refers to this frame
        return not self._is_abandoned


def _raisable(error: BaseException) -> BaseException:
    """`error`, or a RuntimeError in place of StopIteration, which a future awaited by asyncio cannot raise."""
    if not isinstance(error, StopIteration):
        return error
    made = RuntimeError(f"it raised StopIteration: {error}")
    made.__cause__ = error
    return made.with_traceback(error.__traceback__)


class DaemonThreads(ThreadPoolExecutor):
    """A pool of daemon threads, started on demand, which runs at most `most` calls at once besides abandoned ones.

    name: prefix of the threads' names. abandoned: counts the abandoned calls; None: the functions are trusted to end.

    It derives from ThreadPoolExecutor, without using it, because asyncio requires that of a loop's default executor.
    """

    def __init__(self, name: str, most: int, abandoned: Abandoned | None = None) -> None:
        super().__init__(1, name)
        self._name, self._most, self._abandoned = name, most, abandoned
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._running = self._idle = 0  # threads without an abandoned call, and those of them that wait for a call
        self._numbers = itertools.count()
        self._closed = False

    async def call(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> T:
        """Call the function in a thread, with the current context variables, and return its result.

        Cancelling this coroutine abandons the call.
        """
        context = contextvars.copy_context()
        work = functools.partial(context.run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self, work)

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> "Future[T]":
        """Queue a call. Raises RuntimeError after `shutdown`."""
        call = Call(functools.partial(fn, *args, **kwargs), self._abandoned, self._replace)
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the threads {self._name!r} are closed")
            self._calls.append(call)
            self._changed.notify()
            self._grow()
        return call

    def _grow(self) -> None:
        if len(self._calls) > self._idle and self._running < self._most:
            self._running += 1
            threading.Thread(target=self._work, name=f"{self._name}_{next(self._numbers)}", daemon=True).start()

    def _replace(self) -> None:
        with self._changed:
            self._running -= 1
            self._grow()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            if not call.run():
                return  # another thread has replaced this one
            del call

    def _next(self) -> Call | None:
        """Wait for the next call; return None if this thread shall end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._calls or self._closed, IDLE_SECONDS)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._running -= 1
            return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls and cancel the queued ones. Running calls are not waited for, whatever `wait` is."""
        with self._changed:
            self._closed = True
            waiting, self._calls = list(self._calls), deque()
            self._changed.notify_all()
        if self._abandoned is not None:
            self._abandoned.close()
        for call in waiting:
            call.cancel()


def name_of(function: Callable[..., object]) -> str:
    """`module.name` of a function, unwrapped from partials and `Context.run`."""
    while isinstance(function, functools.partial):
        inner = function.func
        ran = isinstance(getattr(inner, "__self__", None), contextvars.Context) and function.args
        function = function.args[0] if ran else inner
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


_own = DaemonThreads("agentrl", 1024)


async def in_thread(function: Callable[..., T], /, *args: object) -> T:
    """Like `asyncio.to_thread`, for agentrl's own code, in threads that plugins do not use."""
    return await _own.call(function, *args)
