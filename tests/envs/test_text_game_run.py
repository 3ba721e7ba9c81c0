"""`text_game` through the real driver, and its recipe from the warm start to the last training step."""

import asyncio
import re
from pathlib import Path
from random import Random

import pytest
from agentrl_envs.text_game.environment import TextGame
from fakes import TASK, call, make_driver
from paths import RECIPES
from train_help import metrics, records

import agentrl
from agentrl.plugins.types import Task
from agentrl.recipe.load import load_recipe
from agentrl.testing import call as line
from agentrl.testing import check_environment
from agentrl.trajectory import Boundary, FinishReason, check_invariants

RECIPE = str(RECIPES / "text_game.yaml")
MAP = Task("map", {"map": "#######\n#.K#..#\n#@.D.G#\n#######", "shortest": 6})


def gold(env, task, call=call):
    """The calls of a shortest way, from the distances alone."""
    game, moves = env.game(task), []
    while not game.over:
        moves.append(game.best_ways()[-1])
        game.move(moves[-1])
    return [call("move", to=direction.value) for direction in moves]


async def play(env, task, script, **limits):
    driver = make_driver(script, env, **{"max_turns": 40, "max_tool_calls": 40, **limits})
    trajectory = await driver.drive(driver.request(task, 0))
    check_invariants(trajectory)
    return trajectory


def steps(trajectory):
    return [turn.reward for turn in trajectory.turns]


@pytest.mark.parametrize("view", ["compass", "map"])
async def test_a_gold_agent_gets_everything_and_a_wrong_one_less(view):
    env, wrong_rng = TextGame(view=view), Random(0)
    for task in [*env.tasks("train")[:15], *env.tasks("large")[:5]]:
        right = await play(env, task, gold(env, task))
        assert (right.finish, len(right.turns)) == (FinishReason.ENV_DONE, task.data["shortest"])
        assert right.rewards == pytest.approx({"goal": 1.0, "short": 1.0, "step": 1.0})
        assert steps(right) == pytest.approx([1 / task.data["shortest"]] * len(right.turns))
        assert env.solved(right.rewards, task)
        talk = [call("move", to=wrong_rng.choice(["north", "south", "east", "west"])) for _ in range(2)] + ["Hm."] * 40
        wrong = await play(env, task, talk)
        assert wrong.finish is FinishReason.ENV_DONE
        assert (wrong.rewards["goal"], wrong.rewards["short"]) == (0.0, 0.0)
        assert wrong.reward < right.reward
        assert not env.solved(wrong.rewards, task)


async def test_step_rewards_stand_at_the_turn_that_earned_them():
    ways = ["south", "east", "west", "up", "east", "north", "south", "east", "east", "east"]
    t = await play(TextGame(slack=2.0), MAP, [call("move", to=way) for way in ways])
    sixth = 1 / 6
    assert steps(t) == pytest.approx([0, sixth, -sixth, 0, sixth, sixth, sixth, sixth, sixth, sixth])
    assert t.rewards == pytest.approx({"goal": 1.0, "short": 6 / 9, "step": 1.0})
    states = [turn.state for turn in t.turns]
    assert states[0] == states[1] == "(1, 2) False False", "the wall in the south leaves the player where it was"
    assert states[2] not in states[:2]
    assert states[3] == states[4] == states[0], "east and west again, and a call that is no move"
    assert states[5] == states[2]
    assert states[7] == "(2, 2) True False", "the same place with the key is another state"
    assert [m["content"] for m in t.messages if m["role"] == "tool"][3].startswith("Error: ")
    assert [use.error is None for use in t.tool_uses] == [way != "up" for way in ways]
    assert [use.metrics.get("illegal") for use in t.tool_uses] == [1.0, 0.0, 0.0, None, *[0.0] * 6]


async def test_what_the_model_reads_follows_its_moves():
    t = await play(TextGame(), MAP, gold(TextGame(), MAP))
    assert [m["content"] for m in t.messages if m["role"] != "assistant"] == [
        "Find the key, open the door, reach the goal. Key: 1 north, 1 east. Open: north, east.",
        "Key: 1 north. Open: north, west.",
        "You have the key. Door: 1 south, 1 east. Open: south, west.",
        "Door: 1 east. Open: north, east, west.",
        "The door opens. Goal: 2 east. Open: east, west.",
        "Goal: 1 east. Open: north, east, west.",
        "You reach the goal.",
    ]
    drawn = await play(TextGame(view="map"), MAP, gold(TextGame(), MAP))
    assert drawn.messages[0]["content"].endswith(f"G the goal.\n{MAP.data['map']}")


async def test_talk_wastes_turns_and_the_player_is_reminded():
    t = await play(TextGame(slack=1.0), MAP, ["Hm."] * 9)
    assert (t.finish, len(t.turns)) == (FinishReason.ENV_DONE, 7)
    assert t.messages[2]["content"].startswith("Call move. Key: 1 north")
    assert t.rewards == {"goal": 0.0, "short": 0.0}


async def test_moves_after_the_end_and_several_in_a_turn_are_played_in_order():
    moves = gold(TextGame(), MAP)
    t = await play(TextGame(), MAP, ["".join(moves) + call("move", to="west")], max_tool_calls_per_turn=9)
    assert (t.finish, len(t.turns)) == (FinishReason.ENV_DONE, 1)
    assert steps(t) == pytest.approx([1.0])
    assert t.rewards == pytest.approx({"goal": 1.0, "short": 1.0, "step": 1.0})
    assert t.messages[-1]["content"] == "The game is over."


async def test_many_games_at_once_do_not_touch_each_other():
    env = TextGame()
    tasks = env.tasks("test")[:30]
    played = await asyncio.gather(*(play(env, task, gold(env, task)) for task in tasks))
    assert [len(t.turns) for t in played] == [task.data["shortest"] for task in tasks]


@pytest.mark.slow
@pytest.mark.parametrize("view", ["map", "compass"])
def test_it_keeps_the_contract_of_environments(view):
    """Different maps may look alike from their start, as far as the compass tells."""
    check_environment(
        TextGame(view=view), lambda task: gold(TextGame(), task, line), lambda task, seen: line("move", to="north"),
        tasks=2, disjoint=view == "map", limits={"max_turns": 40, "max_tool_calls": 40}, sessions=4,
    )  # fmt: skip


def test_progress_alone_is_not_solved():
    assert TextGame().solved({"goal": 1.0, "short": 0.1, "step": -0.5}, MAP)
    assert not TextGame().solved({"goal": 0.0, "short": 0.0, "step": 1.0}, MAP)


async def test_a_task_without_a_map_fails_with_its_boundary():
    t = await play(TextGame(), TASK, ["Hm."])
    assert t.failure.boundary is Boundary.ENVIRONMENT


SMALL = [
    "sft.new_model.config.num_hidden_layers=1", "sft.new_model.texts=60",
    "sft.stages=[{style: clean, steps: 40, batch: 4, lr: 4e-3, muon_lr: 0.02, warmup: 2}]",
    "rollout.tasks=2", "rollout.n=4", "train.steps=2", "train.threads=1", "eval.every=0", "eval.tasks=4",
]  # fmt: skip


@pytest.mark.slow
def test_the_recipe_runs_from_its_warm_start_to_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = agentrl.train(load_recipe(RECIPE, [*SMALL, f"output={tmp_path / 'run'}"]))
    assert set(result.before) == set(result.after) == {"test", "large"}
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["tool/move/calls"] > 0 and 0 <= row["tool/move/illegal"] <= 1 for row in rows[1:])
    played = records(tmp_path / "run", "step_1")
    assert len(played) == 8
    for t in played:
        assert t["rewards"]["short"] <= t["rewards"]["goal"] <= 1
        assert t["reward"] == pytest.approx(
            t["rewards"]["goal"] + 0.2 * t["rewards"]["short"] + 0.5 * t["rewards"].get("step", 0.0)
        )


def test_the_recipes_comment_gives_commands_that_it_obeys():
    text = Path(RECIPE).read_text()
    commands = re.findall(r"^#  +agentrl (\w+) (\S+)", text, re.M)
    assert commands == [("train", "recipes/text_game.yaml")]
    assert load_recipe(RECIPE).new_model is not None
