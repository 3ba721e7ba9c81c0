"""A model read one tensor at a time has the bits of the model that is loaded whole; what cannot be is not streamed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.distributed.fsdp.scatter import open_source
from agentrl.errors import UserError
from agentrl.models import embedded_path
from agentrl.models.load import load_model
from agentrl.models.streamed import NotStreamed, Read, stream, stream_model
from agentrl.recipe.sections.model import LoraSection, ModelSection

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),  # type: ignore[arg-type]
    "gemma": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16)),
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16)
    ),
}
STORED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("tied", {}, {}),
    "untied, in bfloat16": ("untied", {}, {"dtype": "bfloat16"}),
    "several files": ("untied", {"max_shard_size": "20KB"}, {}),
    "backbone alone": ("gpt2", {}, {}),
    "gemma": ("gemma", {}, {}),
    "an adapter": ("untied", {}, {"lora": LoraSection(rank=4)}),
}
"""The model, how it is saved, and what a recipe says of it."""


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def saved(model: Any, **options: Any) -> Path:
        folder = tmp_path / "model"
        model.save_pretrained(folder, **options)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded_path() / file, folder)
        return folder

    return saved


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def section_of(folder: Path | str, **changes: Any) -> ModelSection:
    return ModelSection(path=str(folder), device="cpu", **changes)


def same(found: nn.Module, read: Read, wanted: nn.Module) -> None:
    """Parameters and buffers by name, type and bits; and what is one tensor here is one there."""
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = (dict(getattr(m, kind)()) for m in (found, wanted))
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            value = read(mine[name])
            assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(value, tensor), name
            assert mine[name].requires_grad == tensor.requires_grad, name


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", STORED)
def test_the_bits_are_those_of_the_whole_model(name: str, save: Callable[..., Path]) -> None:
    model, options, changes = STORED[name]
    made = make(model)
    made.generation_config.max_length = 77
    section = section_of(save(made.transformer if name == "backbone alone" else made, **options), **changes)
    found, read = stream_model(section, seed=3)
    wanted = load_model(section, 3)[0]
    same(found, read, wanted)
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert not found.training


def test_what_is_stored_in_another_type_is_cast_alike(save: Callable[..., Path]) -> None:
    section = section_of(save(make("tied").bfloat16()))
    same(*stream_model(section), load_model(section)[0])


def test_the_embedded_model_and_one_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name is looked for where the hub's own library keeps what it fetched."""
    from huggingface_hub import constants

    same(*stream_model(section_of("tiny")), load_model(section_of("tiny"))[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--somebody--tiny"
    shutil.copytree(embedded_path(), kept / "snapshots" / "abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    section = section_of("somebody/tiny")
    same(*stream_model(section), load_model(section)[0])


def test_a_weight_takes_no_memory_until_it_is_read_and_none_afterwards(save: Callable[..., Path]) -> None:
    model, read = stream_model(section_of(save(make("untied"))))
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert max(held.values()) == 4  # one number each
    parameter = model.model.embed_tokens.weight
    assert read(parameter).untyped_storage().data_ptr() not in held
    assert read(parameter).data_ptr() != parameter.data_ptr()


def test_an_absent_output_layer_is_no_matter_where_it_is_not_read(save: Callable[..., Path]) -> None:
    section = section_of(save(make("untied").model))
    model, read = stream_model(section, headless=True)
    same(model.model, read, load_model(section, headless=True)[0].model)
    with pytest.raises(NotStreamed, match=r"the files lack lm_head\.weight"):
        stream_model(section)


def test_a_classifier_brings_its_own_output_layer(save: Callable[..., Path]) -> None:
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(Qwen2Config(**SMALL, num_labels=1, pad_token_id=0))
    folder = save(model)
    found, read = stream(type(model), str(folder), section_of(folder))
    same(found, read, model)


def double_the_output_layer(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")


def lose_a_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere.safetensors")


def cut_the_file(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))


@pytest.mark.parametrize(
    ("model", "change", "why"),
    [
        ("experts", lambda folder: None, r"makes its weights of those in the files \(stack\)"),
        ("tied", double_the_output_layer, r"makes its weights of those in the files \(equal\)"),
        ("tied", lose_a_file, "no safetensors file"),
        ("tied", cut_the_file, "SafetensorError"),
        ("tied", widen, "RuntimeError"),
    ],
)
def test_what_does_not_match_one_to_one_is_not_streamed(
    model: str, change: Callable[[Path], None], why: str, save: Callable[..., Path]
) -> None:
    folder = save(make(model))
    change(folder)
    with pytest.raises(NotStreamed, match=why):
        stream_model(section_of(folder))


def test_then_it_is_read_whole_with_a_note(save: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    section = section_of(save(make("experts")))
    source = open_source(lambda: stream_model(section), lambda: load_model(section)[0])
    same(source.model, source.read, load_model(section)[0])
    assert source.note.startswith("read whole by the first (transformers makes its weights")
    assert source.note in caplog.text


def test_a_file_that_goes_away_is_named(save: Callable[..., Path]) -> None:
    folder = save(make("tied"))
    model, read = stream_model(section_of(folder))
    lose_a_file(folder)
    with pytest.raises(UserError, match=r"model\.safetensors: model\.embed_tokens\.weight cannot be read"):
        read(model.lm_head.weight)
