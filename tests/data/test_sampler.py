import json
import sys
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentrl.data.sampler import TaskSampler, filtered, make_sampler, restrict
from agentrl.errors import UserError
from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.order import Order
from agentrl.plugins.types import Task
from agentrl.recipe.sections.env import DataSection

TASKS = [Task(f"t{i}", {"level": i // 5, "question": "?" * (10 - i)}) for i in range(10)]
HERE = __name__


def section(**keys: Any) -> DataSection:
    return DataSection.model_validate(keys)


def sampler(order: Any) -> TaskSampler:
    return make_sampler(section(order=order), TASKS, 3)


@given(st.integers(1, 60), st.lists(st.integers(1, 25), min_size=1, max_size=8), st.integers(0, 9))
def test_an_epoch_draws_every_task_once(size: int, draws: list[int], seed: int) -> None:
    sampler = TaskSampler(size, seed)
    drawn = [i for count in draws for i in sampler.draw(count)]
    assert len(drawn) == sum(draws)
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(1, 60), st.integers(0, 200), st.integers(1, 90))
def test_a_restored_sampler_goes_on_where_it_stood(size: int, before: int, after: int) -> None:
    sampler = TaskSampler(size, 3)
    sampler.draw(before)
    state = sampler.state()
    again = TaskSampler(size, 3)
    again.restore(state)
    assert again.draw(after) == sampler.draw(after)


def test_excluded_tasks_are_passed_over_and_the_order_of_the_others_stays() -> None:
    odd = frozenset(range(1, 100, 2))
    drawn = TaskSampler(100, 0, excluded=odd).draw(100)
    assert sorted(drawn[:50]) == sorted(drawn[50:]) == list(range(0, 100, 2))
    assert drawn == [i for i in TaskSampler(100, 0).draw(200) if i not in odd]


def test_a_sampler_with_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TaskSampler(2, 0, excluded=frozenset({0, 1}))


class Settings(BaseModel):
    reverse: bool = False


def by_length(tasks: Sequence[Task], seed: int, epoch: int, args: Settings) -> list[int]:
    return sorted(range(len(tasks)), key=lambda i: len(tasks[i].data["question"]), reverse=args.reverse)


def test_orders_are_named_and_take_arguments() -> None:
    assert sampler("shuffled").draw(25) == TaskSampler(10, 3).draw(25)
    assert sampler("sequential").draw(25) == [*range(10), *range(10), *range(5)]
    assert sampler(f"{HERE}:by_length").draw(12) == [*range(9, -1, -1), 9, 8]
    assert sampler({"name": f"{HERE}:by_length", "args": {"reverse": True}}).draw(10) == list(range(10))
    again = sampler("sequential")
    again.restore({"epoch": 4, "position": 7})
    assert again.draw(4) == [7, 8, 9, 0]
    assert again.progress == 5.1


def half(tasks: Sequence[Task], seed: int, epoch: int) -> list[int]:
    return [i for i in range(len(tasks)) if i % 2 == epoch % 2]


def test_an_epoch_of_ones_own_order_may_be_shorter() -> None:
    found = sampler(f"{HERE}:half")
    assert found.draw(12) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9, 0, 2]
    found = sampler(f"{HERE}:half")
    found.excluded = frozenset({0, 2, 4, 6, 8})
    with pytest.raises(UserError, match="epoch 0 has 5 tasks of 10, 5 of them left out"):
        found.draw(1)


def outside(tasks: Sequence[Task], seed: int, epoch: int) -> list[Any]:
    return [0, 10]


def words(tasks: Sequence[Task], seed: int, epoch: int) -> Any:
    return ["0"]


def nothing(tasks: Sequence[Task], seed: int, epoch: int) -> Any:
    return None


def leaves(tasks: Sequence[Task], seed: int, epoch: int) -> Any:
    sys.exit(3)


class Wrong(Order):
    def begin(self, tasks: Sequence[Task], seed: int) -> None: ...

    def draw(self, number: int, left_out: AbstractSet[int]) -> int:
        return 77

    def state(self) -> Any:
        return {"a set": {1}}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("outside", "epoch 0 has the task 10 of 10 tasks"),
        ("words", "epoch 0 has the task '0' of 10 tasks"),
        ("nothing", "raised TypeError: 'NoneType' object is not iterable"),
        ("leaves", "raised SystemExit: 3"),
        ("Wrong", "drew 77, which is no task that can be drawn"),
        ("Task", "is type; expected a function, or an Order class"),
    ],
)
def test_what_an_order_does_wrong_is_one_line(name: str, told: str) -> None:
    with pytest.raises(UserError, match=f"data.order '{HERE}:{name}'.*{told}"):
        sampler(f"{HERE}:{name}").draw(1)


def test_the_state_of_an_order_is_json() -> None:
    with pytest.raises(UserError, match=r"its state raised TypeError: .*set is not JSON serializable"):
        sampler(f"{HERE}:Wrong").state()
    with pytest.raises(UserError, match="no order 'shufled' is installed; did you mean 'shuffled'"):
        sampler("shufled")
    with pytest.raises(UserError, match=r"data\.order\.args\.target: should be less than or equal to 1, got 2"):
        sampler({"name": "curriculum", "args": {"target": 2}})


def short(task: Task) -> bool:
    return len(task.data["question"]) < 4


def test_tasks_are_filtered_by_a_function() -> None:
    assert filtered(DataSection(), TASKS) == frozenset()
    assert filtered(section(filter=f"{HERE}:short"), TASKS) == frozenset(range(7))
    with pytest.raises(UserError, match=r"data\.filter '.*:short' keeps none of the 2 tasks"):
        filtered(section(filter=f"{HERE}:short"), TASKS[:2])
    with pytest.raises(UserError, match=r"data\.filter '.*:by_length': task t0: raised TypeError"):
        filtered(section(filter=f"{HERE}:by_length"), TASKS)


MADE: list[int] = []


def make_task(index: int) -> Task:
    MADE.append(index)
    return Task(f"t{index}", {"question": "?" * (index % 7)})


MANY = LazyTasks(50_000, make_task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({"filter": f"{HERE}:short"}, 40),
        ({"filter": f"{HERE}:short", "order": "sequential"}, 40),
        ({"order": "curriculum"}, 0),
        ({"filter": f"{HERE}:short", "epochs": 1}, 50_000),  # which wants their number
    ],
)
def test_no_more_tasks_are_made_than_the_order_asks_for(keys: dict[str, Any], most: int) -> None:
    """50,000 were, at every start."""
    MADE.clear()
    found = make_sampler(section(**keys), MANY, 0)
    restrict(found, section(**keys), MANY)
    drawn = found.draw(16)
    assert len(MADE) <= most
    everything = make_sampler(section(**keys), MANY, 0)
    everything.excluded = filtered(section(**keys), MANY)
    assert drawn == everything.draw(16)
    again = make_sampler(section(**keys), MANY, 0)
    restrict(again, section(**keys), MANY)
    again.restore(found.state())
    assert again.draw(16) == everything.draw(16)


def test_an_order_is_told_of_what_a_filter_leaves_out_as_it_draws_it() -> None:
    keys = {"filter": f"{HERE}:short", "order": "curriculum"}
    MADE.clear()
    whole, again = (make_sampler(section(**keys), MANY, 0) for _ in range(2))
    restrict(whole, section(**keys), MANY)
    first = whole.draw(16)
    assert len(MADE) <= 60
    assert all(short(MANY[index]) for index in first)
    assert len(set(first)) == 16
    restrict(again, section(**keys), MANY)
    again.restore(json.loads(json.dumps(whole.state())))
    assert again.draw(64) == whole.draw(64)
    fresh = make_sampler(section(order="curriculum"), TASKS[:3], 0)
    fresh.keep = lambda index: False
    with pytest.raises(UserError, match=r"data.order 'curriculum': none of the 3 tasks is left to draw from"):
        fresh.draw(1)


def test_a_filter_that_keeps_none_is_refused_as_before() -> None:
    wanted = section(filter=f"{HERE}:short")
    for order in ("shuffled", "sequential", "curriculum"):
        with pytest.raises(UserError, match=r"^data\.filter '.*:short' keeps none of the 2 tasks$"):
            restrict(make_sampler(section(order=order), TASKS[:2], 0), wanted, TASKS[:2])
    with pytest.raises(UserError, match=r"data\.filter '.*:by_length': task t\d: raised TypeError"):
        restrict(make_sampler(section(), TASKS, 0), section(filter=f"{HERE}:by_length"), TASKS)


CURRICULUM = {"name": "curriculum", "args": {"rest": 0.2}}


def measured(found: TaskSampler, count: int) -> list[int]:
    """Draw, and tell it that even tasks are solved half of the time, odd ones never."""
    drawn = []
    for _ in range(count):
        (index,) = found.draw(1)
        found.learn(index, 0.0 if index % 2 else 0.5, [1.0])
        drawn.append(index)
    return drawn


def test_a_curriculum_draws_what_is_near_its_target_most_and_nothing_never() -> None:
    drawn = Counter(measured(sampler(CURRICULUM), 600))
    assert set(drawn) == set(range(10))
    even, odd = (sum(drawn[i] for i in range(start, 10, 2)) for start in (0, 1))
    assert 4 * odd < even
    again = sampler({"name": "curriculum", "args": {"rest": 0.9}}).draw(40)
    assert all(len(set(again[i : i + 9])) == 9 for i in range(31))  # none comes again before the others came


@pytest.mark.parametrize("before", [0, 1, 37])
def test_a_restored_curriculum_goes_on_where_it_stood(before: int) -> None:
    whole = sampler(CURRICULUM)
    measured(whole, before)
    state = json.loads(json.dumps(whole.state()))
    again = sampler(CURRICULUM)
    again.restore(state)
    assert measured(again, 50) == measured(whole, 50)
    assert again.state() == whole.state()


def test_a_curriculum_by_a_field_measures_all_tasks_with_its_value_together() -> None:
    found = sampler({"name": "curriculum", "args": {"by": "level", "rest": 0, "memory": 0}})
    found.learn(7, 0.0, [0.0])
    found.excluded = frozenset({0})
    drawn = Counter(i // 5 for i in found.draw(300))
    assert 4 * drawn[1] < drawn[0]
    with pytest.raises(UserError, match=r"task t0 has no field 'depth', which data\.order\.args\.by names"):
        sampler({"name": "curriculum", "args": {"by": "depth"}})
    state = found.state()
    with pytest.raises(UserError, match="knows the success rate of '1', and no task is of that kind"):
        make_sampler(section(order={"name": "curriculum", "args": {"by": "level"}}), TASKS[:5], 0).restore(state)
