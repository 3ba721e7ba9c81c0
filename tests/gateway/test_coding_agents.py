"""Coding agents that people use, as they are, in a workspace: with the commands of docs/tutorials/coding_agents.md."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import Env
from paths import ROOT
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentrl.cli.main import run
from agentrl.gateway.server import Gateway
from agentrl.models import embedded_path
from agentrl.plugins.agent import make_agent
from agentrl.plugins.types import Message, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.rollout.trajectory_file import read_rows, stored_files
from agentrl.rollout.workspaces import workspaces_of
from agentrl.testing.agent import call
from agentrl.testing.play import Holder, Stage
from agentrl.trajectory import FinishReason, Trajectory

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("bubblewrap")]
PAGE = (ROOT / "docs/tutorials/coding_agents.md").read_text(encoding="utf-8")
CACHE = Path.home() / ".cache/agentrl/coding_agents"
SECTION = re.compile(
    r"^## (?P<name>.+?)\n\n```console\n(?P<install>.+?)```\n\n```yaml\n(?P<recipe>.+?)```", re.M | re.S
)
AGENTS = {found["name"]: found for found in SECTION.finditer(PAGE)}
WRITES = "echo four > answer.txt"
CALLS = {
    "Claude Code": call("Bash", command=WRITES, description="Write"),
    "Codex": call("exec_command", cmd=WRITES),
    "OpenCode": call("bash", command=WRITES, description="Write"),
    "mini-SWE-agent": call("bash", command=WRITES),
}
LAST = {"mini-SWE-agent": call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")}
QUESTION = "What is 2+2? Write it to answer.txt, as a word."


@pytest.fixture(scope="module", params=AGENTS)
def agent(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The name of an agent and its recipe; it is installed."""
    name, found = request.param, AGENTS[request.param]
    if "npm " in found["install"] and shutil.which("npm") is None:
        pytest.skip("needs npm (apt-get install npm)")
    install = found["install"].replace("/srv/agents", str(CACHE)).replace("/usr/bin/python3", sys.executable).strip()
    done = CACHE / f"{name}.txt"
    if not done.is_file() or done.read_text() != install:
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["/bin/sh", "-c", install], check=True, timeout=900)
        done.write_text(install)
    recipe = yaml.safe_load(found["recipe"].replace("/srv/agents", str(CACHE)))
    recipe["workspace"]["args"]["folders"].append(sys.base_prefix)
    return name, recipe


async def played(recipe: dict[str, Any], says: Any) -> Trajectory:
    """A rollout in which the model answers what `says` returns. It earns 1 for the right file."""

    async def judge(session: Any) -> float:
        print(session.outcome.output)
        assert session.outcome.exit_code == 0
        return float(await session.workspace.read("answer.txt") == b"four\n")

    section, gateway = AgentSection(**recipe["agent"]), Gateway(host="127.0.0.1", port=0, model="agentrl")
    env = Env(create=[{"role": "user", "content": QUESTION}], calc_reward=judge)
    env.uses_workspace = True
    await gateway.start()
    workspaces = await workspaces_of(WorkspaceSection(**recipe["workspace"]), env, ())
    assert workspaces is not None
    try:
        holder = Holder(make_agent(section, inside=True), section, gateway)
        stage = Stage(env, limits=RolloutSection(timeout=240), holder=holder, workspaces=workspaces)
        return await stage.play(Task("t", {}), says)
    finally:
        await workspaces.close()
        await gateway.close()


async def test_it_works_on_a_task_by_the_model_that_is_trained(agent: tuple[str, dict[str, Any]]) -> None:
    name, recipe = agent
    asked: list[Sequence[Message]] = []

    def says(task: Task, messages: Sequence[Message]) -> str:
        asked.append(messages)
        if not any(message.get("tool_calls") for message in messages):
            return "A sum" if "title" in str(messages[0]["content"])[:400] else CALLS[name]
        return LAST.get(name, "It is four.")

    found = await played(recipe, says)
    assert found.failure is None
    assert found.finish is FinishReason.STOP
    assert found.rewards == {"env": 1.0}
    assert ["added", "/home/user/answer.txt", 5] in found.extra["workspace"]["changes"]
    assert any(QUESTION in str(message["content"]) for message in asked[-1])
    assert sum(turn.trained for turn in found.turns) == 2
    assert found.extra["gateway"]["retries"] == 0
    assert found.extra["gateway"]["auxiliary"] == len(found.turns) - 2


def test_a_random_model_of_a_long_context_is_called_and_answers(
    agent: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Whatever it says, a whole prompt is tokenized, sampled from and answered in the client's dialect."""
    name, recipe = agent
    tokenizer = AutoTokenizer.from_pretrained(embedded_path())
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=131_072, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    limits = {"max_tokens": 131_000, "max_turn_tokens": 16, "max_turns": 4, "timeout": 240}
    recipe = {
        **recipe, "model": {"path": str(tmp_path / "model")}, "env": {"name": "terminal_tasks"},
        "rewards": {"weights": {"passed": 1}}, "rollout": {"tasks": 1, "n": 2, **limits},
        "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run(["rollout", str(tmp_path / "recipe.yaml")]) == 0
    (stored,) = stored_files(tmp_path / "run/trajectories")
    for found in read_rows(stored.path):
        assert found["error"] is None, (name, found["error"])
        assert len(found["turns"]) >= 1
        assert found["tokens"] > 2_000
