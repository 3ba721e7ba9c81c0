"""`Watch`: deadlines for what one asyncio task awaits, with one timer for all of them.

The work runs in the request's own task: a task for every call would cost more than the rest of a turn. A deadline that
moves later costs nothing: the timer that is set fires, sees that it came early and sets itself again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

GRACE = 2.0
"""Seconds between asking work to end and cancelling it, and between one cancellation and the next."""

T = TypeVar("T")
_left_behind: set["asyncio.Task[Any]"] = set()
_log = logging.getLogger("agentrl.rollout")


class DeadlineExceededError(Exception):
    """The awaited work did not end by its deadline, and was cancelled."""


class SelfCancelledError(Exception):
    """The awaited work raised CancelledError although nobody cancelled it."""


class Watch:
    """Belongs to the task that makes it, and serves one `wait` at a time. `close` it at the end."""

    __slots__ = ("_armed", "_base", "_cancels", "_gentle", "_handle", "_loop", "_task", "_when", "expired")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a Watch is made inside a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._armed = math.inf
        self._when = math.inf
        self._base = self._cancels = 0
        self._gentle: Callable[[], None] | None = None
        self.expired = False  # whether the last `wait` ran into its deadline

    async def wait(self, work: Awaitable[T], when: float, gentle: Callable[[], None] | None = None) -> T:
        """The result of `work`, cancelled at `when` (seconds of time.monotonic) and every GRACE seconds again.

        gentle: called first, once; the cancellation follows GRACE seconds later where that did not end it. Raises what
        the work raises, DeadlineExceededError when it was cancelled here, SelfCancelledError when it cancelled itself.
        """
        self._when, self._gentle, self.expired = when, gentle, False
        self._cancels, self._base = 0, self._task.cancelling()
        if when < self._armed:
            self._arm(when)
        try:
            result = await work
        except asyncio.CancelledError as error:
            mine = self._take_back()
            if self._task.cancelling() > self._base:
                raise
            if mine:
                raise DeadlineExceededError from None
            raise SelfCancelledError("it cancelled itself") from error
        except Exception as error:
            if self._take_back():
                raise DeadlineExceededError from error
            raise
        finally:
            self._when = math.inf
        if self._cancels:
            self._take_back()
        return result

    def close(self) -> None:
        """Drop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self._armed = None, math.inf

    def _arm(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed = when
        self._handle = self._loop.call_later(max(0.0, when - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._handle, self._armed = None, math.inf
        if self._when == math.inf:
            return
        try:
            if time.monotonic() >= self._when:
                self._when = time.monotonic() + GRACE
                self._expire()
        finally:  # whatever `gentle` does, the next step is timed
            self._arm(self._when)

    def _expire(self) -> None:
        gentle, self._gentle, self.expired = self._gentle, None, True
        if gentle is not None:
            gentle()
            return
        self._cancels += 1
        self._task.cancel()

    def _take_back(self) -> bool:
        """Undo the cancellations that were ours: the task then counts as cancelled only if somebody else did it."""
        mine = self._cancels > 0
        for _ in range(self._cancels):
            self._task.uncancel()
        self._cancels = 0
        return mine


def leave_behind(task: "asyncio.Task[Any]") -> None:
    """Wait no longer for a task that ignores its cancellation; what it still comes to interests nobody."""
    _log.warning("%s ignores its cancellation and is left behind", task.get_coro())
    _left_behind.add(task)
    task.cancel()
    task.add_done_callback(_gone)


def _gone(task: "asyncio.Task[Any]") -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()
