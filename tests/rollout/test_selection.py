"""Which groups a step keeps, what is sampled in place of the others, and what a user's filter may do wrong."""

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
from fakes import Env, Hooks, ScriptedEngine, make_driver
from pydantic import BaseModel

from agentrl.errors import UserError
from agentrl.plugins.types import Session, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import FilterSection
from agentrl.rollout.groups import roll_out
from agentrl.rollout.selection import GroupFilter, Selection, Showable, at_once, most_groups
from agentrl.trajectory import Group

TASKS = [Task(f"t{i}", {"i": i}) for i in range(60)]


def third(session: Session) -> float:
    """The reward of every third task differs from sample to sample; that of the others is 1."""
    return float(session.id.split("#")[1][0]) if int(session.task.id[1:]) % 3 == 0 else 1.0


@dataclass
class Played:
    chosen: Selection
    groups: list[Group]
    hooks: Hooks

    def kept(self) -> list[str]:
        return [group.task.id for group in self.chosen.groups(kept=True)]


async def play(
    needed: int,
    *,
    most: int = 60,
    ahead: int = 0,
    reward: Any = third,
    keep: str | None = "varied",
    showable: Showable | None = None,
    **limits: Any,
) -> Played:
    numbers, hooks = count(), Hooks()

    def draw() -> tuple[int, Task]:
        return (index := next(numbers)), TASKS[index]

    judge = None if keep is None else GroupFilter(FilterSection(name=keep), 5.0)
    chosen = Selection(draw, judge, needed, needed + ahead, most, showable)
    driver = make_driver(ScriptedEngine(lambda *_: "4"), Env(hooks, calc_reward=reward), **limits)
    groups = await roll_out(driver, await chosen.first(), 2, after=chosen.after)
    hooks.check()
    return Played(chosen, groups, hooks)


@pytest.mark.parametrize("concurrency", [1, 3, 8, 100])
async def test_it_refills_until_enough_groups_differ_whatever_the_order_in_which_they_end(concurrency: int) -> None:
    async def jittered(session: Session) -> float:
        await asyncio.sleep(hash((session.id, concurrency)) % 3 / 1000)
        return third(session)

    played = await play(4, reward=jittered, concurrency=concurrency)
    assert played.kept() == ["t0", "t3", "t6", "t9"]
    assert played.chosen.drawn == list(range(10))  # not one more than it takes
    assert played.chosen.abandoned == []
    assert [group.task.id for group in played.groups] == [f"t{i}" for i in range(10)]
    assert all(len(group.trajectories) == 2 for group in played.groups)


@pytest.mark.parametrize(("most", "kept"), [(4, 2), (6, 2), (7, 3), (8, 3)])
async def test_it_trains_on_what_there_is_when_the_budget_is_used_up(most: int, kept: int) -> None:
    played = await play(4, most=most)
    assert len(played.kept()) == kept
    assert len(played.chosen.drawn) == most
    assert played.chosen.missing == 4 - kept


async def test_groups_whose_samples_failed_are_replaced() -> None:
    def broken(session: Session) -> float:
        if session.task.id in ("t0", "t3"):
            raise RuntimeError("no judge")
        return third(session)

    played = await play(2, reward=broken, retries=0)
    assert played.kept() == ["t6", "t9"]
    assert Counter(len(group.failed) for group in played.chosen.groups(kept=False)) == {0: 6, 2: 2}


async def test_over_sampled_it_stops_when_enough_are_whole_and_names_what_it_abandoned() -> None:
    async def slow(session: Session) -> float:
        if session.task.id in ("t1", "t2"):
            await asyncio.Event().wait()
        return 1.0

    async with asyncio.timeout(60):
        played = await play(4, ahead=2, most=6, reward=slow, keep=None)
    assert played.kept() == ["t0", "t3", "t4", "t5"]
    assert played.chosen.abandoned == [1, 2]
    assert played.hooks.total("env", "create") == played.hooks.total("env", "release") == 12


async def slowly_seen(index: int) -> bool:
    """Every fourth task has a picture that cannot be shown."""
    await asyncio.sleep(hash((index, "seen")) % 3 / 1000)
    return index % 4 != 0


@pytest.mark.parametrize("concurrency", [1, 3, 100])
async def test_tasks_whose_pictures_cannot_be_shown_are_passed_over(concurrency: int) -> None:
    played = await play(4, showable=slowly_seen, concurrency=concurrency)
    assert set(played.kept()) == {"t3", "t6", "t9", "t15"}
    assert sorted(played.chosen.drawn) == [i for i in range(16) if i % 4]
    assert [group.task.id for group in played.groups] == [f"t{i}" for i in played.chosen.drawn]
    assert played.chosen.abandoned == []


async def test_over_sampling_looks_at_no_more_pictures_than_it_needs() -> None:
    played = await play(3, ahead=2, most=40, showable=slowly_seen)
    assert len(played.kept()) == 3
    assert not {f"t{4 * i}" for i in range(10)} & {group.task.id for group in played.groups}
    whole = {played.chosen.drawn[place] for place in played.chosen.whole}
    assert whole.isdisjoint(played.chosen.abandoned)
    assert len(played.chosen.drawn) <= 11


async def test_what_was_drawn_and_not_yet_seen_begins_the_next_step() -> None:
    """Enough groups are kept while another's pictures are still looked at: its task is not lost, and never begins."""
    seen, last = asyncio.Event(), 4

    async def sees(index: int) -> bool:
        if index == last:
            await seen.wait()
        return True

    async def in_turn(session: Session) -> float:
        if session.task.id == "t3":  # the last one that is needed ends while t4 is looked at
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(0.05, seen.set)
        return 1.0 if session.task.id == "t0" else float(session.id.split("#")[1][0])

    played = await play(3, ahead=1, most=5, reward=in_turn, showable=sees)
    assert len(played.kept()) == 3
    assert played.chosen.abandoned == [last]
    assert "t4" not in {group.task.id for group in played.groups}


async def test_over_sampling_goes_with_dynamic_sampling() -> None:
    played = await play(3, ahead=2, most=40)
    assert set(played.kept()) <= {f"t{3 * i}" for i in range(7)}
    assert len(played.kept()) == 3
    assert len(played.chosen.drawn) <= 11
    ended = len(played.chosen.whole) + len(played.chosen.abandoned)
    assert ended == len(played.chosen.drawn)


def test_the_budget_counts_groups_of_the_step() -> None:
    recipe = {"rollout": {"tasks": 5, "oversample": 1.5}, "algorithm": {"dynamic_sampling": {"budget": 2.5}}}
    found = Recipe.model_validate(recipe)
    assert (at_once(found), most_groups(found)) == (8, 12)
    none = Recipe.model_validate({"rollout": {"tasks": 5}})
    assert (at_once(none), most_groups(none)) == (5, 5)


class Least(BaseModel):
    reward: float = 0.5


def rewarded(group: Group, args: Least) -> Any:
    return np.mean([t.reward for t in group.trajectories]) >= args.reward


def words(group: Group) -> Any:
    return "yes"


def leaves(group: Group) -> bool:
    sys.exit(0)


def hangs(group: Group) -> bool:
    time.sleep(3)
    return True


def raises(group: Group) -> bool:
    raise ValueError("no such group")


GROUP = Group(TASKS[0], ())


async def test_a_filter_takes_arguments_of_its_own() -> None:
    played = await play(2, reward=lambda session: float(int(session.task.id[1:]) > 3), keep=f"{__name__}:rewarded")
    assert played.kept() == ["t4", "t5"]
    with pytest.raises(UserError, match=r"algorithm\.filter\.args\.rewards: rewarded takes no such argument; did you"):
        GroupFilter(FilterSection(name=f"{__name__}:rewarded", args={"rewards": 1}), 1.0)
    with pytest.raises(UserError, match=r"algorithm\.filter\.args\.x: varied takes no arguments"):
        GroupFilter(FilterSection(name="varied", args={"x": 1}), 1.0)
    with pytest.raises(UserError, match="no filter 'vraied' is installed; did you mean 'varied'"):
        GroupFilter(FilterSection(name="vraied"), 1.0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("words", "gave 'yes', not true or false"),
        ("leaves", "raised SystemExit: 0"),
        ("hangs", "does not end within 0.05 s"),
        ("raises", "raised ValueError: no such group"),
    ],
)
async def test_what_a_filter_does_wrong_is_one_line(name: str, told: str) -> None:
    judge = GroupFilter(FilterSection(name=f"{__name__}:{name}"), 0.05 if name == "hangs" else 60.0)
    with pytest.raises(UserError, match=f"algorithm.filter '{__name__}:{name}' {told}"):
        await judge.keeps(GROUP)


async def test_an_error_of_a_filter_ends_the_sampling_and_releases_every_request() -> None:
    with pytest.raises(UserError, match="raised ValueError: no such group"):
        await play(4, keep=f"{__name__}:raises")
