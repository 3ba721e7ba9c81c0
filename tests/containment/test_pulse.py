"""A process that stood still: what was in flight is sampled again, and counted once."""

import asyncio
import json
import signal
import time

import pytest
from fakes import Echo, Env, Hooks, ScriptedEngine, call, make_driver
from processes import eventually, until
from warm import Python

from agentrl.containment import pulse
from agentrl.containment.pulse import PULSE, Pulse
from agentrl.plugins.reward import GroupReward
from agentrl.plugins.rewards import Rewards
from agentrl.plugins.types import Task
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.scorer import Scorer
from agentrl.trajectory import Boundary

TASKS = [Task("a", {}), Task("b", {})]


class Clock:
    """Wall and CPU time of the process, as a test wants them."""

    CLOCK_BOOTTIME = CLOCK_MONOTONIC = 0

    def __init__(self):
        self.wall = self.busy = 0.0

    def clock_gettime(self, which):
        return self.wall

    def process_time(self):
        return self.busy

    def pass_by(self, wall, busy):
        self.wall += wall
        self.busy += busy


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("wall", "busy", "still"), [(0.3, 0.3, 0), (4.9, 0, 0), (5.1, 0, 1), (3600, 0.2, 1), (60, 59, 0), (60, 31, 0)]
)
def test_time_without_ticks_in_which_nothing_was_computed_counts(clock, wall, busy, still, caplog):
    beat = Pulse()
    clock.pass_by(wall, busy)
    assert (beat.stops(), beat.stops()) == (still, still)
    assert len([record for record in caplog.records if record.name.startswith("agentrl")]) == still
    assert not still or f"stood still for {wall:.0f} s" in caplog.text


def stand_still():
    """As if the process went on only now."""
    with PULSE._lock:
        PULSE._wall -= 100.0


async def test_what_was_in_flight_is_sampled_again_with_the_same_seed_and_counted_once():
    hooks, engine = Hooks(), ScriptedEngine(lambda *_: "4", seconds=60)
    pending = asyncio.create_task(roll_out(make_driver(engine, Env(hooks), turn_timeout=30), TASKS, 2, seed=3))
    await eventually(lambda: len(engine.stopping) == 4)
    engine.seconds = 0
    stand_still()
    assert [len(group.trajectories) for group in await pending] == [2, 2]
    assert hooks.total("env", "create") == hooks.total("env", "release") == 8
    seeds = [sampling.seed for sampling in engine.samplings]
    assert sorted(seeds[:4]) == sorted(seeds[4:8])
    hooks.check()


async def test_a_deadline_that_passed_meanwhile_is_no_timeout():
    stood = []

    async def waits(session, **_):
        if not stood:
            stood.append(1)
            stand_still()
            await asyncio.sleep(60)
        return "ok"

    driver = make_driver(
        lambda _, turn: call("echo") if turn == 0 else "4", tools=[Echo(execute=waits)], tool_timeout=0.01
    )
    groups = await roll_out(driver, TASKS[:1], 1)
    metrics = rollout_metrics(groups)
    assert (metrics["stop/stop"], metrics["stop/timeout"], metrics["rollout/retried"]) == (1, 0, 0)
    assert metrics["tool/echo/errors"] == 0


async def test_a_sample_during_which_it_always_happens_is_given_up():
    def still(session, **_):
        stand_still()
        return "ok"

    hooks = Hooks()
    driver = make_driver(lambda _, turn: call("echo") if turn == 0 else "4", Env(hooks), [Echo(hooks, execute=still)])
    (group,) = await roll_out(driver, TASKS[:1], 1)
    assert group.failed[0].failure.boundary is Boundary.INFRASTRUCTURE
    assert "stood still 5 times" in group.failed[0].failure.message
    hooks.check()


async def test_a_group_that_was_being_scored_is_scored_again():
    asked = []

    class Rank(GroupReward):
        name = "rank"

        async def score(self, samples):
            asked.append(1)
            if len(asked) == 1:
                stand_still()
                raise ConnectionError("the judge hung up")
            return [0.5] * len(samples)

    plain = make_driver(ScriptedEngine(lambda *_: "4"))
    driver = Driver(
        engine=plain.engine, chat=plain.chat, environment=Env(), tools=(), limits=plain.limits,
        scorer=Scorer(Rewards({}, {"rank": Rank()}, {})),
    )  # fmt: skip
    (group,) = await roll_out(driver, TASKS[:1], 2)
    assert [t.rewards["rank"] for t in group.trajectories] == [0.5, 0.5]
    assert len(asked) == 2


async def test_the_thread_that_ticks_ends_with_the_last_roll_out():
    await roll_out(make_driver(lambda *_: "4"), TASKS, 2)
    assert PULSE._tell == {}
    assert PULSE._end.is_set()


PROGRAM = """
import asyncio, json, sys, time
from paths import SUPPORT
from fakes import Echo, Env, make_driver, call
from agentrl.plugins.types import Task
from agentrl.containment import pulse
from agentrl.rollout.groups import roll_out
from agentrl.rollout.metrics import rollout_metrics

pulse.STILL = 2.0
calls = 0

async def stopped(session, **_):
    global calls
    calls += 1
    if calls == 1:
        print("ready", flush=True)
        await asyncio.sleep(600)
    return "ok"

async def blocks(session, **_):
    time.sleep(4)
    return "ok"

driver = make_driver(lambda _, turn: call("echo") if turn == 0 else "4", Env(),
                     [Echo(execute={"stopped": stopped, "blocks": blocks}[sys.argv[1]])], tool_timeout=3.0, timeout=3.0)
groups = asyncio.run(roll_out(driver, [Task("a", {})], 1))
print(json.dumps({**rollout_metrics(groups), "calls": calls}), flush=True)
"""


def start(what):
    return Python(["-c", PROGRAM, what], apart=True)


@pytest.mark.slow
def test_a_process_that_is_stopped_and_goes_on_samples_again():
    process = start("stopped")
    try:
        until(lambda: process.said() == "ready\n")
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    metrics = json.loads(out.removeprefix("ready\n"))
    assert metrics["calls"] == 2
    assert (metrics["stop/stop"], metrics["stop/timeout"], metrics["rollout/failed"]) == (1, 0, 0)
    assert err.count("this process stood still for") == 1


@pytest.mark.slow
def test_a_tool_that_holds_up_the_event_loop_is_no_process_that_stands_still():
    process = start("blocks")
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert json.loads(out)["stop/timeout"] == 1
    assert "stood still" not in err
