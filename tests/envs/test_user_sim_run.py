"""The recipe of `user_sim`, short: a warm start of the embedded model, then two steps of training on what it made."""

import asyncio
from pathlib import Path
from random import Random

import pytest
from agentrl_envs.user_sim.environment import UserSim
from cli_help import quiet
from paths import RECIPES
from train_help import metrics, records

import agentrl
from agentrl.chat.encode import Encoder
from agentrl.chat.load import load_chat
from agentrl.chat.template import Template
from agentrl.fine_tuning.demonstrations import Demonstrator
from agentrl.fine_tuning.run import sft
from agentrl.models.load import load_model
from agentrl.recipe.load import load_recipe
from agentrl.recipe.sections.model import ModelSection

RECIPE = RECIPES / "user_sim.yaml"
SHORT = [
    "sft.stages=[{style: clean, steps: 6, batch: 4, lr: 2e-3, warmup: 0},"
    "{style: careless, steps: 1, batch: 4, lr: 1e-3}]",
    "train.steps=2", "train.threads=1", "eval.tasks=4", "rollout.tasks=2", "rollout.n=4",
]  # fmt: skip


@pytest.mark.slow
def test_the_recipe_warm_starts_trains_and_evaluates(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, [*SHORT, f"output={tmp_path / 'sft'}"])
    made = sft(recipe, str(tmp_path / "clerk"), console=quiet())
    assert made.steps == 7
    result = agentrl.train(load_recipe(RECIPE, [*SHORT, f"model.path={made.folder}", f"output={tmp_path / 'run'}"]))
    assert set(result.after) == {"test", "wording"}
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all({"reward/answer", "reward/questions", "stop/env_done"} <= set(row) for row in rows[1:])
    played = records(result.folder, "step_2")
    assert len(played) == 8
    said = [[m["role"] for m in t["messages"]] for t in played]
    assert any("user" in roles[2:] for roles in said), "the customer never spoke between turns"


def test_tasks_with_and_without_the_tool_are_demonstrated_side_by_side() -> None:
    _, tokenizer = load_model(ModelSection())
    env = UserSim()
    schemas = [tool.schema for tool in env.tools()]
    chat = load_chat(tokenizer, model_path="", kind="bridge", tools=schemas)
    template = Template(tokenizer, None, schemas)
    demonstrator = Demonstrator(env, [], chat, template, Encoder(tokenizer, template.source))
    tasks = env.tasks("train")[:40]
    assert {task.data["looks_up"] for task in tasks} == {True, False}
    for task in tasks:
        made = asyncio.run(demonstrator.trajectory(task, Random(task.id), "clean"))
        offered = demonstrator.schemas(task)
        text = tokenizer.apply_chat_template(list(made.messages), tools=offered or None, tokenize=False)
        assert tokenizer.decode(made.ids) + "\n" == text
