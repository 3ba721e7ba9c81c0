"""Deadlines: what is cut, what is not, and that the task is left as it was."""

import asyncio
import time

import pytest

from agentrl.containment import deadline as watch_module
from agentrl.containment.deadline import DeadlineExceededError, DeadlineTimer, SelfCancelledError


def soon(seconds=0.01):
    return time.monotonic() + seconds


async def test_it_returns_and_raises_what_the_work_does():
    async def fails():
        raise KeyError("k")

    timer = DeadlineTimer()
    assert await timer.wait(asyncio.sleep(0, "x"), soon(60)) == "x"
    with pytest.raises(KeyError):
        await timer.wait(fails(), soon(60))
    timer.close()


async def test_it_cuts_what_hangs_and_leaves_the_task_uncancelled():
    timer = DeadlineTimer()
    for _ in range(3):
        with pytest.raises(DeadlineExceededError):
            await timer.wait(asyncio.sleep(60), soon())
    assert asyncio.current_task().cancelling() == 0
    assert timer.expired
    await timer.wait(asyncio.sleep(0), soon(60))
    assert not timer.expired


async def test_one_timer_serves_deadlines_that_come_and_go():
    timer = DeadlineTimer()
    await timer.wait(asyncio.sleep(0), soon(60))
    with pytest.raises(DeadlineExceededError):
        await timer.wait(asyncio.sleep(60), soon(0.01))
    await timer.wait(asyncio.sleep(0.03), soon(60))
    with pytest.raises(DeadlineExceededError):
        await timer.wait(asyncio.sleep(60), soon(0.02))
    timer.close()


async def test_gentle_comes_first_and_what_then_returns_is_kept():
    event = asyncio.Event()
    timer = DeadlineTimer()
    assert await timer.wait(event.wait(), soon(), event.set)
    assert timer.expired


async def test_what_ignores_gentle_is_cancelled_after_the_grace(monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE", 0.01)
    asked = []
    with pytest.raises(DeadlineExceededError):
        await DeadlineTimer().wait(asyncio.sleep(60), soon(), lambda: asked.append(1))
    assert asked == [1]


async def test_a_cleanup_that_hangs_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE", 0.01)

    async def stubborn():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(60)

    with pytest.raises(DeadlineExceededError):
        await DeadlineTimer().wait(stubborn(), soon())
    assert asyncio.current_task().cancelling() == 0


async def test_an_error_raised_because_of_the_cancellation_is_the_deadline():
    async def turns_it_into_an_error():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("closed") from None

    with pytest.raises(DeadlineExceededError):
        await DeadlineTimer().wait(turns_it_into_an_error(), soon())


async def test_a_result_that_comes_in_spite_of_the_cancellation_is_kept():
    async def answers():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "late"

    assert await DeadlineTimer().wait(answers(), soon()) == "late"
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_outside_goes_through():
    async def wait():
        await DeadlineTimer().wait(asyncio.sleep(60), soon(60))

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_cancels_itself_is_an_error():
    async def cancels_itself():
        raise asyncio.CancelledError

    with pytest.raises(SelfCancelledError):
        await DeadlineTimer().wait(cancels_itself(), soon())
