"""Groups of samples: order, retries, what is left out, and that no request takes another down."""

import asyncio
import gc
import json
from collections import Counter

import numpy as np
import pytest
from fakes import Echo, Env, Hooks, ScriptedEngine, abort_when_waiting, call, make_driver
from processes import eventually

from agentrl.containment import deadline as timer
from agentrl.plugins.types import Task, ToolResponse
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import Contrast, contrast, rare_collections, roll_out
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.trajectory_file import record, row
from agentrl.trajectory import Boundary, FinishReason, Group, Trajectory

TASKS = [Task(f"t{i}", {"i": i}) for i in range(3)]


def trajectory(reward, **kwargs):
    ids, mask = np.zeros(3, np.int32), np.array([0, 1, 1], np.uint8)
    version = np.array([-1, 0, 0], np.int32)
    rewards = {"env": reward}
    return Trajectory(
        "r", TASKS[0], 0, ids, mask, np.zeros(3, np.float32), version, 1, (), (), rewards, FinishReason.STOP, **kwargs
    )


async def test_groups_come_in_the_order_of_tasks_and_samples_with_rewards_of_their_own():
    env = Env(calc_reward=lambda session: float(session.id.split("#")[1].split(".")[0]))
    groups = await roll_out(make_driver(lambda *_: "4", env), TASKS, 4)
    assert [g.task for g in groups] == TASKS
    for group in groups:
        assert [t.sample for t in group.trajectories] == [0, 1, 2, 3]
        assert [t.reward for t in group.trajectories] == [0, 1, 2, 3]
        assert contrast(group) is Contrast.VARIED


async def test_a_failed_sample_is_tried_again_with_another_seed_and_says_so():
    tries = Counter()

    def flaky(session):
        tries[session.task.id] += 1
        if tries[session.task.id] == 1:
            raise RuntimeError("boom")
        return 1.0

    engine = ScriptedEngine(lambda *_: "4")
    groups = await roll_out(make_driver(engine, Env(calc_reward=flaky)), TASKS, 2, seed=(7, 1))
    assert [(len(g.trajectories), len(g.failed)) for g in groups] == [(2, 0)] * 3
    retried = [t.extra["retried"] for g in groups for t in g.trajectories if t.extra]
    assert len(retried) == 3
    assert "reward: env.calc_reward: RuntimeError: boom" in retried[0][0]
    assert len({s.seed for s in engine.samplings}) == 9
    metrics = rollout_metrics(groups)
    assert (metrics["rollout/retried"], metrics["rollout/failed"]) == (3, 0)


@pytest.mark.parametrize("retries", [0, 2])
async def test_what_keeps_failing_is_left_out_and_its_group_goes_on(retries):
    hooks = Hooks()

    def odd(session):
        if "#1." in session.id:
            raise RuntimeError("boom")
        return [{"role": "user", "content": "?"}]

    groups = await roll_out(make_driver(lambda *_: "4", Env(hooks, create=odd), retries=retries), TASKS, 3)
    for group in groups:
        assert [t.sample for t in group.trajectories] == [0, 2]
        assert [(t.sample, t.failure.boundary) for t in group.failed] == [(1, Boundary.ENVIRONMENT)]
    assert hooks.total("env", "create") == 3 * (2 + 1 + retries)
    metrics = rollout_metrics(groups)
    assert metrics["rollout/failed"] == metrics["rollout/failed/environment"] == 3
    assert metrics["rollout/retried"] == 3 * retries
    assert metrics["stop/error"] == 3
    assert metrics["groups/equal"] == 3
    hooks.check()


def two_turns(_, turn):
    return call("echo") if turn == 0 else "4"


async def test_no_more_requests_are_in_flight_than_allowed():
    flying = most = 0

    async def execute(session, **_):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001)
        flying -= 1
        return "ok"

    await roll_out(make_driver(two_turns, tools=[Echo(execute=execute)], concurrency=4), TASKS, 4)
    assert most == 4


async def test_a_slow_tool_delays_its_own_request_alone():
    ended, others = [], asyncio.Event()

    async def execute(session, **_):
        if session.task.id == "t0":
            await others.wait()
        return "ok"

    def note(_, trajectory):
        ended.append(trajectory.task.id)
        if len(ended) == 8:
            others.set()

    await roll_out(make_driver(two_turns, tools=[Echo(execute=execute)]), TASKS, 4, on_sample=note)
    assert ended[8:] == ["t0"] * 4


async def test_groups_are_told_as_they_end():
    told = []
    await roll_out(make_driver(lambda *_: "4"), TASKS, 2, on_group=told.append)
    assert sorted(g.task.id for g in told) == ["t0", "t1", "t2"]
    assert all(len(g.trajectories) == 2 for g in told)


async def test_the_prompt_of_a_task_is_rendered_once_unless_its_samples_differ():
    rendered = []
    driver = make_driver(lambda *_: "4", Env(create=lambda s: [{"role": "user", "content": s.task.id}]))
    render = driver.chat.render
    driver.chat.render = lambda *args: rendered.append(1) or render(*args)
    groups = await roll_out(driver, TASKS, 4)
    assert len(rendered) == 3
    assert "".join(map(chr, groups[2].trajectories[3].ids[1:3])) == "t2"

    env = Env(create=lambda s: [{"role": "user", "content": s.id}])
    groups = await roll_out(make_driver(lambda *_: "4", env), TASKS[:1], 4)
    assert len({tuple(t.ids.tolist()) for t in groups[0].trajectories}) == 4


async def test_a_task_that_comes_twice_gets_other_samples():
    engine = ScriptedEngine(lambda *_: "4")
    groups = await roll_out(make_driver(engine), [TASKS[0], TASKS[0]], 2)
    assert [[t.sample for t in g.trajectories] for g in groups] == [[0, 1], [0, 1]]
    assert len({s.seed for s in engine.samplings}) == 4


async def test_a_cancelled_roll_out_releases_every_request():
    hooks = Hooks()
    engine = ScriptedEngine(lambda *_: "4", seconds=60)
    task = asyncio.create_task(roll_out(make_driver(engine, Env(hooks), concurrency=5), TASKS, 4))
    await eventually(lambda: len(engine.stopping) == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hooks.total("env", "create") == 5
    assert len(engine.finished) == 5
    hooks.check()


async def test_aborted_requests_are_not_tried_again():
    engine = ScriptedEngine(lambda *_: "abcd", seconds=60)
    groups, _ = await asyncio.gather(roll_out(make_driver(engine), TASKS[:1], 3), abort_when_waiting(engine, 3))
    assert [t.finish for t in groups[0].failed] == [FinishReason.ABORTED] * 3
    assert rollout_metrics(groups)["stop/aborted"] == 3


@pytest.mark.slow
async def test_a_tool_that_ignores_every_cancellation_costs_its_own_request_alone(monkeypatch):
    monkeypatch.setattr(timer, "GRACE", 0.01)
    monkeypatch.setattr(Driver, "patience", 3.0)
    over, hooks, before = asyncio.Event(), Hooks(), set(timer._left_behind)

    async def stubborn(session, **_):
        while not over.is_set() and session.id.startswith("t0#0"):
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return "ok"

    tools = [Echo(hooks, execute=stubborn)]
    driver = make_driver(two_turns, Env(hooks), tools, tool_timeout=0.5, retries=0)
    groups = await roll_out(driver, TASKS, 2)
    assert [len(g.trajectories) for g in groups] == [1, 2, 2]
    (lost,) = groups[0].failed
    assert (lost.finish, lost.failure.boundary) == (FinishReason.ERROR, Boundary.TOOL)
    assert "left behind" in lost.failure.message
    over.set()
    await eventually(lambda: timer._left_behind <= before)
    hooks.check()


def test_what_the_rewards_of_a_group_tell():
    def group(*rewards, failed=0):
        return Group(TASKS[0], tuple(map(trajectory, rewards)), tuple(trajectory(0) for _ in range(failed)))

    assert contrast(group(0, 1)) is Contrast.VARIED
    assert contrast(group(1, 1, 1)) is Contrast.EQUAL
    assert contrast(group(1, failed=3)) is Contrast.FEW
    assert contrast(group()) is Contrast.FEW
    assert contrast(group(0.5, 0.5)) is Contrast.EQUAL


def test_the_collector_is_held_back_and_let_go():
    before = gc.get_threshold()
    with rare_collections():
        held = gc.get_threshold()
        with rare_collections():
            assert gc.get_threshold() == held
        assert gc.get_threshold() == held
    assert held[0] > before[0]
    assert gc.get_threshold() == before


async def test_the_numbers_of_a_step():
    def script(request, turn):
        if turn == 0:
            return call("echo", text="x") + call("ehco") + "<call>echo {"
        return "4"

    tool = Echo(
        execute=ToolResponse("x", reward=0.25, metrics={"hits": 3}),
        calc_reward=lambda s: {"style": 0.5} if "#0" in s.id else None,
    )
    env = Env(calc_reward=lambda s: float("#0" in s.id))
    metrics = rollout_metrics(await roll_out(make_driver(script, env, [tool, Echo(name="idle")]), TASKS, 2))
    seconds = metrics.pop("tool/echo/seconds")
    assert 0 < seconds < 1
    spent = [metrics.pop(f"time/sample_{part}_s") for part in ("engine", "tools", "environment", "hooks")]
    assert all(0 < seconds < 1 for seconds in spent)
    length = len(script("", 0)) + 1 + 2
    assert metrics == {
        "reward/env": 0.5, "reward/style": 0.25, "reward/step": 0.25, "reward/mean": 1.0,
        "reward/std": 0.75, "reward/min": 0.25, "reward/max": 1.75, "groups/pass_at_2": 1.75,
        "rollout/tokens": 6 * length, "rollout/response_tokens_mean": length, "rollout/response_tokens_std": 0,
        "rollout/response_tokens_min": length, "rollout/response_tokens_max": length,
        "rollout/turns_mean": 2.0, "rollout/turns_std": 0, "rollout/turns_min": 2, "rollout/turns_max": 2,
        "rollout/prompt_tokens_mean": 16.0, "rollout/trajectories": 6,
        "rollout/failed": 0, "rollout/retried": 0, "rollout/release_errors": 0,
        "groups/varied": 3, "groups/equal": 0, "groups/few": 0,
        "stop/stop": 6, "stop/length": 0, "stop/max_turns": 0, "stop/max_tool_calls": 0, "stop/timeout": 0,
        "stop/env_done": 0, "stop/aborted": 0, "stop/error": 0,
        "tool/echo/hits": 3.0, "tool/echo/calls": 12, "tool/echo/errors": 6, "tool/echo/cut": 0,
        "tool/idle/calls": 0, "tool/idle/errors": 0, "tool/idle/cut": 0, "tool/idle/seconds": 0.0,
        "tool/unknown/calls": 6, "tool/unknown/errors": 6, "tool/unknown/cut": 0, "tool/unknown/seconds": 0.0,
    }  # fmt: skip


def test_the_numbers_of_nothing():
    metrics = rollout_metrics([])
    assert metrics["reward/mean"] == 0
    assert metrics["rollout/tokens"] == 0


async def test_a_record_is_json_and_holds_what_happened():
    env = Env(create=[{"role": "user", "content": "2+2?"}])
    tool = Echo(execute=ToolResponse("x", images=(b"png",), metrics={"hits": 3}))
    task = Task("t", {"question": "2+2?", "when": {1, 2}})
    driver = make_driver([call("echo"), "4"], env, [tool])
    t = await driver.drive(driver.request(task, 0))
    line = record(json.loads(json.dumps(row(t), allow_nan=False)))
    assert (line["task"], line["reward"], line["finish"], line["failure"]) == ("t", 1.0, "stop", None)
    assert line["messages"][0] == {"role": "user", "content": "2+2?"}
    assert line["messages"][2]["content"][1] == {"type": "image", "image": "<3 bytes>"}
    assert line["tool_uses"][0]["metrics"] == {"hits": 3}
    assert line["tokens"]["sampled"] == t.sampled_tokens
    assert line["seed"] == driver.request(task, 0).seed == t.seed
    assert "ids" not in line

    driver = make_driver(["4"], Env(calc_reward=ValueError("no")))
    failed = record(row(await driver.drive(driver.request(task, 0))))
    assert failed["failure"]["boundary"] == "reward"
    assert failed["reward"] is None


async def test_only_the_samples_that_are_asked_for_are_played():
    ended = []
    driver = make_driver(two_turns, tools=[Echo()])
    groups = await roll_out(
        driver, TASKS, 4, only=[[1, 3], [], [0]], on_sample=lambda place, t: ended.append((place, t.sample))
    )
    assert [[t.sample for t in group.trajectories] for group in groups] == [[1, 3], [], [0]]
    assert sorted(ended) == [(0, 1), (0, 3), (2, 0)]
