"""The stream: what may begin, what a batch takes, and that nothing is older than the bound."""

import asyncio
import random
from collections import Counter
from itertools import count

import pytest
from fakes import Echo, Env, Hooks, ScriptedEngine, call, make_driver
from processes import eventually

from agentrl.plugins.types import Task
from agentrl.rollout.stream import Plan, Stream

TASKS = [Task(f"t{i}", {}) for i in range(100)]


class Gate:
    """Lets the reward of a task come when it is opened; `slow` ones wait, the others do not."""

    def __init__(self, *slow):
        self.events = {f"t{i}": asyncio.Event() for i in slow}

    async def __call__(self, session):
        if event := self.events.get(session.task.id):
            await event.wait()
        return 1.0

    def open(self, index):
        self.events[f"t{index}"].set()


OPEN: list[Stream] = []


@pytest.fixture(autouse=True)
async def closed():
    yield
    for stream in OPEN:
        await stream.close()
    OPEN.clear()


def make_stream(gate=None, *, n=2, batch=4, steps=6, staleness=1, hooks=None, limits=None, **rest):
    numbers = count()
    env = Env(hooks, calc_reward=gate or 1.0)
    driver = make_driver(ScriptedEngine(lambda *_: "4"), env, **(limits or {}))
    drawn = []

    def draw():
        drawn.append(next(numbers))
        return drawn[-1]

    stream = Stream(driver, TASKS, draw, Plan(n, batch, steps, 0, staleness), **rest)
    OPEN.append(stream)
    return stream, drawn


def taken(flights):
    return [flight.index for flight in flights]


async def test_no_more_begin_than_the_coming_batches_take():
    stream, drawn = make_stream()
    assert taken(await stream.take()) == [0, 1, 2, 3]
    assert len(drawn) == 8
    await stream.settle()
    assert len(drawn) == 8
    stream.advance(1)
    assert len(drawn) == 12


async def test_a_batch_takes_what_is_finished_and_waits_for_what_is_due():
    gate = Gate(1, 2)
    stream, _ = make_stream(gate)
    assert taken(await stream.take()) == [0, 3, 4, 5]  # 1 and 2 are slow, and not due yet
    stream.advance(1)
    pending = asyncio.create_task(stream.take())
    await asyncio.sleep(0.01)
    assert not pending.done()  # 1 and 2 began with version 0: they must be trained on now
    gate.open(1)
    gate.open(2)
    flights = await pending
    assert taken(flights) == [1, 2, 6, 7]
    assert {flight.version for flight in flights} == {0}


@pytest.mark.parametrize("staleness", [1, 2, 4])
async def test_nothing_is_ever_older_than_the_bound_and_nothing_is_lost(staleness):
    rng = random.Random(staleness)

    async def slow(session):
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.02]))
        return 1.0

    stream, drawn = make_stream(slow, steps=12, staleness=staleness, limits={"concurrency": 20})
    seen, oldest = [], 0
    for step in range(12):
        flights = await stream.take()
        assert len(flights) == 4
        oldest = max(oldest, *(stream.version - flight.version for flight in flights))
        seen += taken(flights)
        stream.advance(step + 1)
    assert 0 < oldest <= staleness
    assert sorted(seen) == sorted(drawn) == list(range(48))
    assert (stream.outstanding, stream.in_flight) == ([], 0)


async def test_in_order_the_next_batch_runs_while_one_trains_and_no_further():
    gate = Gate(5)
    stream, drawn = make_stream(gate, staleness=None)
    assert taken(await stream.take()) == [0, 1, 2, 3]
    assert len(drawn) == 4
    stream.advance(0)
    assert len(drawn) == 8
    pending = asyncio.create_task(stream.take())
    await asyncio.sleep(0.01)
    assert not pending.done()
    assert len(drawn) == 8
    gate.open(5)
    assert taken(await pending) == [4, 5, 6, 7]


async def test_requests_in_flight_are_bounded():
    most = 0

    async def timer(session):
        nonlocal most
        most = max(most, stream.in_flight)
        await asyncio.sleep(0.001)
        return 1.0

    stream, _ = make_stream(timer, n=2, limits={"concurrency": 6})
    await stream.take()
    assert most == 3
    lone, _ = make_stream(n=2, limits={"concurrency": 1})
    assert len(await lone.take()) == 4


async def test_closing_releases_every_request_and_begins_no_other():
    hooks = Hooks()
    stream, drawn = make_stream(Gate(*range(100)), hooks=hooks)
    stream.advance(0)
    await asyncio.sleep(0.01)
    assert stream.in_flight == 8
    await stream.close()
    await asyncio.sleep(0)
    assert (stream.in_flight, len(drawn)) == (0, 8)
    hooks.check()
    assert hooks.total("env", "create") == 16


async def test_a_resumed_stream_begins_with_what_was_outstanding():
    first, _ = make_stream(Gate(2))
    assert taken(await first.take()) == [0, 1, 3, 4]
    assert first.outstanding == [2, 5, 6, 7]
    await first.close()
    again, drawn = make_stream(version=1, first=first.outstanding)
    assert taken(await again.take()) == [2, 5, 6, 7]
    assert len(drawn) == 4
    await again.close()


async def test_samples_depend_on_the_groups_number_alone():
    async def seeds(limits, version=0):
        engine = ScriptedEngine(lambda *_: "4")
        stream, _ = make_stream(limits=limits, version=version)
        stream._driver._engine = engine
        await stream.take()
        await stream.settle()
        await stream.close()
        return Counter(sampling.seed for sampling in engine.samplings)

    assert await seeds({"concurrency": 2}) == await seeds({"concurrency": 100})
    assert not await seeds({}) & await seeds({}, version=3)


async def test_new_weights_land_in_the_middle_of_a_request():
    tool = Echo(execute=lambda session, **_: asyncio.sleep(0.01, "x"))
    engine = ScriptedEngine(lambda _, turn: "4" if turn == 3 else call("echo"))
    driver = make_driver(engine, tools=[tool])
    stream = Stream(driver, TASKS, iter(range(100)).__next__, Plan(2, 1, 3, 0, 2))
    pending = asyncio.create_task(stream.take())
    await eventually(lambda: sum(turn > 1 for turn in engine.turns.values()) > 1)  # two requests, in their second turn
    await engine.update_weights(1)
    stream.advance(1)
    (flight,) = await pending
    (group,) = flight.work.result()
    for t in group.trajectories:
        assert set(t.weight_version[t.loss_mask == 1].tolist()) == {0, 1}
    await stream.close()
