"""Somebody else's environment in an interpreter of its own: played by the real driver, and whatever it does wrong."""

import asyncio
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agentrl_envs.foreign import process
from agentrl_envs.foreign.environment import ForeignEnvironment
from processes import alive, gone

from agentrl.errors import UserError
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.testing import call, check_environment
from agentrl.testing.play import Stage

TOY = str(Path(__file__).parent.parent / "support" / "foreign_toy.py")


def toy(fault: str = "", **options) -> ForeignEnvironment:
    return ForeignEnvironment(sys.executable, TOY, {"fault": fault, **options.pop("args", {})}, **options)


async def play(env, *turns, task=0):
    stage = Stage(env)
    return await stage.play(env.tasks("train")[task], lambda _: list(turns))


@pytest.fixture
async def env():
    made = toy()
    yield made
    await made.close()


async def test_our_driver_plays_it(env):
    task = env.tasks("train")[3]
    secret = task.data["secret"]
    played = await play(env, "hm", call("guess", number=0), call("guess", number=secret), "done", task=3)
    assert played.failure is None
    assert [m["content"] for m in played.messages if m["role"] in ("user", "tool")] == [
        "Guess a number from 1 to 10.", "Call guess.", "higher", "right",
    ]  # fmt: skip
    assert dict(played.rewards) == {"right": 1.0, "quick": 0.5, "step": 0.25}
    assert env.solved(played.rewards, task)


def test_the_contract_of_environments_holds():
    def gold(task):
        return [call("guess", number=task.data["secret"]), "done"]

    check_environment(toy(), gold=gold, wrong=lambda _: [call("guess", number=0), "done"], disjoint=False)


RAISED = {
    "raise": "ValueError: no such thing (foreign_toy.py:",
    "sys.exit": "SystemExit: 4 (foreign_toy.py:",
    "interrupt": "KeyboardInterrupt (foreign_toy.py:",
    "unreadable": "UnreadableError: its message cannot be read (RuntimeError)",
}
ENDED = {
    "exit": "its process ended by exit code 3",
    "kill": "its process ended by signal 9",
    "crash": "its process ended by signal 11",
    "garbage": "its process sent what is no answer (b'no answer')",
    "endless": "its process sent a line of more than 33 MiB",
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("where", ["open", "step", "call", "grade"])
@pytest.mark.parametrize("what", ["raise", "sys.exit", "exit"])
async def test_what_fails_there_fails_the_rollout(where, what):
    env = toy(f"{where}:{what}")
    try:
        played = await play(env, "hm", call("guess", number=1), "done")
    finally:
        await env.close()
    assert played.failure is not None
    assert played.failure.boundary == "environment"
    assert (RAISED | ENDED)[what] in played.failure.message
    assert not played.rewards, "a failed rollout has no reward, not one of 0"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("what", ["interrupt", "unreadable", "kill", "crash", "garbage", "endless"])
async def test_what_else_a_step_may_do_fails_the_rollout(what):
    env = toy(f"step:{what}")
    try:
        played = await play(env, "hm")
    finally:
        await env.close()
    assert (RAISED | ENDED)[what] in played.failure.message


WRONG = {
    "call": [{"text": 5}, {"text": "x", "metrics": "x"}, {"reward": "x"}, {"images": "x"}, {"txt": "x"}],
    "step": [5, {"messages": 5}, [{"role": "robot", "content": ""}], {"messages": "x", "reward": "x"}, {}],
    "grade": ["x", None, [1.0], {"right": "x"}, {"right": float("nan")}, {"other": 1.0}, {"rewards": {"right": [1]}}],
}


@pytest.mark.slow
@pytest.mark.parametrize("where", WRONG)
async def test_what_it_may_not_return_fails_the_rollout(where):
    for wrong in WRONG[where]:
        env = toy(args={"answers": {where: wrong}})
        try:
            played = await play(env, "hm", call("guess", number=1), "done")
        finally:
            await env.close()
        assert played.failure is not None, f"{where} returned {wrong!r}"
        assert played.failure.boundary in ("environment", "reward"), played.failure
        assert not played.rewards


@pytest.mark.slow
async def test_an_opening_that_hangs_ends_in_time():
    env = toy("open:hang")
    env._pool.seconds = 1.0  # not before its process has started, which takes longer on a busy machine
    try:
        played = await play(env, "hm")
    finally:
        await env.close()
    assert "open() took more than 1 s" in played.failure.message


async def test_memory_is_bounded_where_the_recipe_says_so():
    env = toy("step:memory", memory_gb=2.0)
    try:
        played = await play(env, "hm")
    finally:
        await env.close()
    assert "MemoryError" in played.failure.message


@pytest.mark.slow
async def test_a_fresh_process_serves_one_rollout():
    env = ForeignEnvironment(sys.executable, f"{TOY}:Keeping", fresh=True, processes=2)
    stage = Stage(env)
    try:
        played = [
            await stage.play(env.tasks("train")[0], lambda _: [call("guess", number=1), "done"]) for _ in range(3)
        ]
    finally:
        await env.close()
    assert [one.rewards["quick"] for one in played] == [1.0] * 3, "nothing is kept of the rollout before"


async def test_the_next_attempt_has_another_process(tmp_path):
    env = toy("step:exit", args={"marker": str(tmp_path / "once")})
    try:
        task = env.tasks("train")[0]
        stage = Stage(env)
        played = await stage.play(task, lambda _: ["hm", call("guess", number=task.data["secret"]), "done"])
        again = await stage.play(task, lambda _: ["hm", call("guess", number=task.data["secret"]), "done"])
    finally:
        await env.close()
    assert played.failure.boundary == "environment"
    assert again.failure is None
    assert again.rewards["right"] == 1.0


async def test_gigabytes_printed_are_read_and_forgotten():
    env = toy("step:flood")
    try:
        played = await play(env, "hm", call("guess", number=1), "done")
    finally:
        await env.close()
    assert played.failure is None


@pytest.mark.slow
async def test_a_hang_ends_at_its_deadline_and_others_go_on(tmp_path):
    env = toy("step:hang", args={"marker": str(tmp_path / "once")}, processes=2)
    tasks = env.tasks("train")
    stage = Stage(env, limits=RolloutSection(turn_timeout=1.0))
    try:
        hung = asyncio.create_task(stage.play(tasks[0], lambda _: ["hm"]))
        while not (tmp_path / "once").exists():
            await asyncio.sleep(0.02)
        others = await asyncio.gather(
            *(stage.play(tasks[i], lambda _: ["hm", call("guess", number=1), "done"]) for i in range(1, 5))
        )
        played = await hung
        after = await stage.play(tasks[5], lambda _: ["hm", call("guess", number=1), "done"])
    finally:
        started = time.monotonic()
        await env.close()
    assert "step" in played.failure.message or "execute" in played.failure.message
    assert played.failure.boundary == "environment"
    assert [one.failure for one in (*others, after)] == [None] * 5
    assert time.monotonic() - started < 5


async def test_alone_each_rollout_has_a_process_to_itself():
    env = toy(alone=True, processes=2)
    stage = Stage(env)
    try:
        played = await asyncio.gather(
            *(stage.play(env.tasks("train")[i], lambda _: ["hm", call("guess", number=1), "done"]) for i in range(5))
        )
    finally:
        await env.close()
    assert [one.failure for one in played] == [None] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("init:raise", "ValueError: no such thing"),
        ("describe:exit", "its process ended by exit code 3"),
        ("init:hang", "describe() did not return within 1 s (env.args.start_seconds)"),
    ],
)
def test_what_fails_before_a_run_is_one_line(fault, said):
    with pytest.raises(UserError) as raised:
        toy(fault, start_seconds=1.0 if fault.endswith("hang") else 60.0)
    assert said in str(raised.value)


def test_an_interpreter_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no interpreter"):
        ForeignEnvironment(str(tmp_path / "bin" / "python"), TOY)


async def test_nothing_that_it_started_is_left():
    env = toy("step:orphan")
    played = await play(env, "hm")
    pid = int(played.failure.message.split("started ")[1].split(".")[0])
    assert alive(pid)
    await env.close()
    assert gone([pid], 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["hold", "stop"])
async def test_a_process_that_does_not_answer_is_killed(what, monkeypatch):
    monkeypatch.setattr(process, "HELD_SECONDS", 1.0)
    env = toy(f"step:{what}")
    try:
        played = await play(env, "hm")
    finally:
        await env.close()
    assert "its process did not answer for 1 s" in played.failure.message
    assert played.failure.boundary == "environment"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("minor", [10, 12, 13, 14])
async def test_other_pythons_serve_it(minor):
    """The interpreter is not ours: its version, too, may be another."""
    env = ForeignEnvironment(interpreter(minor), TOY)
    try:
        task = env.tasks("train")[0]
        played = await play(env, "hm", call("guess", number=task.data["secret"]), "done")
    finally:
        await env.close()
    assert played.rewards["right"] == 1.0
    assert task.data["version"] == [3, minor]


def interpreter(minor: int) -> str:
    """Python 3.`minor`; skips where none is installed."""
    versions = Path.home() / ".pyenv" / "versions"
    found = [str(path) for path in sorted(versions.glob(f"3.{minor}.*/bin/python"))]
    found += [path for path in [shutil.which(f"python3.{minor}")] if path]
    for path in found:
        asked = subprocess.run([path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True)
        if asked.stdout.strip() == str(minor):
            return path
    pytest.skip(f"there is no Python 3.{minor} here")


async def test_an_async_adapter_has_all_its_episodes_in_one_loop():
    env = ForeignEnvironment(sys.executable, f"{TOY}:AsyncAdapter")
    stage = Stage(env)
    task = env.tasks("train")[0]
    turns = ["hm", call("guess", number=task.data["secret"]), "done"]
    try:
        started = time.monotonic()
        played = await asyncio.gather(*(stage.play(task, lambda _: turns) for _ in range(8)))
    finally:
        await env.close()
    assert [one.rewards["right"] for one in played] == [1.0] * 8
    assert time.monotonic() - started < 8 * 0.5, "they wait at the same time"


async def test_demonstrations_and_states_come_from_there(env):
    task = env.tasks("train")[0]
    shown = env.demonstrate(task, random.Random(0), "")
    assert shown[0]["tool_calls"][0]["function"]["arguments"] == {"number": task.data["secret"]}
    played = await play(env, "hm", call("guess", number=0), call("guess", number=0), "done")
    assert [turn.state for turn in played.turns][:4] == ["0", "0", "1", "2"]
