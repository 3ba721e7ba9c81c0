"""The recipe of `code`, short: a warm start, then training and evaluation with the interpreter and the hidden tests."""

from pathlib import Path

import pytest
from cli_help import quiet
from paths import RECIPES
from train_help import metrics, records

import agentrl
from agentrl.fine_tuning.run import sft
from agentrl.recipe.load import load_recipe

RECIPE = RECIPES / "code_tool.yaml"
SHORT = [
    "sft.stages=[{style: clean, steps: 2, batch: 2, lr: 1e-3, warmup: 0},"
    "{style: careless, steps: 1, batch: 2, lr: 1e-3}]",
    "train.steps=2", "train.threads=1", "eval.tasks=2", "eval.splits=[test]", "rollout.tasks=2", "rollout.n=2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_the_recipe_warm_starts_trains_and_evaluates(tmp_path: Path) -> None:
    warm = load_recipe(RECIPE, [*SHORT, f"output={tmp_path / 'sft'}"])
    made = sft(warm, str(tmp_path / "coder"), console=quiet())
    assert made.steps == 3
    result = agentrl.train(load_recipe(RECIPE, [*SHORT, f"model.path={made.folder}", f"output={tmp_path / 'run'}"]))
    assert set(result.after) == {"test"}
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all({"reward/passed", "reward/fraction", "reward/format"} <= set(row) for row in rows[1:])
    played = records(result.folder, "step_2")
    assert len(played) == 4
    assert all(t["failure"] is None for t in played)
