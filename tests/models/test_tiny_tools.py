"""`tiny_tools`, the embedded model that calls tools it has never seen."""

import sys

import pytest
from agentrl_envs.random_tools.environment import RandomTools
from paths import ROOT

import agentrl
from agentrl.plugins.types import ArgumentError
from agentrl.recipe.schema import Recipe
from agentrl.rollout.stored import folder_files, read_samples

pytestmark = pytest.mark.slow

LIMITS = {"max_turns": 6, "max_tool_calls_per_turn": 1, "max_turn_tokens": 96, "max_tool_tokens": 96, "max_tokens": 900}
TASKS = 128


def played(folder, env, model="tiny_tools", tasks=TASKS):
    """The samples of an evaluation on the split `test`, one a task, sampled as in training."""
    recipe = {"model": {"path": model}, "env": env, "rollout": LIMITS, "eval": {"tasks": tasks}}
    agentrl.evaluate(Recipe.read(recipe), splits=["test"], keep=folder)
    return [sample.trajectory for file in folder_files(folder) for sample in read_samples(file.path)]


def first_call(trajectory):
    turn = next(message for message in trajectory.messages if message["role"] == "assistant")
    return turn["tool_calls"][0]["function"] if turn.get("tool_calls") else None


def fits(call, tools):
    """Whether a call names one of the tools, with arguments that its schema takes."""
    tool = {tool.name: tool for tool in tools}.get(call["name"]) if call else None
    try:
        return tool is not None and isinstance(call["arguments"], dict) and bool(tool.check(call["arguments"]))
    except ArgumentError:
        return False


def test_first_calls_of_tools_that_no_lesson_has_fit_their_schemas(tmp_path):
    env = RandomTools()
    trajectories = played(tmp_path / "kept", {"name": "agentrl_envs.random_tools.environment:RandomTools"})
    assert len(trajectories) == TASKS
    good = sum(fits(first_call(t), env.tools_for(t.task)) for t in trajectories)
    assert good >= 0.9 * TASKS


def test_it_begins_where_a_domain_of_ones_own_can_be_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    solved = {
        model: sum(t.reward >= 1 for t in played(tmp_path / model, {"name": "domains:OrderDesk"}, model, 64))
        for model in ("tiny", "tiny_tools")
    }
    assert solved["tiny"] <= 3
    assert solved["tiny_tools"] >= 6
