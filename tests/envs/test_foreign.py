"""Somebody else's environment in an interpreter of its own: played by the real driver, and whatever it does wrong."""

import sys
from pathlib import Path

import pytest
from agentrl_envs.foreign.environment import ForeignEnvironment

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
