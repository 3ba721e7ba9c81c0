"""The recipe of `terminal_tasks`, short: a warm start, then training in workspaces."""

import re
from pathlib import Path
from typing import Any

import pytest
from paths import RECIPES
from train_help import metrics, records

import agentrl
from agentrl.recipe.load import load_recipe
from agentrl.training.run import resume_run

RECIPE = RECIPES / "terminal.yaml"
SHORT = [
    "sft.new_model.config.num_hidden_layers=1", "sft.new_model.texts=100",
    "sft.stages=[{style: clean, steps: 40, batch: 8, lr: 4e-3, muon_lr: 0.02, warmup: 2}]",
    "rollout.tasks=2", "rollout.n=4", "train.steps=2", "train.threads=1", "eval.tasks=4",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_the_recipe_runs_from_its_warm_start_to_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = agentrl.train(load_recipe(RECIPE, [*SHORT, f"output={tmp_path / 'run'}"]))
    assert not result.untaught, "nothing is known of a model before it is made"
    assert set(result.after) == {"test"}
    assert [row["step"] for row in metrics(result.folder)] == [0, 1, 2]
    played = records(result.folder, "step_2")
    assert len(played) == 8
    assert all(t["failure"] is None for t in played)
    assert all(t["rewards"]["passed"] <= t["rewards"]["fraction"] for t in played)


@pytest.mark.long
@pytest.mark.usefixtures("bubblewrap")
def test_it_goes_on_with_the_tasks_that_it_would_have_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = agentrl.train(load_recipe(RECIPE, [*SHORT, f"output={tmp_path / 'run'}"]))
    half = [*SHORT, f"output={tmp_path / 'half'}", "train.steps=1", "train.save_every=1"]
    stopped = agentrl.train(load_recipe(RECIPE, half))
    resumed = resume_run(str(stopped.folder), overrides=["train.steps=2"])
    # A shell's answer may hold the time of day or a process's number, so later turns may differ. What a rollout starts
    # from and the first turn that the weights give it must not.
    first, second = (records(run.folder, "step_2") for run in (whole, resumed))
    assert [begun(t) for t in second] == [begun(t) for t in first]


def begun(record: dict[str, Any]) -> tuple[Any, ...]:
    first = next(message for message in record["messages"] if message["role"] == "assistant")
    return record["task"], record["sample"], record["seed"], first


def test_the_recipes_comment_gives_commands_that_it_obeys() -> None:
    commands = re.findall(r"^#  +agentrl (\w+) (\S+)", RECIPE.read_text(), re.M)
    assert commands == [("train", "recipes/terminal.yaml")]
    assert load_recipe(RECIPE).new_model is not None
