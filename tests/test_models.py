"""What cannot be loaded is said in one line."""

import json
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.models.load import load_model, resolve
from agentrl.recipe.schema import ModelSection


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_missing_folder(path: str) -> None:
    with pytest.raises(UserError, match=r"is no folder; give an existing one, a hub name, or 'tiny'"):
        resolve(path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        resolve(str(tmp_path))


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UserError, match=r"'vit', which is not a causal language model"):
        load_model(ModelSection(path=str(tmp_path)))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError, match=r"its weights cannot be loaded") as caught:
        load_model(ModelSection(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore lines")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    with pytest.raises(
        UserError, match=r"somebody/model: its configuration cannot be loaded \(a hub name needs the net"
    ):
        load_model(ModelSection(path="somebody/model"))
