"""What a recipe needs is said from a model's configuration alone."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Config

from agentrl.cli.main import run
from agentrl.models import embedded_path
from agentrl.models.load import load_model
from agentrl.models.memory import plan_memory
from agentrl.recipe.schema import Recipe

SMALL = Qwen2Config(  # Qwen2.5-0.5B's shapes
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
PARAMETERS = 494_032_768  # as its card says: 0.49 B


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with those shapes and a tokenizer, and no weights."""
    AutoTokenizer.from_pretrained(embedded_path()).save_pretrained(tmp_path / "qwen")
    SMALL.save_pretrained(tmp_path / "qwen")
    return tmp_path / "qwen"


def test_parameters_are_counted_without_loading_them(folder: Path) -> None:
    recipe = Recipe.model_validate({"model": {"path": str(folder), "dtype": "bfloat16"}})
    plan = plan_memory(recipe)
    assert plan is not None
    assert plan.parameters == PARAMETERS
    assert (plan.weights, plan.gradients, plan.optimizer) == (2 * PARAMETERS, 2 * PARAMETERS, 12 * PARAMETERS)
    assert plan.reference == 0
    assert plan.cache_token == 2 * 24 * 2 * 64 * 2


def test_the_embedded_model_is_counted_right() -> None:
    plan = plan_memory(Recipe.model_validate({"algorithm": {"kl_coef": 0.1}}))
    assert plan is not None
    model, _ = load_model(Recipe().model)
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.reference == plan.weights == 4 * plan.parameters
    assert plan.optimizer == 8 * plan.parameters


def test_a_model_that_is_not_here_has_no_plan() -> None:
    assert plan_memory(Recipe.model_validate({"model": {"path": "nobody/nothing-7B"}})) is None


@pytest.mark.parametrize(("name", "size"), [("1gpu", "0.5B"), ("8gpu", "3B")])
def test_the_gpu_recipes_say_what_they_need_and_what_is_missing(
    folder: Path, name: str, size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTRL_SGLANG_VENV", raising=False)
    recipe = f"recipes/gsm8k_tool_{name}.yaml"
    assert size in Path(recipe).read_text()
    assert run(["check", recipe, f"model.path={folder}", "env.source=generated", "model.device=cuda:99"]) == 0
    said = capsys.readouterr().out
    assert "494.0 M parameters" in said
    assert "optimizer       5.9 GB" in said
    assert "reference" in said
    assert "missing: model.device: cuda:99 cannot be used here" in said
    assert "missing: engine sglang: say where servers run" in said
