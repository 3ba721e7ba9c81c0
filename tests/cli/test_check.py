"""`agentrl check`: an opening with images is checked by the recipe's own limits."""

from pathlib import Path

import pytest
from agentrl_envs.harbor.environment import Harbor
from train_help import write_lines
from vision_help import file_of, picture

from agentrl.cli.main import BAD_USAGE, run
from agentrl.errors import UserError
from agentrl.images import STORE
from agentrl.models import never_seen
from agentrl.recipe.load import load_recipe
from agentrl.training.preflight import check_run

RECIPE = """
model: {path: tiny_vision}
env:
  name: dataset
  source: SOURCE
  args: {reward: none}
rollout: {max_tokens: 900}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(STORE, "limits", STORE.limits)
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", [{"prompt": "<image><image>?", "images": ["a.png", "a.png"]}])
    (tmp_path / "a.png").write_bytes(file_of(picture(0, 48, 48)))
    (tmp_path / "r.yaml").write_text(RECIPE.replace("SOURCE", str(tmp_path)), encoding="utf-8")
    return str(tmp_path / "r.yaml")


def test_images_of_the_first_prompt_are_counted(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", recipe]) == 0
    said = capsys.readouterr().out
    assert "18 of them of images; rollout.max_tokens is 900" in said
    assert "an image takes 9 tokens" in said


def test_the_provider_is_asked_before_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    text = f"env: {{name: harbor, source: {Harbor.example['source']}, args: {{held_out: 0.0}}}}\n"
    path.write_text(f"{text}eval: {{splits: []}}\n")
    for change, why in (("workspace=bwrap", "cannot do: build"), ("train.steps=1", "the recipe has none")):
        assert run(["check", str(path), change]) == BAD_USAGE
        assert why in capsys.readouterr().err
        with pytest.raises(UserError, match=why):
            check_run(load_recipe(str(path), [change]))


def test_an_environment_that_an_agent_does_not_ask_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "text_game", "agent=agentrl_tools.agents:chat_completions"]) == 0
    assert "not asked with agent: execute of text_game: " in capsys.readouterr().out


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_is_advised_against_where_the_cpu_has_none(
    has: bool, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.models.dense.cpu_has_bfloat16", lambda: has)
    for change in ("model.dtype=bfloat16", "model.compute=bfloat16", "model.dtype=float32"):
        assert run(["check", recipe, change, "model.device=cpu"]) == 0
        advised = "advice: this CPU has no products in bfloat16" in capsys.readouterr().out
        assert advised == (not has and "bfloat16" in change)


def test_what_a_run_warns_of_before_its_first_step_is_said(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for change in ("algorithm=kl_cov", "algorithm=dapo"):
        assert run(["check", recipe, change]) == 0
        said.append("warning: algorithm.loss 'kl_cov' pulls tokens back" in capsys.readouterr().out)
    assert said == [True, False]


@pytest.mark.parametrize(
    ("model", "tools", "own_format", "words"),
    [
        ("tiny", ["calculator"], False, None),
        ("tiny", ["lend"], False, "tiny has never seen the tool lend: it learned to call calculator alone"),
        ("tiny", ["lend", "calculator", "buy"], True, "never seen the tools buy, lend and a chat format of its own"),
        ("tiny_vision", ["move", "pick_up"], False, None),
        ("tiny_tools", ["lend", "buy"], False, None),
        ("tiny_tools", ["lend"], True, "tiny_tools has never seen a chat format of its own (model.chat, "),
        ("some/model", ["lend"], True, None),
    ],
)
def test_what_an_embedded_model_has_never_seen_is_said(
    model: str, tools: list[str], own_format: bool, words: str | None
) -> None:
    said = never_seen(model, tools, own_format)
    assert said is None if words is None else words in (said or "")


@pytest.mark.slow
def test_check_warns_of_tools_that_the_embedded_model_has_never_seen(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for recipe in ("gsm8k_tool", "code_tool"):
        assert run(["check", recipe]) == 0
        said.append("warning: the embedded model tiny has never seen the tool" in capsys.readouterr().out)
    assert said == [False, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("rollout.max_image_pixels=100", "it has 48 x 48 pixels; at most 100 are allowed (rollout.max_image_pixels)"),
        ("rollout.max_image_bytes=100", "its file is larger than 100 bytes (rollout.max_image_bytes)"),
        ("rollout.max_images=1", "the messages hold 2 images, of 1 (rollout.max_images)"),
    ],
)
def test_what_a_run_would_not_show_is_an_error(
    change: str, why: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", recipe, change]) == BAD_USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith(why)
