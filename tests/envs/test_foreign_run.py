"""The recipes of other people's environments, from the warm start to the last step: a few, and by hand all of them."""

import pytest
from paths import RECIPES
from train_help import metrics

import agentrl
from agentrl.recipe.load import load_recipe
from agentrl.training.run import TrainResult

SMALL = [
    "sft.new_model.config.num_hidden_layers=1", "sft.new_model.texts=40", "rollout.tasks=2", "rollout.n=4",
    "train.steps=2", "train.save_every=0", "train.threads=1", "eval.every=0", "eval.tasks=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what is taught is kept there


def trained(name: str, venv: str, folder, *changes: str) -> TrainResult:
    keys = [f"env.args.python={venv}/bin/python", f"output={folder / 'run'}", *changes]
    return agentrl.train(load_recipe(str(RECIPES / f"{name}.yaml"), keys))


@pytest.mark.slow
@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("textarena", "random"),
        pytest.param("reasoning_gym", "stored", marks=pytest.mark.long),
        pytest.param("miniwob", "random", marks=pytest.mark.long),
    ],
)
def test_a_recipe_runs_from_its_warm_start_to_its_last_step(environments_venv, tmp_path, name, style):
    stages = f"sft.stages=[{{style: {style}, steps: 12, batch: 4, lr: 4e-3, muon_lr: 0.02, warmup: 2}}]"
    result = trained(name, environments_venv, tmp_path, *SMALL, stages)
    assert set(result.before) == set(result.after) == {"test"}
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert not any(row.get("rollout/failed", 0) for row in rows)


@pytest.mark.long
@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(("name", "gain"), [("reasoning_gym", 0.15), ("textarena", 0.15), ("miniwob", 0.15)])
def test_a_recipe_learns(environments_venv, tmp_path, name, gain):
    """docs/environments.md has what was seen."""
    result = trained(name, environments_venv, tmp_path)
    assert result.after["test"] > result.before["test"] + gain
