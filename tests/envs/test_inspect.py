"""A task of Inspect, by its own solver and scorer in its own interpreter, evaluated through our gateway."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.foreign.agent import ForeignAgent
from agentrl_envs.foreign.environment import ForeignEnvironment
from paths import SUPPORT

from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.gateway.server import Gateway
from agentrl.recipe.sections.agent import AgentSection
from agentrl.testing import call
from agentrl.testing.play import Holder, Stage

pytestmark = pytest.mark.slow


def arguments(venv: str, task: str = "sums") -> dict[str, Any]:
    args = {"task": f"{SUPPORT / 'inspect_tasks.py'}@{task}"}
    return {"python": f"{venv}/bin/python", "module": "inspect", "args": args}


async def test_a_sample_with_a_tool_and_its_score(environments_venv: str) -> None:
    args = arguments(environments_venv)
    env, agent, gateway = ForeignEnvironment(**args), ForeignAgent(**args), Gateway()
    await gateway.start()
    try:
        stage = Stage(env, holder=Holder(agent, AgentSection(name="foreign"), gateway))
        assert (env.name, env.splits, len(env.tasks("train")), len(env.tasks("test"))) == ("sums", ("test",), 0, 4)
        task = env.tasks("test")[1]
        right = await stage.play(task, lambda _: [call("add", x=1, y=2), "It is 3"])
        several = [stage.play(task, lambda _: ["It is 4"], sample=i) for i in range(2)]  # one after the other there
        wrong = await asyncio.gather(*several)
        broken = await stage.play(task, lambda _: [])
    finally:
        await gateway.close()
        await agent.close()
        await env.close()
    said = [(message["role"], message["content"]) for message in right.messages]
    assert said[:2] == [("system", "Be short."), ("user", "How much is 1 and 2?")]
    assert said[3:] == [("tool", "3"), ("assistant", "It is 3")]
    assert (right.failure, dict(right.rewards), len(right.turns)) == (None, {"match": 1.0}, 2)
    assert [dict(one.rewards) for one in wrong] == [{"match": 0.0}] * 2
    assert broken.failure is not None
    assert not broken.rewards


def test_a_file_with_several_tasks_needs_a_name(environments_venv: str) -> None:
    with pytest.raises(UserError, match=r"holds 2 tasks .*name one, as file.py@name"):
        ForeignEnvironment(**(arguments(environments_venv) | {"args": {"task": str(SUPPORT / "inspect_tasks.py")}}))


@pytest.mark.long
def test_it_is_evaluated_with_an_interval(
    environments_venv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"name": "foreign", "args": arguments(environments_venv)}
    limits = {"max_tokens": 512, "max_turn_tokens": 16}
    recipe = {"model": {"path": "tiny"}, "env": section, "agent": section, "rollout": limits}
    (tmp_path / "sums.yaml").write_text(json.dumps(recipe))
    file = tmp_path / "out.json"
    assert main.run(["eval", str(tmp_path / "sums.yaml"), "--model", "tiny", "--no-keep", "--json", str(file)]) == 0
    assert "95 % interval" in capsys.readouterr().out
    assert "test" in file.read_text()
