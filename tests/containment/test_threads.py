"""Synchronous code of plugins: threads that are abandoned, processes that are killed, loops that end all the same."""

import asyncio
import contextvars
import os
import threading
from pathlib import Path

import pytest
from fakes import TASK, Env, ScriptedEngine, make_driver
from reward_functions import free, hang, where

from agentrl.containment.event_loop import Runner
from agentrl.containment.threads import MOST_ABANDONED, Abandoned, DaemonThreads, check_abandoned, name_of
from agentrl.errors import UserError
from agentrl.plugins.decorator import tool
from agentrl.plugins.rewards import make_rewards
from agentrl.plugins.types import Task
from agentrl.recipe.sections.env import RewardsSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.rollout.scorer import Scorer


@pytest.fixture(autouse=True)
def released():
    free.clear()
    yield
    free.set()


def driver_of(*functions, seconds=60.0, **limits):
    made = make_rewards(RewardsSection.model_validate({"functions": functions}))
    plain = make_driver(ScriptedEngine(lambda name, turn: "x"), **limits)
    scorer = Scorer(made, seconds)
    return made, Driver(
        engine=plain.engine, chat=plain.chat, environment=Env(), tools=(), limits=plain.limits, scorer=scorer
    )


def function(name, **more):
    return {"name": f"reward_functions:{name}", **more}


async def test_a_call_in_a_thread_keeps_its_context_and_what_it_raises():
    threads, value = DaemonThreads("test", 2), contextvars.ContextVar("value", default=0)
    value.set(3)
    assert await threads.call(value.get) == 3
    assert await asyncio.get_running_loop().run_in_executor(threads, threading.current_thread) is not None
    for error, raised in ((ValueError("no"), ValueError), (SystemExit(0), SystemExit)):

        def fail(error=error):
            raise error

        with pytest.raises(raised):
            await threads.call(fail)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(next, iter(()))
    threads.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        await threads.call(int)


async def test_an_abandoned_call_gives_its_place_to_another_and_is_counted_until_it_ends():
    abandoned = Abandoned("reward", "mend it")
    threads = DaemonThreads("test", 1, abandoned)
    began = threading.Semaphore(0)

    def one() -> None:
        began.release()
        free.wait()

    for _ in range(MOST_ABANDONED):
        check_abandoned()
        call = asyncio.ensure_future(threads.call(one))
        while not began.acquire(blocking=False):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    assert await threads.call(int) == 0
    with pytest.raises(UserError, match=rf"^reward {__name__}\..*one: {MOST_ABANDONED} calls hang.*; mend it$"):
        check_abandoned()
    free.set()
    while abandoned._counts:
        await asyncio.sleep(0)
    check_abandoned()


async def test_what_waits_is_dropped_at_the_end_and_nobody_waits_for_what_runs():
    threads = DaemonThreads("test", 1)
    began = threading.Event()
    first = asyncio.ensure_future(threads.call(lambda: (began.set(), free.wait())))
    calls = [first, *(asyncio.ensure_future(threads.call(free.wait)) for _ in range(2))]
    while not began.is_set():
        await asyncio.sleep(0)
    threads.shutdown(wait=True)
    while not (calls[1].done() and calls[2].done()):
        await asyncio.sleep(0)
    assert not calls[0].done()
    assert calls[1].cancelled()
    calls[0].cancel()
    await asyncio.wait(calls)


def test_a_function_has_its_name_through_partials_and_contexts():
    from functools import partial

    context = contextvars.copy_context()
    assert name_of(partial(context.run, partial(hang, 1), 2)) == "reward_functions.hang"
    assert name_of(partial(partial(hang), 1)) == "reward_functions.hang"


@pytest.mark.slow
async def test_a_reward_that_hangs_now_and_then_costs_its_own_samples_alone():
    made, driver = driver_of(function("hang_when_told"), seconds=3, retries=0)  # nobody who returns takes that long
    for _ in range(2):
        tasks = [Task(f"{name}{i}", {"hang": name == "b"}) for i in range(8) for name in "ab"]
        groups = await roll_out(driver, tasks, 1)
        for group in groups:
            assert len(group.failed) == group.task.data["hang"]
    await made.close()


async def test_too_many_calls_that_hang_end_the_roll_out_in_one_line():
    made, driver = driver_of(function("hang"), seconds=0.05, retries=0)
    with pytest.raises(UserError) as error:
        await roll_out(driver, [Task(str(i), {}) for i in range(2 * MOST_ABANDONED)], 1)
    assert str(error.value).startswith("reward reward_functions.hang: 32 calls hang, each in a thread of its own; ")
    assert "processes: 2" in str(error.value)
    await made.close()
    check_abandoned()  # the next run in this process begins with none


async def test_a_tool_in_a_thread_and_to_thread_in_a_plugin_are_counted_too():
    entered = threading.Semaphore(0)

    @tool(thread=True)
    def stuck() -> str:
        """Wait."""
        entered.release()
        free.wait()
        return ""

    calls = [asyncio.ensure_future(stuck.execute(None)) for _ in range(MOST_ABANDONED)]
    for _ in calls:  # a thread that was only started has not taken its call yet
        while not entered.acquire(blocking=False):
            await asyncio.sleep(0)
    while any(call.cancel() for call in calls):
        await asyncio.sleep(0)
    with pytest.raises(UserError, match=r"^tool .*stuck: 32 calls hang"):
        check_abandoned()
    await stuck.close()
    check_abandoned()


async def test_a_function_that_raises_stop_iteration_fails_at_once():
    made, driver = driver_of(function("stops"), retries=0)
    (group,) = await roll_out(driver, [TASK], 1)
    assert group.failed[0].failure.message.startswith("stops: RuntimeError: it raised StopIteration")
    await made.close()


def test_a_loop_ends_although_a_thread_and_a_task_hang():
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, free.wait)
        kept.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)

    kept: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.containment.event_loop.GRACE", 0.01)
        with Runner() as runner:
            runner.run(main())
    assert not free.is_set()


@pytest.mark.slow
async def test_a_reward_in_processes_is_scored_there_and_killed_when_it_hangs(tmp_path):
    mark = tmp_path / "mark"
    made, driver = driver_of(
        function("hang_in_a_process", args={"mark": str(mark)}, processes=1), function("where", processes=2), retries=0
    )
    ((good,),) = [g.trajectories for g in await roll_out(driver, [Task("good", {"hang": False})], 1)]
    assert good.rewards["hang_in_a_process"] == 1.0
    assert good.rewards["where"] not in (os.getpid(), float(mark.read_text()))
    first = int(mark.read_text())
    mark.unlink()
    rolling = asyncio.ensure_future(roll_out(driver, [Task("bad", {"hang": True})], 1))
    while not mark.exists():
        await asyncio.sleep(0.01)
    rolling.cancel()
    await asyncio.wait([rolling])
    while Path(f"/proc/{first}").exists():
        await asyncio.sleep(0.01)
    (again,) = await roll_out(driver, [Task("good", {"hang": False})], 1)
    assert again.trajectories[0].rewards["hang_in_a_process"] == 1.0
    assert int(mark.read_text()) != first
    await made.close()
    while Path(f"/proc/{mark.read_text()}").exists():
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_process_has_the_environment_and_scores_groups(monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_SETTING", "2.5")
    made, driver = driver_of(function("setting", processes=1), function("places", processes=1))
    (group,) = await roll_out(driver, [TASK], 2)
    assert [(t.rewards["setting"], t.rewards["places"]) for t in group.trajectories] == [(2.5, 1.0)] * 2
    await made.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("crash", {}, "crash: its process ended by exit code 7"),
        ("leave", {}, "leave: SystemExit: enough (reward_functions.py:"),
        ("where", {"f": lambda: 0}, "where: the sample cannot be sent to a process ("),
    ],
)
async def test_what_a_process_cannot_do_is_said_in_a_line(name, data, line):
    made, driver = driver_of(function(name, processes=1), retries=0)
    (group,) = await roll_out(driver, [Task("t", data)], 1)
    assert line in group.failed[0].failure.message
    assert "\n" not in group.failed[0].failure.message
    await made.close()


async def test_a_reward_that_only_this_process_can_import_is_named(monkeypatch):
    import sys
    import types

    module = types.ModuleType("only_here")
    module.where = where
    monkeypatch.setitem(sys.modules, "only_here", module)
    made, driver = driver_of({"name": "only_here:where", "processes": 1}, retries=0)
    (group,) = await roll_out(driver, [TASK], 1)
    assert "where: it cannot be imported in a process of its own: " in group.failed[0].failure.message
    assert "only_here" in group.failed[0].failure.message
    await made.close()
