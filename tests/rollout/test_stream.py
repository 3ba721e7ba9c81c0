"""The stream: what may begin, what a batch takes, and that nothing is older than the bound."""

import asyncio
import random
from collections import Counter
from itertools import count

import pytest
from fakes import Echo, Env, Hooks, ScriptedEngine, call, make_driver
from processes import eventually

from agentrl.errors import UserError
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


def make_stream(gate=None, *, n=2, batch=4, steps=6, staleness=1, most=None, hooks=None, limits=None, **rest):
    numbers = count()
    env = Env(hooks, calc_reward=gate or 1.0)
    driver = make_driver(ScriptedEngine(lambda *_: "4"), env, **(limits or {}))
    drawn = []

    def draw():
        drawn.append(next(numbers))
        return drawn[-1]

    stream = Stream(driver, TASKS, draw, Plan(n, batch, steps, 0, staleness, most), **rest)
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


async def third(group):
    return int(group.task.id[1:]) % 3 == 0


@pytest.mark.parametrize("staleness", [None, 1, 2])
async def test_others_begin_in_the_place_of_groups_that_are_left_out(staleness):
    rng = random.Random(0)

    async def slow(session):
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.005]))
        return 1.0

    stream, drawn = make_stream(slow, batch=2, steps=5, staleness=staleness, most=20, keep=third)
    seen, others = [], []
    for step in range(5):
        flights = await stream.take()
        assert len(flights) == 2
        seen += taken(flights)
        others += taken(stream.left_out)
        stream.advance(step + 1)
        assert sorted([*seen, *others, *stream.outstanding]) == drawn  # none is lost, and none comes twice
    assert all(i % 3 == 0 for i in seen)
    assert not any(i % 3 == 0 for i in others)
    if staleness is None:
        assert seen == list(range(0, 30, 3))
        assert drawn == list(range(28))  # not one more than it takes


@pytest.mark.parametrize("turns", range(8))
async def test_a_group_that_is_left_out_just_after_another_ended_is_replaced(turns):
    """The taker is woken by the first, and may come before the second is replaced."""

    async def keep(group):
        for _ in range(turns if group.task.id == "t1" else 0):
            await asyncio.sleep(0)
        return group.task.id != "t1"

    stream, _ = make_stream(batch=2, steps=1, staleness=None, most=40, keep=keep)
    assert taken(await stream.take()) == [0, 2]


@pytest.mark.parametrize(("most", "sizes"), [(4, [2, 1, 1, 2]), (7, [3, 2, 2, 3]), (10, [4, 3, 3, 4])])
async def test_batches_are_smaller_where_the_budget_is_used_up(most, sizes):
    stream, drawn = make_stream(batch=4, steps=4, staleness=None, most=most, keep=third)
    for step, size in enumerate(sizes):
        assert len(await stream.take()) == size
        assert len(drawn) == most * (step + 1)
        stream.advance(step + 1)
    nothing, _ = make_stream(batch=2, steps=2, staleness=2, keep=lambda _: asyncio.sleep(0, False))
    assert [await nothing.take(), len(nothing.left_out) >= 2] == [[], True]


async def test_a_resumed_stream_samples_again_what_was_left_out_since_the_last_batch():
    how = {"batch": 2, "steps": 5, "staleness": None, "most": 20, "keep": third}
    first, drawn = make_stream(**how)
    first._driver.engine = ours = ScriptedEngine(lambda *_: "4")
    await first.take()
    ours.samplings.clear()
    first.advance(1)
    await first.settle()
    assert (first.begun, first.outstanding, len(drawn)) == (4, [4, 5, 6, 7, 8, 9], 10)
    resumed, more = make_stream(**how, version=1, first=first.outstanding, begun=first.begun)
    resumed._driver.engine = theirs = ScriptedEngine(lambda *_: "4")
    assert [taken(await stream.take()) for stream in (first, resumed)] == [[6, 9]] * 2
    assert taken(first.left_out) == taken(resumed.left_out) == [4, 5, 7, 8]
    assert Counter(s.seed for s in ours.samplings) == Counter(s.seed for s in theirs.samplings)
    assert not more


async def test_samples_depend_on_the_groups_number_alone():
    async def seeds(limits, version=0):
        engine = ScriptedEngine(lambda *_: "4")
        stream, _ = make_stream(limits=limits, version=version)
        stream._driver.engine = engine
        await stream.take()
        await stream.settle()
        await stream.close()
        return Counter(sampling.seed for sampling in engine.samplings)

    assert await seeds({"concurrency": 2}) == await seeds({"concurrency": 100})
    assert not await seeds({}) & await seeds({}, version=3)


async def test_tasks_whose_pictures_cannot_be_shown_are_passed_over_in_order():
    async def slowly(index):
        await asyncio.sleep(index % 3 / 1000)
        return index % 4 != 0

    stream, drawn = make_stream(staleness=None, batch=3, steps=2, showable=slowly)
    assert taken(await stream.take()) == [1, 2, 3]
    stream.advance(1)
    assert taken(await stream.take()) == [5, 6, 7]
    assert drawn == list(range(9))[: len(drawn)]
    assert stream.outstanding == []


async def test_a_task_whose_pictures_are_looked_at_is_outstanding_and_seen_again():
    looked = asyncio.Event()

    async def never(index):
        looked.set()
        await asyncio.sleep(60)

    stream, drawn = make_stream(showable=never)
    pending = asyncio.create_task(stream.take())
    await looked.wait()
    assert stream.outstanding == drawn == list(range(len(drawn)))
    pending.cancel()
    await stream.close()
    left, again = stream.outstanding, asyncio.Event()

    async def seen(index):
        again.set()
        return index != 1

    resumed, drawn = make_stream(first=left, showable=seen, begun=0)
    assert taken(await resumed.take()) == [0, 2, 3, 4]
    assert again.is_set()


async def test_no_task_that_can_be_shown_ends_the_batch():
    async def none(index):
        raise UserError("no task is left")

    stream, _ = make_stream(showable=none)
    with pytest.raises(UserError, match="no task is left"):
        await stream.take()
    await stream.settle()


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
