"""Several environments as one: shares of the tasks, and that each task is served by its own."""

from collections import Counter

import pytest
from fakes import Echo, Env, call, make_driver

from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.mixture import Mixture, not_asked
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.env import EnvPart, EnvSection
from agentrl.rollout.groups import roll_out


class Named(Env):
    def __init__(self, name="env", size=8, tools=(), **actions):
        super().__init__(**{"create": [{"role": "user", "content": name}], **actions})
        self.name, self.size, self.own = name, size, tools

    def tasks(self, split):
        return [Task(f"{split}-{i}", {"i": i}) for i in range(self.size)]

    def tools(self):
        return self.own

    def solved(self, rewards, task):
        return rewards.get(self.name) == 2


def mixture(*envs, weights=None, **part):
    weights = weights or [1.0] * len(envs)
    parts = [EnvPart(name=env.name, weight=w, **part) for env, w in zip(envs, weights, strict=True)]
    return Mixture(list(zip(parts, envs, strict=True)))


def test_an_own_execute_that_an_agent_leaves_unasked_is_said():
    class Silent(Named):
        execute = Environment.execute

    class Stepped(Named):
        async def next_step(self, session):
            return ()

    agent = AgentSection(name="solve")
    assert not_asked(Named(), None) == []
    [line] = not_asked(mixture(Silent("silent"), Named("game"), Stepped("stepped")), agent)
    assert line.startswith("not asked with agent: execute of game: ")


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [((8, 8), (1, 1), (8, 8)), ((8, 8), (3, 1), (24, 8)), ((4, 100), (1, 1), (100, 100)), ((5, 10), (1, 3), (5, 15))],
)
def test_training_tasks_are_mixed_by_weight_and_none_is_left_out(sizes, weights, counts):
    mixed = mixture(Named("a", sizes[0]), Named("b", sizes[1]), weights=list(weights)).tasks("train")
    found = Counter(task.id.partition("/")[0] for task in mixed)
    assert (found["a"], found["b"]) == counts
    assert len({task.id for task in mixed}) == sum(sizes)
    assert mixed[-1].id == mixed[len(mixed) - 1].id
    assert [t.id for t in mixed[:2]] == ["a/train-0", "a/train-1"]
    with pytest.raises(IndexError):
        mixed[len(mixed)]


def test_it_pays_where_every_environment_does():
    mute = Named("b")
    mute.pays = False
    assert mixture(Named("a"), Named("b")).pays
    assert not mixture(Named("a"), mute).pays


def test_held_out_splits_stay_apart():
    mixed = mixture(Named("a"), Named("b", 3), Named("a", 2))
    assert mixed.splits == ("a.test", "b.test", "a-2.test")
    assert [len(mixed.tasks(split)) for split in mixed.splits] == [8, 3, 2]
    assert mixed.tasks("a-2.test")[1].id == "a-2/test-1"
    assert mixed.name == "a + b + a-2"


async def test_each_task_is_served_by_its_environment_with_its_tools():
    a = Named("a", 1, calc_reward=2.0, tools=(Echo(name="mine"),))
    b = Named("b", 1, calc_reward={"right": 0.5})
    mixed = Mixture([(EnvPart(name="a", tools=()), a), (EnvPart(name="b"), b)])
    driver = make_driver(["4"], mixed, [Echo(name="shared")])
    groups = await roll_out(driver, list(mixed.tasks("train")), 2)
    first, second = (g.trajectories[0] for g in groups)
    assert (first.messages[0]["content"], second.messages[0]["content"]) == ("a", "b")
    assert (first.rewards, second.rewards) == ({"a": 2.0}, {"right": 0.5})
    assert (first.tools, second.tools) == (("mine",), ("shared",))
    assert mixed.solved(first.rewards, first.task)
    assert not mixed.solved(second.rewards, second.task)
    for env in (a, b):
        env.hooks.check()
        assert env.hooks.total(env.name, "create") == 2


async def test_a_tool_of_one_environment_is_unknown_in_the_others():
    a, b = Named("a", 1, tools=(Echo(name="mine"),)), Named("b", 1)
    mixed = mixture(a, b)
    driver = make_driver([call("mine", text="x"), "4"], mixed)
    (own,), (other,) = [g.trajectories for g in await roll_out(driver, list(mixed.tasks("train")), 1)]
    assert own.tool_uses[0].error is None
    assert "no tool named 'mine'" in other.tool_uses[0].error


def test_unlike_tools_of_one_name_are_refused_and_equal_ones_shared():
    assert len(mixture(Named("a", tools=(Echo(),)), Named("b", tools=(Echo(),))).tools()) == 1
    other = Echo()
    other.description = "Something else."
    with pytest.raises(UserError, match="b and another bring different tools called 'echo'"):
        mixture(Named("a", tools=(Echo(),)), Named("b", tools=(other,)))


def test_an_environment_without_training_tasks_is_named():
    with pytest.raises(UserError, match="environment b has no training task"):
        mixture(Named("a"), Named("b", 0)).tasks("train")


def test_a_recipe_mixes_what_is_installed():
    recipe = Recipe.model_validate({"env": {"mix": [{"name": "gsm8k", "weight": 2}, {"name": "gsm8k"}]}})
    env = make_environment(recipe.env)
    assert env.splits[:2] == ("gsm8k.test", "gsm8k.phrasing")
    with pytest.raises(UserError, match=r"env\.mix\.1\.args\.source: give it as env\.mix\.1\.source"):
        make_environment(EnvSection(mix=(EnvPart(name="gsm8k"), EnvPart(name="gsm8k", args={"source": "x"}))))
