"""The adapters of reasoning-gym, textarena and MiniWoB++, in the interpreter that has these packages."""

import asyncio
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from agentrl_envs.foreign.environment import ForeignEnvironment
from paths import ROOT, SUPPORT

from agentrl.errors import UserError
from agentrl.plugins.types import Message, Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.testing import call, check_environment
from agentrl.testing.play import Stage
from agentrl.trajectory import FinishReason, Trajectory

pytestmark = pytest.mark.slow
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
NO_STORED_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Sets of reasoning-gym 0.1.25 whose entries hold `answer: None`, which their scorers pay 0."""
NO_EXAMPLE = ("boxnet", "rush_hour")
"""Those of them whose entries hold no right answer anywhere else."""


def foreign(venv: str, module: str, processes: int = 1, **args: Any) -> ForeignEnvironment:
    return ForeignEnvironment(str(Path(venv, "bin/python")), module, args, processes=processes)


async def played(env: ForeignEnvironment, *turns: str, task: int = 0) -> Trajectory:
    return await Stage(env).play(env.tasks("train")[task], lambda _: list(turns))


def test_a_set_keeps_the_contract(environments_venv: str) -> None:
    env = foreign(environments_venv, "reasoning_gym", dataset="chain_sum", config=SUMS, train=50, held_out=5)

    def right(task: Task) -> str:
        (message,) = env.demonstrate(task, Random(0), "stored")
        return str(message["content"])

    check_environment(env, right, lambda _: "twelve", tasks=3, disjoint=False)


async def test_levels_of_a_curriculum_take_turns(environments_venv: str) -> None:
    env = foreign(environments_venv, "reasoning_gym", dataset="chain_sum", levels=[0, 3], train=40)
    tasks = [env.tasks("train")[i] for i in range(20)]
    assert [task.data["level"] for task in tasks[:4]] == [0, 3, 0, 3]
    lengths: dict[int, int] = {0: 0, 3: 0}
    for i, task in enumerate(tasks):
        opening = (await played(env, "?", task=i)).messages[0]["content"]
        lengths[task.data["level"]] += len(str(opening))
    await env.close()
    assert lengths[3] > lengths[0] + 100


async def test_an_answer_in_tags_and_one_that_its_scorer_cannot_read(environments_venv: str) -> None:
    env = foreign(environments_venv, "reasoning_gym", dataset=["chain_sum", "prime_factorization"], train=4)
    answer = env.demonstrate(env.tasks("train")[0], Random(0), "stored")[0]["content"]
    assert (await played(env, f"I think <answer> {answer} </answer>, yes.")).rewards["score"] == 1.0
    unread = await played(env, "a few of them", task=1)
    assert unread.failure is None
    assert unread.rewards["score"] == 0.0
    await env.close()


async def test_the_five_sets_without_a_stored_answer(environments_venv: str) -> None:
    """What `agentrl audit` says of them: where an answer stands elsewhere in the entry, it is right."""
    env = foreign(environments_venv, "reasoning_gym", dataset=list(NO_STORED_ANSWER), train=5)
    for i, name in enumerate(NO_STORED_ANSWER):
        task = env.tasks("train")[i]
        assert task.data["set"] == name
        if name in NO_EXAMPLE:
            with pytest.raises(UserError, match=f"the set '{name}' stores no answers"):
                env.demonstrate(task, Random(0), "stored")
        else:
            answer = str(env.demonstrate(task, Random(0), "stored")[0]["content"])
            assert (await played(env, answer, task=i)).rewards["score"] == 1.0
    await env.close()


@pytest.mark.parametrize(
    ("module", "args", "said"),
    [
        ("reasoning_gym", {"dataset": "sums"}, "reasoning-gym has no set 'sums'"),
        ("textarena", {"game": "TicTacToe-v0", "players": 3}, "games for one player and for two are played"),
        ("textarena", {"game": "TicTacToe-v0", "opponent": "strong"}, "expected random, or file.py:function"),
        ("miniwob", {"task": "click-nothing"}, "miniwob has no page 'click-nothing'"),
    ],
)
def test_arguments_that_do_not_fit(environments_venv: str, module: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        foreign(environments_venv, module, **args)
    assert said in str(raised.value)


async def test_a_game_for_two_against_a_fixed_opponent(environments_venv: str) -> None:
    env = foreign(environments_venv, "textarena", game="TicTacToe-v0", players=2)
    assert [env.tasks("train")[i].data["seat"] for i in range(3)] == [0, 1, 0]
    first, again = [await played(env, "[0]", "[4]", "[8]", "[2]", "[6]", "[1]", "[3]") for _ in range(2)]
    await env.close()
    assert [m["content"] for m in first.messages] == [m["content"] for m in again.messages]
    opening, told = str(first.messages[0]["content"]), str(first.messages[2]["content"])
    assert "Tic Tac Toe" in opening
    assert "[Player 1] [" in told  # the opponent's move
    assert "[Player 0]" not in told  # its own stands in the conversation already
    assert first.rewards["game"] in (-1.0, 0.0, 1.0)


async def test_games_at_the_same_time_have_their_own_random_numbers(environments_venv: str) -> None:
    """textarena's games draw from Python's global random numbers: those of one must not move those of another."""
    env = foreign(environments_venv, "textarena", game="Blackjack-v0")
    turns = ["[hit]", "[stand]"] * 12
    alone = [await played(env, *turns, task=i) for i in range(4)]
    stage = Stage(env)
    together = await asyncio.gather(
        *(stage.play(env.tasks("train")[i % 4], lambda _: list(turns), sample=i // 4) for i in range(16))
    )
    await env.close()
    for i, trajectory in enumerate(together):
        assert [m["content"] for m in trajectory.messages] == [m["content"] for m in alone[i % 4].messages]


async def test_a_game_that_tells_a_move_with_its_arguments_in_the_wrong_order(environments_venv: str) -> None:
    env = foreign(environments_venv, "textarena", game="Countdown-v0")
    limits = RolloutSection(max_turns=2)
    done = await Stage(env, limits=limits).play(env.tasks("train")[0], lambda _: ["[0 1 +]", "[0 1 +]"])
    await env.close()
    assert done.failure is None
    assert "100 + 75 = 175" in str(done.messages[2]["content"]), done.messages


def test_demonstrations_of_a_game_are_moves_that_it_lists(environments_venv: str) -> None:
    env = foreign(environments_venv, "textarena", game="TicTacToe-v0", players=2)
    said = env.demonstrate(env.tasks("train")[1], Random(3), "random")
    moves = [str(m["content"]) for m in said if m["role"] == "assistant"]
    assert len(moves) == len(set(moves)) > 2
    assert asyncio.run(played(env, *moves, task=1)).failure is None
    asyncio.run(env.close())


async def test_an_opponent_of_ones_own(environments_venv: str, tmp_path: Path) -> None:
    code = "def lowest(told, rng):\n    return told.rpartition('Available Moves: ')[2].split(\"'\")[1]\n"
    (tmp_path / "mine.py").write_text(code)
    env = foreign(environments_venv, "textarena", game="TicTacToe-v0", players=2, opponent=f"{tmp_path}/mine.py:lowest")
    done = await played(env, "[8]", "[7]", "[6]")
    await env.close()
    assert dict(done.rewards) == {"game": 1.0}  # it took 0 and 1


async def test_a_game_that_is_left_is_lost(environments_venv: str) -> None:
    """A model that is paid more for leaving than for losing learns to leave."""
    env = foreign(environments_venv, "textarena", game="TicTacToe-v0", players=2)
    left = await Stage(env, limits=RolloutSection(max_turns=1)).play(env.tasks("train")[0], lambda _: ["[0]"])
    await env.close()
    assert left.finish is FinishReason.MAX_TURNS
    assert dict(left.rewards) == {"game": -1.0}


@pytest.mark.usefixtures("chromium")
async def test_a_page_is_read_and_clicked(environments_venv: str) -> None:
    env = foreign(environments_venv, "miniwob", task=["click-test-2", "enter-text"], tools=["click", "type"])
    right = await played(env, call("click", ref=1))
    assert right.messages[0]["content"] == 'Click button ONE.\n[1] button "ONE"\n[2] button "TWO"'
    assert dict(right.rewards) == {"page": 1.0}
    wrong = await played(env, call("click", ref=2))
    assert dict(wrong.rewards) == {"page": -1.0}
    lost = await played(env, call("click", ref=7), "I give up.")
    assert lost.messages[2]["content"] == "there is no element 7"
    assert (dict(lost.rewards), lost.failure) == ({"page": -1.0}, None)
    asked = str((await played(env, "?", task=1)).messages[0]["content"])
    text = asked.split('"')[1]
    typed = await played(env, call("type", ref=1, text=text), call("click", ref=2), task=1)
    assert f"[1] textbox = {text!r}" in str(typed.messages[2]["content"])
    await env.close()


@pytest.mark.long
@pytest.mark.usefixtures("chromium")
def test_pages_keep_the_contract(environments_venv: str) -> None:
    env = foreign(environments_venv, "miniwob", task="click-button", tools=["click"], train=20, held_out=4)

    def named(task: Task) -> list[str]:
        asked = env.demonstrate(task, Random(0), "named")[0]["tool_calls"][0]["function"]["arguments"]
        return [call("click", **asked)]  # type: ignore[arg-type]

    check_environment(env, named, lambda _: ["no"], tasks=2, disjoint=False, sessions=6)


DOCS = (ROOT / "docs/environments.md").read_text()
HELD_OUT = 1_000_003  # added to the seed of a set there
MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
NOT_BUILT = {
    0: {"knight_swap"},
    1: {"knight_swap", "modulo_grid"},
    2: {"caesar_cipher", "countdown", "knight_swap", "letter_jumble"},
}
"""Levels of reasoning-gym 0.1.25's own curricula at which a set raises as it is built."""
ADAPTER = str(ROOT / "envs/agentrl_envs/foreign/adapters/reasoning_gym.py")
BUILD = f"""
import importlib.util, sys
from reasoning_gym.factory import CURRICULA
spec = importlib.util.spec_from_file_location("adapter", {ADAPTER!r})
adapter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(adapter)
for name in set(CURRICULA) - {{"composite"}}:
    try:
        made = adapter.Adapter(name, levels=[int(sys.argv[1])])
        made.open({{"split": "train", "index": 0, **made.task("train", 0)}}, 0)
    except Exception:
        print("-" + name)
    else:
        print("+" + name)
"""


def listed(after: str) -> list[str]:
    """The names of the page that follow a text."""
    found = re.search(f"{re.escape(after)}(.*?)[;.]\n", DOCS, re.DOTALL)
    assert found is not None, after
    return re.split(r",\s+", found.group(1).strip())


def printed(venv: str, code: str, *args: str) -> list[str]:
    """The words that a program prints there."""
    return subprocess.check_output([f"{venv}/bin/python", "-W", "ignore", "-c", code, *args], text=True).split()


@pytest.mark.long
async def test_all_sets_are_built_and_answered(environments_venv: str) -> None:
    code = "from reasoning_gym.factory import DATASETS; print(*sorted(set(DATASETS) - {'composite'}))"
    names = printed(environments_venv, code)
    assert f"all {len(names)} sets" in DOCS
    env = foreign(environments_venv, "reasoning_gym", dataset=names, train=len(names))
    done = {name: await played(env, "?", task=i) for i, name in enumerate(names)}
    await env.close()
    assert not {name: one.failure for name, one in done.items() if one.failure or not one.messages[0]["content"]}


@pytest.mark.long
@pytest.mark.parametrize("level", NOT_BUILT)
def test_levels_at_which_a_curriculum_builds_nothing(environments_venv: str, level: int) -> None:
    said = printed(environments_venv, BUILD, str(level))
    assert f"the levels of {len(said)} curricula" in DOCS
    assert {name[1:] for name in said if name[0] == "-"} == NOT_BUILT[level]


SAME = {"coin_flip": 200, "string_splitting": 200, "string_synthesis": 200, "tower_of_hanoi": 200,
        "prime_factorization": 197, "lcm": 89, "caesar_cipher": 83, "aiw": 47}  # fmt: skip
"""Sets of reasoning-gym 0.1.25: how many of 200 held-out entries ask what one of 4,000 training entries asks."""


@pytest.mark.long
@pytest.mark.parametrize("name", SAME)
def test_sets_that_ask_in_test_what_train_asks(environments_venv: str, name: str) -> None:
    """The seeds are apart, but the sets are small: docs/audit.md has the others."""
    code = f"""
import reasoning_gym, sys
made = lambda seed, size: [one["question"] for one in reasoning_gym.create_dataset(sys.argv[1], seed=seed, size=size)]
train = set(made(0, 4000))
print(sum(question in train for question in made({HELD_OUT}, 200)))
"""
    assert int(printed(environments_venv, code, name)[0]) == SAME[name]


@pytest.mark.long
async def test_the_games_of_the_page_are_those_that_begin_and_take_a_move(environments_venv: str) -> None:
    def moves(task: Task, messages: Sequence[Message]) -> str:
        return str((MOVE.findall(str(messages[-1]["content"])) or ["[0]"])[-1])

    ids = printed(environments_venv, "import textarena as t; print(*t.envs.registration.ENV_REGISTRY)")
    found, failed = {}, {}
    for name, game in {game.partition("-v")[0]: game for game in reversed(ids)}.items():
        try:
            env = foreign(environments_venv, "textarena", game=game)
        except UserError as error:
            failed[name] = str(error)
            continue
        players = 1 + env.tasks("train")[1].data["seat"]
        done = await Stage(env, limits=RolloutSection(max_turns=1, timeout=60)).play(env.tasks("train")[0], moves)
        await env.close()
        if done.failure is None:
            found[name] = players
        else:
            failed[name] = str(done.failure)
    wanted = dict.fromkeys(listed("- for one player: "), 1) | dict.fromkeys(listed("- for two: "), 2)
    assert found == wanted, {name: failed.get(name) for name in wanted.keys() ^ found.keys()}
    one, two = ([*found.values()].count(players) for players in (1, 2))
    assert f"{one} games for one player, {two} for two" in DOCS


@pytest.mark.long
@pytest.mark.usefixtures("chromium")
async def test_all_pages_begin_and_take_a_click(environments_venv: str) -> None:
    pages = "p.Path(miniwob.__file__).parent.glob('html/miniwob/*.html')"
    names = printed(environments_venv, f"import miniwob, pathlib as p; print(*sorted(x.stem for x in {pages}))")
    assert f"all {len(names)} pages" in DOCS
    env = foreign(environments_venv, "miniwob", task=names, train=len(names))
    turns = [call("click_at", x=80, y=100), "I give up."]
    done = {name: await played(env, *turns, task=i) for i, name in enumerate(names)}
    await env.close()
    assert not {name: one.failure for name, one in done.items() if one.failure}
    silent = [name for name, one in done.items() if "[1] " not in str(one.messages[0]["content"])]
    (line,) = [line for line in DOCS.splitlines() if "show nothing in words" in line]
    assert silent == re.findall("`([^`]+)`", line.partition(" show nothing")[0])


@pytest.mark.parametrize("name", ["reasoning_gym", "textarena", "miniwob"])
def test_the_recipes_are_sound(environments_venv: str, name: str) -> None:
    if name == "miniwob" and not os.path.exists("/usr/bin/chromium"):
        pytest.skip("needs the system package chromium")
    recipe = load_recipe(str(ROOT / f"recipes/{name}.yaml"), [f"env.args.python={environments_venv}/bin/python"])
    env = ForeignEnvironment(**recipe.env.args)
    style = recipe.sft.stages[0].style
    assert env.demonstrate(env.tasks("train")[0], Random(0), style)
    asyncio.run(env.close())


ROOMS = str(SUPPORT / "gymnasium_rooms.py")


async def test_gymnasium_words_for_words(environments_venv: str) -> None:
    env = foreign(environments_venv, "gymnasium", env=f"{ROOMS}:Riddle")
    number = str((await played(env, "x")).messages[0]["content"]).split()[1]
    done = await played(env, "perhaps", " .,! ", number)
    await env.close()
    said = [str(m["content"]) for m in done.messages[2::2]]
    assert said[0] == "no"
    assert said[1].startswith("Error: '.,!' is no action here: Text(")
    assert (dict(done.rewards), done.failure) == ({"step": 1.0}, None)


async def test_gymnasium_parts_and_numbers(environments_venv: str) -> None:
    env = foreign(environments_venv, "gymnasium", env=f"{ROOMS}:Rooms", opening="Find the vault.\n")
    ahead = call("act", way=1, shout="a")
    done = await played(env, call("act", way=0, shout="ho"), ahead, f"{ahead}\n{ahead}")
    await env.close()
    assert [m["content"] for m in done.messages if m["role"] != "assistant"] == [
        "Find the vault.\nroom: hall\ngold: 0", "room: hall\ngold: 0", "room: cellar\ngold: 1", "room: vault\ngold: 2",
        "Error: the episode is over",
    ]  # fmt: skip
    assert dict(done.rewards) == {"step": 1.0}
    lake = foreign(
        environments_venv, "gymnasium", env="FrozenLake-v1", options={"is_slippery": False},
        actions=["left", "down", "right", "up"],
    )  # fmt: skip
    ways = ["down", "down", "right", "right", "down", "right"]
    walked = await played(lake, *(call("act", action=way) for way in ways))
    await lake.close()
    assert (walked.messages[0]["content"], walked.reward) == ("0", 1.0)
