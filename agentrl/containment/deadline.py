"""`OwnedTask`: a plugin's code in a task of its own. `DeadlineTimer`: deadlines for what one task awaits.

The work runs in the request's own task: a task for every call would cost more than the rest of a turn. A deadline that
moves later costs nothing: the timer that is set fires, sees that it came early and sets itself again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.errors import InfrastructureError, PlainError, check_settings, contained, torch_settings

GRACE = 2.0
"""Seconds between asking work to end and cancelling it, and between one cancellation and the next."""

T = TypeVar("T")
_left_behind: set["asyncio.Task[Any]"] = set()
_log = logging.getLogger("agentrl.rollout")


class DeadlineExceededError(PlainError):
    """The awaited work did not end by its deadline, and was cancelled."""

    def __init__(self) -> None:
        super().__init__("took too long (rollout.turn_timeout, rollout.timeout)")


class SelfCancelledError(Exception):
    """The awaited work raised CancelledError although nobody cancelled it."""


class CancelledFromWithinError(PlainError):
    """The awaited work cancelled the task that it runs in, which is not its own."""

    def __init__(self) -> None:
        super().__init__("it cancelled the task that it runs in, which is not its own (a cancel scope left open?)")


@dataclass(slots=True, eq=False)
class OwnedTask:
    """The task that plugins' code runs in. From outside it is cancelled by `stop` alone, so that any other cancellation
    is known to come from the code itself.

    stopped: whether `stop` was called since the last `run` began.
    """

    stopped: bool = False
    _task: "asyncio.Task[Any] | None" = None

    def stop(self) -> None:
        """Cancel it. Before it runs this does nothing."""
        self.stopped = True
        if self._task is not None:
            self._task.cancel()

    async def run(self, work: "Coroutine[Any, Any, T]", patience: float, grace: float) -> "asyncio.Task[T]":
        """Run `work` in the task, which is returned: done, or left behind after `patience` seconds. Whoever cancels
        this, once or more, cancels the task, which has `grace` seconds to end, and is told afterwards."""
        self.stopped, cancelled, end = False, None, time.monotonic() + patience
        self._task = task = asyncio.create_task(work)
        while not task.done() and (left := end - time.monotonic()) > 0:
            try:
                await asyncio.wait({task}, timeout=left)
            except asyncio.CancelledError as error:
                end = end if cancelled else time.monotonic() + grace
                cancelled = error
                self.stop()
        self._task = None
        if not task.done():
            leave_behind(task)
        if cancelled is not None:
            raise cancelled
        return task


class DeadlineTimer:
    """Belongs to the task that makes it, and serves one `wait` at a time. `close` it at the end.

    own: distinguishes cancellations from outside from those of the work; without it, every cancellation that is not
    this timer's counts as one from outside.
    """

    __slots__ = ("_armed", "_base", "_cancels", "_gentle", "_handle", "_loop", "_own", "_task", "_when", "expired")

    def __init__(self, own: OwnedTask | None = None) -> None:
        task = asyncio.current_task()
        assert task is not None, "a DeadlineTimer is made inside a task"
        self._own, self._task = own, task
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
        the work raises, by `contained`; DeadlineExceededError when it was cancelled here; SelfCancelledError when it
        raised a cancellation that nobody asked for; CancelledFromWithinError when it cancelled this task.
        """
        self._when, self._gentle, self.expired = when, gentle, False
        self._cancels, self._base = 0, self._task.cancelling()
        if when < self._armed:
            self._arm(when)
        settings = torch_settings()
        try:
            try:
                if not isinstance(work, Awaitable):
                    raise InfrastructureError(f"it is not `async def`: it returned {type(work).__name__}")
                result = await work
                check_settings(settings)
            finally:
                self._when = math.inf
        except asyncio.CancelledError as error:
            mine, others = self._take_back(), self._task.cancelling() > self._base
            if others and (self._own is None or self._own.stopped):
                raise
            self._forgive()
            if mine:
                raise DeadlineExceededError from None
            raise (CancelledFromWithinError() if others else SelfCancelledError("it cancelled itself")) from error
        except BaseException as error:
            failure, mine = contained(error), self._take_back()
            if await self._cancelled_within():
                raise CancelledFromWithinError from failure
            if mine:
                raise DeadlineExceededError from failure
            if failure is error:
                raise
            raise failure from error
        if self._cancels:
            self._take_back()
        if self._task.cancelling() > self._base and await self._cancelled_within():
            raise CancelledFromWithinError
        return result

    async def _cancelled_within(self) -> bool:
        """Whether the work cancelled this task and left before that came to it: then it comes here, and is done
        with. Raises CancelledError where it came from outside."""
        if self._own is None or self._task.cancelling() <= self._base:
            return False
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._own.stopped:
                raise
            self._forgive()
            return True
        if not self._own.stopped:  # the work caught it, and went on
            self._forgive()
        return False

    def _forgive(self) -> None:
        while self._task.cancelling() > self._base:
            self._task.uncancel()

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
