"""BFCL: its entries as tasks, and our rewards beside its own verdicts."""

import asyncio
import copy
import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from agentrl_envs.foreign.environment import ForeignEnvironment
from endpoint import completion, served
from paths import RECIPES, SUPPORT

from agentrl.audit.answer import turns_of
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.plugins.types import Task
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.testing import call
from agentrl.testing.play import Stage
from agentrl.trajectory import Trajectory

pytestmark = pytest.mark.slow
LIMITS = RolloutSection(max_turns=200, max_tool_calls=400, max_tool_calls_per_turn=64, timeout=300)


def bfcl(venv: str, **args: Any) -> ForeignEnvironment:
    return ForeignEnvironment(f"{venv}/bin/python", "bfcl", args)


async def played(env: ForeignEnvironment, task: Task, turns: list[str]) -> Trajectory:
    return await Stage(env, limits=LIMITS).play(task, lambda _: turns)


def stored(env: ForeignEnvironment, task: Task) -> list[str]:
    return list(turns_of(env.demonstrate(task, Random(0), "stored")))


async def test_entries_of_one_turn(environments_venv: str) -> None:
    env = bfcl(environments_venv, categories=["simple_python", "irrelevance", "live_relevance"])
    assert env.splits == ("simple_python", "irrelevance", "live_relevance")
    assert [len(env.tasks(split)) for split in ("train", *env.splits)] == [0, 400, 240, 16]
    task = env.tasks("simple_python")[1]
    assert [tool.name for tool in env.tools_for(task)] == ["math_factorial"]
    right = await played(env, task, [call("math_factorial", number=5)])
    assert (dict(right.rewards), len(right.turns)) == ({"right": 1.0}, 1)
    for turns in ([call("math_factorial", number=6)], ["120"], [call("math_factorial", number=5)] * 2):
        both = ["\n".join(turns)]
        assert (await played(env, task, both)).rewards["right"] == 0.0
    unlike = await played(env, task, [call("math_factorial", number="five")])
    assert (unlike.failure, unlike.rewards["right"], len(unlike.turns)) == (None, 0.0, 1)
    nothing = env.tasks("irrelevance")[0]
    some = call(env.tools_for(nothing)[0].name)
    assert [(await played(env, nothing, [said])).rewards["right"] for said in ("No.", some)] == [1.0, 0.0]
    wanted = env.tasks("live_relevance")[0]
    some = call(env.tools_for(wanted)[0].name)
    assert [(await played(env, wanted, [said])).rewards["right"] for said in ("No.", some)] == [0.0, 1.0]
    await env.close()


async def test_entries_of_several_turns(environments_venv: str) -> None:
    env = bfcl(environments_venv, categories=["multi_turn_base"])
    task = env.tasks("multi_turn_base")[0]
    turns = stored(env, task)
    again = await asyncio.gather(*(played(env, task, turns) for _ in range(3)))
    assert [one.rewards["right"] for one in again] == [1.0] * 3
    assert "temp" in str([m["content"] for m in again[0].messages if m["role"] == "tool"])
    assert (await played(env, task, [turns[0], *turns[2:]])).rewards["right"] == 0.0
    assert (await played(env, task, ["Done."] * 9)).rewards["right"] == 0.0
    await env.close()


async def test_functions_that_come_later_and_what_bfcl_would_evaluate(environments_venv: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="multi_turn_miss_func offers functions in the middle"):
        bfcl(environments_venv, categories=["multi_turn_miss_func"])
    env = bfcl(environments_venv, categories=["multi_turn_miss_func", "simple_python"], form="text")
    task = env.tasks("multi_turn_miss_func")[0]
    turns = stored(env, task)
    done = await played(env, task, turns)
    assert done.rewards["right"] == 1.0
    assert "I have updated some more functions" in str([m["content"] for m in done.messages])
    mark = tmp_path / "mark"
    run = f"__import__('os').system('touch {mark}')"
    for evil in (
        f"[cd(folder='x' + {run})]", f"[inspect.os.system(command='touch {mark}')]", f"[cd(folder=lambda: {run})]",
        f"[cd(folder={{\"{run} or f\": {{'a': {{}}}}}})]", f"[ls(a={run})]",
    ):  # fmt: skip
        assert (await played(env, task, [evil, *turns])).failure is None
        await played(env, env.tasks("simple_python")[0], [evil])
    assert not mark.exists()
    await env.close()


def knows_factorials(body: dict[str, Any]) -> dict[str, Any]:
    """What a model says that is right in the second entry of `simple_python`, and in no other."""
    names = [tool["function"]["name"] for tool in body["tools"]]
    return completion(None, [("math_factorial", '{"number": 5}')]) if "math_factorial" in names else completion("No.")


@pytest.mark.parametrize(("model", "right"), [("tiny", 0.0), ("openai:good-model", 0.5)])
def test_eval_shows_the_accuracy_with_its_interval(
    environments_venv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    model: str, right: float,
) -> None:  # fmt: skip
    out = tmp_path / "out.json"
    keys = [f"env.args.python={environments_venv}/bin/python", "eval.tasks=2", "rollout.max_turn_tokens=16"]
    given = ["eval", str(RECIPES / "bfcl.yaml"), *keys, "--model", model, "--split", "simple_python", "--no-keep"]
    with served(knows_factorials) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        assert main.run([*given, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["splits"]["simple_python"]
    assert (found["tasks"], found["failed"], found["accuracy"]) == (2, 0, right)
    table = capsys.readouterr().out
    assert f"{right:.1%}" in table
    assert f"{found['low']:.1%} to {found['high']:.1%}" in table
    assert found["low"] <= right < found["high"]


def altered(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """An answer with one of its calls left out, named otherwise, or with another value."""
    message = copy.deepcopy(message)
    calls = message["tool_calls"]
    function = rng.choice(calls)["function"]
    given = function["arguments"]
    way = rng.randrange(5) if given else 0
    if way == 0:
        calls.pop(rng.randrange(len(calls)))
    elif way == 1:
        given.pop(rng.choice(sorted(given)))
    elif way == 2:
        rng.shuffle(calls)
    else:
        key = rng.choice(sorted(given))
        value = given[key]
        given[key] = value + 1 if isinstance(value, int | float) else f"{value}x" if way == 3 else [value]
    return message if calls else {"role": "assistant", "content": "I cannot."}


def answers(env: ForeignEnvironment, task: Task, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """The stored answer of a task as the assistant's messages, and altered ones."""
    try:
        said = [m for m in env.demonstrate(task, Random(0), "stored") if m["role"] == "assistant"]
    except UserError:  # any call is right
        said = [{"role": "assistant", "content": "No."}]
    yield said
    if not any(message.get("tool_calls") for message in said):
        for tool in env.tools_for(task)[:1]:  # some offer none
            function = {"name": tool.name, "arguments": {}}
            yield [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
        return
    places = [i for i, message in enumerate(said) if message.get("tool_calls")]
    place = rng.choice(places)
    yield [altered(message, rng) if i == place else message for i, message in enumerate(said)]


def recorded(task: Task, said: list[dict[str, Any]]) -> Any:
    """What BFCL's handler records of an answer: steps of turns, where there are several turns."""
    steps = [
        [{f["name"]: json.dumps(f["arguments"])} for f in (made["function"] for made in message["tool_calls"])]
        if message.get("tool_calls")
        else message["content"]
        for message in said
    ]
    if "multi_turn" not in task.data["category"]:
        return steps[0]
    turns: list[list[Any]] = [[]]
    for step in steps:
        turns[-1].append(step)
        if isinstance(step, str):
            turns.append([])
    return turns[:-1]


@pytest.mark.long
async def test_rewards_are_bfcls_own_verdicts(environments_venv: str, tmp_path: Path) -> None:
    env, rng = bfcl(environments_venv), random.Random(0)
    lines, ours = [], []
    for split in env.splits:
        for index, task in enumerate(env.tasks(split)):
            for said in answers(env, task, rng):
                done = await played(env, task, list(turns_of(said)))
                assert done.failure is None, (task.id, done.failure)
                ours.append(done.rewards["right"] == 1.0)
                line = {"category": split, "index": index, "form": "calls", "said": recorded(task, said)}
                lines.append(line)
    await env.close()
    (tmp_path / "said.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [f"{environments_venv}/bin/python", str(SUPPORT / "bfcl_own.py"), str(tmp_path / "said.jsonl")]
    own = [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]
    unlike = [(line, a, b) for line, a, b in zip(lines, ours, own, strict=True) if a != b]
    print(len(lines), Counter(own), len(unlike))
    assert not unlike, unlike[:3]
    assert len(lines) >= 4_000
    assert Counter(own)[False] >= 1_000
