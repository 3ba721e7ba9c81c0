"""`Watch`: foreign work of one request, awaited under deadlines, with one timer for all of them.

The work runs in tasks of its own, so what ignores its cancellation is left behind and said; the request goes on. A
deadline that moves later costs nothing: the timer that is set fires, sees that it came early and sets itself again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

GRACE = 2.0
"""Seconds between asking work to end and cancelling it, and between cancelling it and leaving it behind."""

T = TypeVar("T")
_left_behind: set["asyncio.Task[Any]"] = set()
_NOTHING: "frozenset[asyncio.Task[Any]]" = frozenset()
_log = logging.getLogger("agentrl.rollout")


class DeadlineExceededError(Exception):
    """The awaited work did not end by its deadline, and was cancelled."""


class SelfCancelledError(Exception):
    """The awaited work raised CancelledError although nobody cancelled it."""


class Watch:
    """Serves one `wait` at a time. `close` it at the end."""

    __slots__ = (
        "_armed",
        "_cut",
        "_gentle",
        "_handle",
        "_loop",
        "_open",
        "_tasks",
        "_waiter",
        "_when",
        "expired",
    )

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._armed = self._when = math.inf
        self._tasks: list[asyncio.Task[Any]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._open = 0
        self._gentle: Callable[[], None] | None = None
        self._cut: AbstractSet[asyncio.Task[Any]] = _NOTHING  # what we cancelled
        self.expired = False  # whether the last `wait` ran into its deadline

    async def wait(self, work: Coroutine[Any, Any, T], when: float, gentle: Callable[[], None] | None = None) -> T:
        """The result of `work`, which is cancelled at `when` (seconds of time.monotonic).

        gentle: called first, once; the cancellation follows GRACE seconds later where that did not end it. Raises what
        the work raises, DeadlineExceededError when it was cancelled here, SelfCancelledError when it cancelled itself.
        """
        outcome = (await self.wait_all([work], when, gentle))[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def wait_all(
        self, works: list[Coroutine[Any, Any, T]], when: float, gentle: Callable[[], None] | None = None
    ) -> "list[T | BaseException]":
        """As `wait`, for several works at once under one deadline; what a work raises takes the place of its result."""
        self._when, self._gentle, self._cut, self.expired = when, gentle, _NOTHING, False
        self._waiter = self._loop.create_future()
        self._open = len(works)
        self._tasks = [self._loop.create_task(work) for work in works]
        for task in self._tasks:
            task.add_done_callback(self._one_done)
        if when < self._armed:
            self._arm(when)
        try:
            await self._waiter
        except asyncio.CancelledError:
            await self._abandon_after_grace()
            raise
        finally:
            tasks, self._tasks, self._waiter, self._when = self._tasks, [], None, math.inf
        return [self._outcome(task) for task in tasks]

    def close(self) -> None:
        """Drop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self._armed = None, math.inf

    def _one_done(self, _: "asyncio.Task[Any]") -> None:
        self._open -= 1
        if self._open == 0 and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed = when
        self._handle = self._loop.call_later(max(0.0, when - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._handle, self._armed = None, math.inf
        if self._when == math.inf:
            return
        if time.monotonic() >= self._when:
            self._expire()
        self._arm(self._when)

    def _expire(self) -> None:
        """One step further each time: ask, cancel, leave behind."""
        self.expired, self._when = True, time.monotonic() + GRACE
        gentle, self._gentle = self._gentle, None
        if gentle is not None:
            gentle()
        elif not self._cut:
            self._cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cancel(self) -> None:
        self._cut = {task for task in self._tasks if not task.done()}
        for task in self._cut:
            task.cancel()

    async def _abandon_after_grace(self) -> None:
        """The request itself is cancelled: cancel the work, and give it GRACE seconds to end."""
        self._cancel()
        self._waiter = None
        pending = {task for task in self._tasks if not task.done()}
        end = time.monotonic() + GRACE
        while pending and time.monotonic() < end:
            try:
                _, pending = await asyncio.wait(pending, timeout=end - time.monotonic())
            except asyncio.CancelledError:
                pending = {task for task in pending if not task.done()}
        for task in self._tasks:
            self._outcome(task)

    def _outcome(self, task: "asyncio.Task[T]") -> T | BaseException:
        if not task.done():
            _leave_behind(task)
            return DeadlineExceededError("it ignores its cancellation and was left behind")
        if task.cancelled():
            return DeadlineExceededError() if task in self._cut else SelfCancelledError("it cancelled itself")
        error = task.exception()
        if error is None:
            return task.result()
        return DeadlineExceededError(str(error)) if task in self._cut else error


def _leave_behind(task: "asyncio.Task[Any]") -> None:
    _log.warning("%s ignores its cancellation and is left behind", task.get_coro())
    _left_behind.add(task)
    task.add_done_callback(_gone)


def _gone(task: "asyncio.Task[Any]") -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()
