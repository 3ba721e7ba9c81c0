"""Daemon threads for synchronous code, a set for each purpose.

The threads of `concurrent.futures` are joined when the process ends, and a call keeps one for as long as it takes, so
that a function which hangs now and then uses them up. Here a call that nobody waits for any more is abandoned: its
thread is left to end by itself, and another takes its place. Too many abandoned calls of one function end the run.
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
"""Threads that calls of one function may keep although nobody waits for them."""
IDLE_SECONDS = 60.0
"""After which a thread without work ends."""

_full: "dict[Abandoned, str]" = {}  # those that hold too many, and what is said of it


class Abandoned:
    """The calls that still run though nobody waits for them, counted by function.

    what: the kind of function, as an error names it. remedy: what its author can do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1
            if (count := self._counts[name]) >= MOST_ABANDONED and not self._closed:
                line = f"{self._what} {name}: {count} calls hang, each in a thread of its own; {self._remedy}"
                _full.setdefault(self, line)

    def remove(self, name: str) -> None:
        with self._lock:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
            if max(self._counts.values(), default=0) < MOST_ABANDONED:
                _full.pop(self, None)

    def close(self) -> None:
        """The run is over: nobody is to be told of them."""
        with self._lock:
            _full.pop(self, None)
            self._closed = True


def check_abandoned() -> None:
    """Raises UserError, one line, when MOST_ABANDONED calls of one function hang."""
    for line in list(_full.values()):
        raise UserError(line)


class Call(Future[Any]):
    """A call of a function. One that is cancelled while it runs is abandoned."""

    def __init__(
        self, function: Callable[[], Any], abandoned: Abandoned | None, left: Callable[[], None] = lambda: None
    ) -> None:
        """left: called when it is abandoned."""
        super().__init__()
        self._function, self._abandoned, self._left = function, abandoned, left
        self._lock = threading.Lock()
        self._lost = self._over = False
        self.name = name_of(function)

    def cancel(self) -> bool:
        if super().cancel():
            return True
        with self._lock:
            if self._lost or self._over:
                return False
            self._lost = True
            if self._abandoned is not None:
                self._abandoned.add(self.name)
        self._left()
        return False

    def run(self) -> bool:
        """Call the function, unless it was cancelled before. Returns False when it was abandoned meanwhile."""
        if not self.set_running_or_notify_cancel():
            return True
        result, failure = None, None
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: whoever waits for the call gets it
            failure = _raisable(error)
        del self._function
        with self._lock:
            self._over = True
            if self._lost and self._abandoned is not None:
                self._abandoned.remove(self.name)
        if failure is None:
            self.set_result(result)
        else:
            self.set_exception(failure)
            del failure  # its traceback holds this frame
        return not self._lost


def _raisable(error: BaseException) -> BaseException:
    """A future that asyncio awaits cannot raise StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    made = RuntimeError(f"it raised StopIteration: {error}")
    made.__cause__ = error
    return made.with_traceback(error.__traceback__)


class DaemonThreads(ThreadPoolExecutor):
    """Runs at most `most` calls at once, abandoned ones not counted, in daemon threads that are started as they are
    needed. abandoned: counts those; None: the functions are trusted to end.

    A ThreadPoolExecutor in name only, which asyncio asks of a loop's default executor.
    """

    def __init__(self, name: str, most: int, abandoned: Abandoned | None = None) -> None:
        super().__init__(1, name)
        self._name, self._most, self._abandoned = name, most, abandoned
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._running = self._idle = 0  # threads that are not abandoned, and those of them that wait for a call
        self._numbers = itertools.count()
        self._closed = False

    async def call(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The function's result, called in this context. A cancellation abandons the call."""
        context = contextvars.copy_context()
        work = functools.partial(context.run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self, work)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
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
                return  # another took its place
            del call

    def _next(self) -> Call | None:
        """The next call; None when there will be none for this thread."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._calls or self._closed, IDLE_SECONDS)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._running -= 1
            return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and drop those that wait. Whatever `wait` says, nobody waits for one that runs."""
        with self._changed:
            self._closed = True
            waiting, self._calls = list(self._calls), deque()
            self._changed.notify_all()
        if self._abandoned is not None:
            self._abandoned.close()
        for call in waiting:
            call.cancel()


def name_of(function: Callable[..., Any]) -> str:
    """`module.name` of the function that a chain of partials calls in the end."""
    while isinstance(function, functools.partial):
        inner: Any = function.func
        ran = isinstance(getattr(inner, "__self__", None), contextvars.Context) and function.args
        function = function.args[0] if ran else inner
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


_own = DaemonThreads("agentrl", 1024)


async def in_thread(function: Callable[..., T], /, *args: Any) -> T:
    """`asyncio.to_thread` for agentrl's own code, which shares no thread with that of plugins."""
    return await _own.call(function, *args)
