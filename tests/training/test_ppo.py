"""A whole run with a critic and a reward model: what it writes down, resumes, evaluates and refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_help import metrics, numbers, records, small
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.models import embedded_path
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.training.run import TrainResult, resume_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For the embedded model's tokens; its scores are far apart."""
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(embedded_path())
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "num_labels": 1, "initializer_range": 0.3, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    Qwen3ForSequenceClassification(Qwen3Config(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_recipe(classifier: str, output: Path, **changes: Any) -> Recipe:
    return small(
        output,
        algorithm={"advantage": {"name": "gae", "args": {"lam": 0.95}}, "loss": "gspo"},
        critic={"lr": 1e-3, "warmup_steps": 1},
        rewards={"model": classifier, "weights": {"model": 0.1}},
        train__steps=2,
        train__mini_batches=2,
        **changes,
    )


@pytest.fixture(scope="module")
def run(classifier: str, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return agentrl.train(make_recipe(classifier, tmp_path_factory.mktemp("ppo") / "run"))


def test_scores_are_a_part_of_the_reward(run: TrainResult) -> None:
    for row in metrics(run.folder)[1:]:
        played = records(run.folder, f"step_{row['step']}")
        scores = [one["rewards"]["model"] for one in played]
        assert row["reward/model"] == pytest.approx(sum(scores) / len(scores), rel=1e-4)
        assert len(set(scores)) > 2
        for one in played:
            others = sum(value for part, value in one["rewards"].items() if part != "model")
            assert one["reward"] == pytest.approx(others + 0.1 * one["rewards"]["model"], abs=1e-5)


def test_the_reward_model_is_measured_over_its_own_calls(run: TrainResult) -> None:
    for row in metrics(run.folder)[1:]:
        assert 0 < row["time/reward_model_s"] < row["time/step_s"]
        assert row["reward_model/mfu"] > 0


def test_the_critic_learns_alone_first(run: TrainResult) -> None:
    _, first, second = metrics(run.folder)
    assert first["train/updates"] == 0
    assert second["train/updates"] == 2
    for row in (first, second):
        assert row["critic/grad_norm"] > 0
        assert row["critic/lr"] == 1e-3
        assert 0 <= row["critic/clip_fraction"] <= 1
    assert second["critic/value_mean"] != 0
    assert 0 <= second["train/clip_fraction"] <= 1


def test_a_resumed_run_is_the_run(run: TrainResult, classifier: str, tmp_path: Path) -> None:
    recipe = make_recipe(classifier, tmp_path / "run")
    half = agentrl.train(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})}))
    resume_run(str(half.folder), overrides=["train.steps=2"])
    assert numbers(metrics(half.folder)[-1]) == pytest.approx(numbers(metrics(run.folder)[-1]), rel=1e-4, abs=1e-5)


def test_an_evaluation_asks_the_reward_model_where_it_can(run: TrainResult, classifier: str, tmp_path: Path) -> None:
    recipe = make_recipe(classifier, tmp_path / "run")
    rewards = recipe.rewards.model_copy(update={"model": None})
    without = agentrl.evaluate(recipe.model_copy(update={"rewards": rewards}))
    asked = agentrl.evaluate(recipe)
    assert asked["test"].accuracy == without["test"].accuracy
    assert asked["test"].reward != without["test"].reward
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    given = ["eval", str(tmp_path / "recipe.yaml"), "--no-keep", "--json", str(tmp_path / "found.json")]
    assert main.run(given) == 0
    assert f'"reward": {asked["test"].reward}'[:15] in (tmp_path / "found.json").read_text()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"algorithm__advantage": "gae"}, "needs a critic, and the recipe has none: add `critic: {}`"),
        ({"critic": {}}, "critic: algorithm.advantage 'grpo' uses no critic"),
        ({"rewards__model": "./nowhere"}, "rewards.model: ./nowhere is not a folder"),
    ],
)
def test_what_does_not_go_together_is_said_before_a_model_is_loaded(
    changes: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.training.setup.Player", None)
    with pytest.raises(UserError) as raised:
        agentrl.train(small(tmp_path / "run", **changes))
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_two_that_fill_the_part_are_refused(classifier: str, tmp_path: Path) -> None:
    functions = [{"name": "relative_length", "part": "model"}]
    with pytest.raises(UserError, match=r"rewards\.functions: one of them fills the part 'model'"):
        agentrl.train(small(tmp_path / "run", rewards={"model": classifier, "functions": functions}))
