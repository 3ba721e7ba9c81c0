"""verifiers 0.4, unchanged, in its own interpreter: its rollouts through our gateway, and its rewards back.

The virtual environment is made by `scripts/verifiers/install`.
"""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agentrl_envs.foreign.agent import ForeignAgent
from agentrl_envs.foreign.environment import ForeignEnvironment
from agentrl_envs.gsm8k.environment import Gsm8k
from podman_help import podman_service
from python_image import PYTHON_IMAGE, python_root

from agentrl.gateway.server import Gateway
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection
from agentrl.testing import check_environment
from agentrl.testing.agent import call
from agentrl.testing.play import Holder, Stage
from agentrl.training.run import train

TASKS = Path(__file__).parent.parent / "support" / "verifiers_tasks"


@pytest.fixture(scope="module")
def python(verifiers_venv: str) -> str:
    return f"{verifiers_venv}/bin/python"


def arguments(python: str, **config) -> dict:
    given = {"config": {"taskset": {"id": "echo_sums"}, **config}, "path": str(TASKS)}
    return {"python": python, "module": "verifiers", "args": given}


@asynccontextmanager
async def stage_of(args: dict):
    env, agent, gateway = ForeignEnvironment(**args), ForeignAgent(**args), Gateway()
    await gateway.start()
    try:
        yield env, Stage(env, holder=Holder(agent, AgentSection(name="foreign"), gateway))
    finally:
        await gateway.close()
        await agent.close()
        await env.close()


@pytest.mark.long
def test_the_contract_of_environments_holds(python):
    args = arguments(python)

    def right(task, messages):
        return f"It is {task.data['answer']}."

    env = ForeignEnvironment(**args)
    section = AgentSection(name="agentrl_envs.foreign.agent:ForeignAgent", args=args)
    check_environment(env, right, lambda task, messages: "No.", tasks=2, sessions=6, disjoint=False, agent=section)


async def test_every_run_of_a_seat_has_its_own_reward(python):
    async with stage_of(arguments(python, id="best-of-n", n=3)) as (env, stage):
        task = env.tasks("train")[0]
        answer = task.data["answer"]
        played = await stage.play(task, lambda _: [f"It is {answer}.", "It is 0.", "It is 1."])
    assert played.failure is None
    assert [turn.role for turn in played.turns] == ["agent", "agent-2", "agent-3"]
    assert all(turn.trained for turn in played.turns)
    assert played.seats == {"agent": 1.25, "agent-2": 0.25, "agent-3": 0.25}
    assert played.rewards["right"] == pytest.approx(1 / 3)
    assert played.extra["metrics"]["pass_at_n"] == 1.0


@pytest.mark.long
async def test_the_simulated_user_is_not_trained(python):
    async with stage_of(arguments(python, id="user-sim", user={"harness": {"id": "echo_sums"}})) as (env, stage):
        task = env.tasks("train")[0]
        answer = task.data["answer"]
        played = await stage.play(task, lambda _: ["How many pens?", f"It is {answer}.", "###DONE###"])
        broken = await stage.play(task, lambda _: ["How many pens?"])  # the model's side ends
    assert [(turn.role, turn.trained) for turn in played.turns] == [
        ("user", False), ("assistant", True), ("user", False),
    ]  # fmt: skip
    assert played.seats == {"assistant": 1.25}
    assert played.extra["metrics"]["user_turns"] == 2.0
    assert broken.failure is not None
    assert not broken.rewards


@pytest.mark.long
@pytest.mark.parametrize(("judging", "seen"), [("agentic-judge", 0.0), ("shared-agentic-judge", 1.0)])
async def test_the_judge_that_works_in_a_container_is_not_trained(python, judging, seen, monkeypatch):
    """It finds the solver's file where it works in the solver's container, and only there."""
    with podman_service(image=False) as podman:
        podman.run("import", "-", PYTHON_IMAGE, data=python_root())
        for name, value in podman.own_env.items():
            monkeypatch.setenv(name, value)
        solver = {"harness": {"id": "shell_agent"}, "runtime": {"type": "podman", "image": PYTHON_IMAGE}}
        judge = {"harness": {"id": "shell_agent"}}
        args = arguments(python, id=judging, solver=solver, judge=judge, score={"task_weight": 1.0})
        async with stage_of(args) as (env, stage):
            task = env.tasks("train")[0]
            answer = f"It is {task.data['answer']}."
            look = f"grep -q '{answer}' /tmp/trace.json && [ -e /app/notes ] && echo yes > /tmp/v || echo no > /tmp/v"
            verdict = json.dumps({"verdicts": [{"name": "solved", "reason": "I looked.", "verdict": "%s"}]})
            write = f"printf '{verdict}' $(cat /tmp/v) > /tmp/verdict.json"
            said = [
                call("bash", command="echo 1 > /app/notes"), answer,
                call("bash", command=look), call("bash", command=write), "Done.",
            ]  # fmt: skip
            played = await stage.play(task, lambda _: said)
            unwritten = await stage.play(task, lambda _: [answer, "I am content."])
        assert podman.containers() == []
    assert played.failure is None, played.failure
    assert [(turn.role, turn.trained) for turn in played.turns] == [("solver", True)] * 2 + [("judge", False)] * 3
    assert played.rewards == {"right": 1.0, "short": 0.25, "judge": seen}
    assert played.seats == {"solver": 1.25 + seen}
    assert unwritten.failure is not None
    assert "wrote no verdict" in unwritten.failure.message


@pytest.mark.long
def test_it_is_trained_with_its_tool_and_its_state(python, tmp_path):
    env = Gsm8k()
    rows = [env.tasks("train")[index].data for index in range(200)]
    lines = [json.dumps({"question": row["question"], "answer": row["answer"]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    args = arguments(python, taskset={"id": "calc_sums", "rows": str(tmp_path / "rows.jsonl")})
    recipe = Recipe.model_validate(
        {
            "model": {"path": "tiny"},
            "env": {"name": "agentrl_envs.foreign.environment:ForeignEnvironment", "args": args},
            "agent": {"name": "agentrl_envs.foreign.agent:ForeignAgent", "args": args},
            "rollout": {"tasks": 4, "n": 8, "max_tokens": 512, "max_turn_tokens": 64},
            "train": {"steps": 3, "lr": 2e-4},
            "eval": {"every": 0, "before": False, "tasks": 4},
            "output": str(tmp_path / "run"),
        }
    )
    train(recipe)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    taught = [row for row in steps if "mismatch/logprob_mean" in row]
    assert len(taught) == 3
    assert all(row["mismatch/logprob_max"] < 1e-3 for row in taught), "the tokens that are trained are those sampled"
    assert all(row["gateway/forks"] == row["rollout/failed"] == 0 for row in taught)
    assert all(row["metric/calls"] > 0.5 for row in taught), "its tool server counts in the rollout's state"
