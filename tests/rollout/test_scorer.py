"""The recipe's reward functions: weights, sample and group functions, and that one that raises is never a 0."""

import asyncio
import math

import pytest
from fakes import TASK, Env, ScriptedEngine, make_driver

from agentrl.errors import UserError
from agentrl.plugins.reward import GroupReward, Reward, Sample
from agentrl.plugins.rewards import make_rewards
from agentrl.plugins.types import Task
from agentrl.recipe.sections.env import RewardsSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import Contrast, contrast, roll_out
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.trajectory_file import record, row
from agentrl.trajectory import Boundary


def length(sample: Sample, scale: float = 1.0) -> float:
    return scale * len(sample.answer)


async def slow_length(sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(len(sample.answer))


def rank(samples: list[Sample]) -> list[float]:
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].answer))
    return [float(order.index(i)) for i in range(len(samples))]


def short(samples: list[Sample]) -> list[float]:
    return [0.0] * (len(samples) - 1)


def nothing(samples: list[Sample]) -> None:
    """Forget to return."""


def broken(sample: Sample) -> float:
    raise RuntimeError("no judge")


def broken_group(samples: list[Sample]) -> list[float]:
    raise RuntimeError("no judge")


def not_a_number(sample: Sample) -> float:
    return math.nan


class Turns(Reward):
    name = "turns"
    closed = 0

    def __init__(self, each: float) -> None:
        self.each = each

    async def score(self, sample):
        assert sample.rewards == {"env": 1.0}
        assert (sample.finish, sample.tokens) == ("stop", len(sample.answer) + 1)
        return self.each * sample.turns

    async def close(self):
        Turns.closed += 1


class Nameless(GroupReward):
    async def score(self, samples):
        return [0.0 for _ in samples]


def rewards(*functions, **weights):
    named = [f if isinstance(f, dict) else {"name": f"{__name__}:{f}"} for f in functions]
    return make_rewards(RewardsSection.model_validate({"functions": named, "weights": weights}))


def driver_with(made, **limits):
    plain = make_driver(ScriptedEngine(lambda name, turn: "x" * (1 + int(name[2]))), **limits)
    return Driver(
        engine=plain.engine, chat=plain.chat, environment=Env(), tools=(), limits=plain.limits, scorer=Scorer(made)
    )


async def play(made, n=3, **limits):
    (group,) = await roll_out(driver_with(made, **limits), [TASK], n)
    return group


async def test_sample_functions_fill_their_parts_and_weights_count_in_the_reward_alone():
    made = rewards(
        {"name": f"{__name__}:Turns", "args": {"each": 2}},
        {"name": f"{__name__}:length", "args": {"scale": 10}, "part": "size"},
        "slow_length",
        size=0.5,
        env=3,
    )
    group = await play(made)
    assert [dict(t.rewards) for t in group.trajectories] == [
        {"env": 1.0, "turns": 2.0, "size": 10.0 * k, "slow_length": float(k)} for k in (1, 2, 3)
    ]
    assert [t.reward for t in group.trajectories] == [3 + 2 + 5 * k + k for k in (1, 2, 3)]
    metrics = rollout_metrics([group])
    assert (metrics["reward/size"], metrics["reward/mean"]) == (20, 17)
    assert record(row(group.trajectories[0]))["weights"] == {"env": 3, "turns": 1, "size": 0.5, "slow_length": 1}
    Turns.closed = 0
    await made.close()
    assert Turns.closed == 1


async def test_a_group_function_sees_all_samples_of_its_task():
    group = await play(rewards("rank", env=0), n=4)
    assert [t.rewards["rank"] for t in group.trajectories] == [0, 1, 2, 3]
    assert contrast(group) is Contrast.VARIED
    assert contrast(await play(rewards("rank", env=0, rank=0), n=4)) is Contrast.EQUAL


async def test_groups_are_scored_apart_and_told_when_scored():
    told = []
    tasks = [Task(f"{i}", {}) for i in "ab"]
    driver = driver_with(rewards("rank"))
    groups = await roll_out(driver, tasks, 2, on_group=told.append)
    assert [[t.rewards["rank"] for t in g.trajectories] for g in groups] == [[0, 1], [0, 1]]
    assert sorted(told, key=lambda g: g.task.id) == groups


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("broken", "broken: RuntimeError: no judge (test_scorer.py:"),
        ("not_a_number", "not_a_number: the reward 'not_a_number' is nan"),
        ("broken_group", "broken_group: RuntimeError: no judge (test_scorer.py:"),
        ("short", "short: it scored 2 of 3 samples"),
        ("nothing", "nothing: it returned NoneType, not a number for each sample"),
    ],
)
async def test_a_reward_that_cannot_be_had_is_not_a_zero(function, line):
    group = await play(rewards(function))
    assert group.trajectories == ()
    assert len(group.failed) == 3
    for t in group.failed:
        assert t.failure.boundary is Boundary.REWARD
        assert t.failure.message.startswith(line)
        assert t.rewards == {}


async def test_a_function_that_never_returns_is_cut_off():
    class Hangs(Reward):
        name = "hangs"

        async def score(self, sample):
            await asyncio.Event().wait()

    made = rewards()
    made = type(made)({"hangs": Hangs()}, {}, {})
    plain = driver_with(made, retries=0)
    plain.scorer._seconds = 0.05
    (group,) = await roll_out(plain, [TASK], 1)
    assert group.failed[0].failure.message.startswith("hangs: took too long")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("no_such", r"no reward 'no_such' is installed"),
        ({"name": f"{__name__}:length", "args": {"scal": 1}}, r"rewards\.functions\.0\.args\.scal: .*no such argument"),
        ({"name": f"{__name__}:length", "args": {"scale": "x"}}, r"rewards\.functions\.0\.args\.scale: .*got 'x'"),
        ({"name": f"{__name__}:Turns"}, r"rewards\.functions\.0\.args\.each: Turns needs it"),
        (f"{__name__}:Nameless", r"its class sets no `name`"),
        (f"{__name__}:TASK", r"is not a Reward or GroupReward class, nor a function"),
    ],
)
def test_a_mistake_is_one_line(section, words):
    with pytest.raises(UserError, match=words):
        make_rewards(RewardsSection.model_validate({"functions": [section]}))


def test_two_functions_cannot_fill_one_part():
    with pytest.raises(UserError, match="two of them fill the part 'length'"):
        rewards("length", "length")
