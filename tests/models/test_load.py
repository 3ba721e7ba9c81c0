"""What cannot be loaded is said in one line."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from paths import ROOT
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import UserError
from agentrl.fine_tuning.new_model import train_tokenizer
from agentrl.learner.actor import off_policy_of
from agentrl.models import EMBEDDED, embedded_path
from agentrl.models.image_families import family_of
from agentrl.models.load import (
    find_device,
    load_model,
    load_scorer,
    load_skeleton,
    load_tokenizer,
    resolve,
    resolve_types,
)
from agentrl.models.shape import read_shape
from agentrl.models.streamed import stream_model
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import ModelSection
from agentrl.training.preflight import check_names

TINY = Qwen3Config(
    vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_missing_folder(path: str) -> None:
    with pytest.raises(UserError, match=r"is no folder; .* one that ships .*: tiny, tiny_vision, tiny_tools$"):
        resolve(path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        resolve(str(tmp_path))


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UserError, match=r"'vit', which is not a causal language model"):
        load_model(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava", "text_config": {"model_type": "qwen3"}, "vision_config": {"hidden_size": 8}},
        {"model_type": "gemma3", "text_config": {}, "vision_config": {"hidden_size": 8}},  # is a causal one, too
        {"model_type": "of_tomorrow", "image_token_id": 7},  # which transformers does not know either
    ],
    ids=lambda config: config["model_type"],
)
def test_a_model_that_sees_in_an_unknown_way_is_refused_wherever_it_is_loaded(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = ModelSection(path=str(tmp_path))
    line = (
        rf"model\.path: {tmp_path} is a '{config['model_type']}', which sees: of such models qwen2_vl, .*gemma4 are "
        r"known, .* \(docs/vision\.md, Training\)$"
    )
    for load in (load_model, load_skeleton, load_tokenizer, load_scorer, read_shape):
        with pytest.raises(UserError, match=line):
            load(section)


@pytest.mark.parametrize("kind", ["fuyu", "idefics3", "llama4", "glm4v_moe", "qwen2_5_omni_thinker"])
def test_types_that_see_are_told_from_those_that_read_text(kind: str) -> None:
    with pytest.raises(UserError, match="which sees"):
        family_of(AutoConfig.for_model(kind).to_dict(), "x")
    assert family_of(TINY.to_dict(), "x") is None
    assert family_of(AutoConfig.for_model("gemma3_text").to_dict(), "x") is None


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError, match=r"its weights cannot be loaded") as caught:
        load_model(ModelSection(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_weights_that_are_absent_are_not_drawn_at_random(tmp_path: Path) -> None:
    whole = Qwen3ForCausalLM(Qwen3Config.from_dict({**TINY.to_dict(), "tie_word_embeddings": False}))
    train_tokenizer([], 0, "<|im_end|>", 64).save_pretrained(tmp_path)
    whole.save_pretrained(tmp_path)
    load_model(ModelSection(path=str(tmp_path)))
    whole.model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no whole causal language model: it has no weights for lm_head\.weight$"):
        load_model(ModelSection(path=str(tmp_path)))
    backbone, _ = load_model(ModelSection(path=str(tmp_path)), headless=True)  # a critic has an output layer of its own
    assert torch.equal(backbone.model.norm.weight, whole.model.norm.weight)
    del (state := whole.model.state_dict())["layers.0.mlp.up_proj.weight"]
    whole.model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UserError, match=r"no weights for model\.layers\.0\.mlp\.up_proj\.weight$"):
        load_model(ModelSection(path=str(tmp_path)), headless=True)


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore lines")

    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", refuse)
    with pytest.raises(
        UserError, match=r"somebody/model: its configuration cannot be loaded \(a hub name needs the net"
    ):
        load_model(ModelSection(path="somebody/model"))


def test_a_chat_template_that_cannot_be_read(tmp_path: Path) -> None:
    Qwen3ForCausalLM(TINY).save_pretrained(tmp_path)
    train_tokenizer([], 0, "<|im_end|>", 64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.chat_template: nowhere\.jinja cannot be read"):
        load_model(ModelSection(path=str(tmp_path), chat_template="nowhere.jinja"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_and_template_are_those_of_the_recipe(tmp_path: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    Qwen3ForCausalLM(TINY).save_pretrained(tmp_path)
    train_tokenizer([], 0, "<|im_end|>", 64).save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("<|im_end|> own")
    model, tokenizer = load_model(
        ModelSection(path=str(tmp_path), dtype=dtype, chat_template=str(tmp_path / "own.jinja"))
    )
    assert next(model.parameters()).dtype == getattr(torch, dtype)
    assert not model.training
    assert tokenizer.chat_template == "<|im_end|> own"


@pytest.mark.parametrize(("name", "words"), [("gpu9", "gpu9"), ("cuda:7", "cuda:7")])
def test_a_device_that_is_not_there_is_one_line(name: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.device: {words} cannot be used here: [^\n]+$"):
        find_device(name)


def test_the_model_goes_to_its_device() -> None:
    model, _ = load_model(ModelSection(device="cpu"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("overrides", "gpu", "compute", "frozen"),
    [
        ([], False, "same", "float32"),
        ([], True, "bfloat16", "bfloat16"),
        (["model.device=cpu"], True, "same", "float32"),
        (["model.device=cuda:1"], False, "bfloat16", "bfloat16"),
        (["model.compute=same"], True, "same", "float32"),
        (["model.compute=bfloat16"], False, "bfloat16", "bfloat16"),
        (["model.dtype=bfloat16"], True, "same", "bfloat16"),
        (["model.dtype=bfloat16", "model.lora.rank=4"], True, "bfloat16", "bfloat16"),
        (["cluster.workers=2"], True, "same", "float32"),
        (["cluster.gpus=2"], False, "bfloat16", "bfloat16"),
    ],
)
def test_a_gpu_computes_in_bfloat16_unless_told_otherwise(
    overrides: list[str], gpu: bool, compute: str, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    recipe = resolve_types(Recipe.load("gsm8k_tool", overrides))
    assert recipe.model.compute == compute
    assert resolve_types(recipe) == recipe
    assert recipe.model.frozen.dtype == frozen
    apart = compute == "bfloat16" and (recipe.model.dtype == "float32" or recipe.model.lora is not None)
    assert off_policy_of(recipe) == ("token_tis" if apart else "none")


SCALED = {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}


def test_settings_of_the_model_are_replaced_and_kept(tmp_path: Path) -> None:
    plain, scaled = (load_model(ModelSection(config=config))[0] for config in ({}, SCALED))
    assert scaled.config.max_position_embeddings == 4096
    assert scaled.config.rope_parameters == {**plain.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq * 4, plain.model.rotary_emb.inv_freq)
    scaled.save_pretrained(tmp_path)
    assert Qwen3Config.from_pretrained(tmp_path).rope_parameters["factor"] == 4.0
    streamed = stream_model(ModelSection(config=SCALED))[0]
    assert streamed.config.rope_parameters == scaled.config.rope_parameters
    assert streamed.config.max_position_embeddings == 4096
    with pytest.raises(
        UserError, match=r"model\.config: a 'qwen3' has no 'rope_params'; did you mean 'rope_parameters'"
    ):
        load_model(ModelSection(config={"rope_params": {}}))
    with pytest.raises(UserError, match=r"model\.path: tiny: its weights cannot be loaded"):
        load_model(ModelSection(config={"hidden_size": 12}))


def test_servers_must_be_told_the_settings_too() -> None:
    recipe = {"model": {"config": SCALED}, "engine": {"name": "vllm"}}
    with pytest.raises(UserError, match=r"model\.config: servers read .* vLLM: hf-overrides"):
        check_names(Recipe.model_validate(recipe))
    check_names(
        Recipe.model_validate({**recipe, "engine": {"name": "vllm", "args": {"flags": {"hf-overrides": "{}"}}}})
    )


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_model_reads_a_tool_whose_schema_has_no_properties(name: str) -> None:
    tool = {"name": "ping", "description": "Ping it.", "parameters": {"type": "object"}}
    _, tokenizer = load_model(ModelSection(path=name))
    asked = [{"role": "user", "content": "Ping!"}]
    said = tokenizer.apply_chat_template(asked, tools=[{"type": "function", "function": tool}], tokenize=False)
    assert "ping" in said


@pytest.mark.parametrize("name", ["tiny_vision", "tiny_tools"])
def test_an_embedded_model_is_what_its_recipe_makes(name: str) -> None:
    made = load_recipe(str(ROOT / "recipes" / f"{name}.yaml")).sft.new_model
    model, tokenizer = load_model(ModelSection(path=name))
    assert tokenizer.chat_template.strip() == Path(made.chat_template).read_text(encoding="utf-8").strip()
    text = model.config.get_text_config()
    known = {**text.to_dict(), "rope_theta": text.rope_parameters["rope_theta"]}
    assert {key: known[key] for key in made.config} == made.config
    assert (made.vision is None) == (tokenizer.image_input is None) == (name == "tiny_tools")
    if made.vision is not None:
        seeing = model.config.vision_config.to_dict()
        assert {key: seeing[key] for key in made.vision} == made.vision
    assert sum(file.stat().st_size for file in embedded_path(name).iterdir()) < 6e6
