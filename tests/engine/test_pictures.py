"""Images through engines that are not the embedded one, whose tokens and log-probs are those that each must give."""

import asyncio
import copy
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from processes import eventually
from sglang_help import STAND_INS
from vision_help import TEMPLATE, picture, prompt, template

from agentrl.engine.base import EngineError, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers.answer import Features
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.sglang.kind import SglangEngine, SglangKind
from agentrl.engine.transformers import TransformersEngine
from agentrl.engine.vllm.kind import VllmEngine, VllmKind
from agentrl.errors import UserError
from agentrl.fine_tuning.new_model import bare_tokenizer, new_model
from agentrl.images import STORE, runs
from agentrl.models.image_families import FAMILIES
from agentrl.models.lora import adapter_parameters, add_adapter
from agentrl.models.vision import Vision
from agentrl.recipe.sections.model import LoraSection
from agentrl.recipe.sections.sft import NewModel

SHAPE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2}


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """A model that sees, of sizes that servers on a CPU take, and its tokenizer."""
    torch.set_num_threads(1)
    tokenizer = bare_tokenizer(template())
    section = NewModel(config=SHAPE, vision=TOWER, vocabulary=512, chat_template=str(TEMPLATE))
    model = new_model(section, tokenizer, seed=0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 3
    return model, tokenizer


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 250, count).tolist()


def prompts(model: Any) -> list[list[int]]:
    """Text, and images: two that differ in pixels alone, several of other sizes, one twice."""
    many = (text(3, 4), picture(1), text(4, 5), picture(2, 48, 64), text(5, 3), picture(1), text(6, 2))
    made = ((text(1, 20),), *((text(1, 8), picture(i), text(2, 9)) for i in (1, 2)), many, (picture(3, 45, 70), [11]))
    return [prompt(model, *one).tolist() for one in made]


def logprobs_of(model: Any, ids: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = Vision(model).logits(np.array(ids + sampled)).float() / temperature
    rows = torch.log_softmax(logits[len(ids) - 1 : -1], -1)
    return rows.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def test_sglang_is_given_one_placeholder_an_image(parts: Any) -> None:
    pictures, keyed = Pictures(parts[0].image_input), prompts(parts[0])[3]
    body = SglangKind().pictured(keyed, pictures, Features())
    placeholder = pictures.input.placeholder
    assert [i for i in body["input_ids"] if i != placeholder] == [i for i in keyed if i >= 0]
    assert body["input_ids"].count(placeholder) == len(body["image_data"]) == 3
    assert [STORE.put(url) for url in body["image_data"]] == [STORE.of_key(run.key) for run in runs(np.array(keyed))]
    (resized,) = SglangKind().pictured(prompts(parts[0])[4], pictures, Features())["image_data"]
    key = STORE.put(picture(3, 45, 70))
    assert STORE.load(STORE.put(resized)).size == (48, 64)
    assert np.array_equal(pictures.input.raw(STORE.put(resized))[0], pictures.input.raw(key)[0])
    with pytest.raises(EngineError, match="sampled the placeholder"):
        SglangKind().pictured([*keyed, placeholder], pictures, Features())


@pytest.mark.parametrize("raw", [True, False])
def test_vllm_is_told_where_images_stand(parts: Any, raw: bool) -> None:
    pictures, keyed = Pictures(parts[0].image_input), prompts(parts[0])[3]
    placeholder = pictures.input.placeholder
    body = VllmKind().pictured([*keyed, placeholder], pictures, Features(raw_pixels=raw))
    assert body["token_ids"] == [placeholder if i < 0 else i for i in keyed] + [placeholder]
    found, told = runs(np.array(keyed)), {name: value["image"] for name, value in body["features"].items()}
    assert told["mm_placeholders"] == [{"offset": run.start, "length": run.end - run.start} for run in found]
    assert told["mm_hashes"] == [STORE.of_key(run.key) for run in found]
    for key, item in zip(told["mm_hashes"], told["kwargs_data"], strict=True):
        fields = msgpack.unpackb(b64decode(item))
        kind, shape, data = fields["pixel_values"]["data"]
        pixels, grid = pictures.input.pixels(key)
        assert (kind, tuple(shape)) == ("uint8" if raw else "float32", pixels.shape)
        assert fields["pixel_values"]["field"][1]["slices"] == [[0, len(pixels), None]]
        given = np.frombuffer(data.data, kind).reshape(shape)
        if raw:
            mean, std = (np.repeat(getattr(pictures.input.processor, name), len(pixels[0]) // 3) for name in
                         ("image_mean", "image_std"))  # fmt: skip
            given = (given / 255 - mean) / std
        assert np.abs(given - pixels).max() < 1e-5
        assert np.frombuffer(fields["image_grid_thw"]["data"][2].data, np.int64).tolist() == list(grid)


def test_a_cut_image_is_refused(parts: Any) -> None:
    keyed = prompts(parts[0])[1]
    cut = keyed[: next(i for i, token in enumerate(keyed) if token < 0) + 2]
    with pytest.raises(EngineError, match="only in part"):
        SglangKind().pictured(cut, Pictures(parts[0].image_input), Features())


@pytest.mark.parametrize("kind", ["gemma4", "qwen3_5"])
def test_servers_are_not_given_images_of_models_that_they_were_not_proven_with(parts: Any, kind: str) -> None:
    with pytest.raises(UserError, match=r"servers are not given the images of a \w+ model .* use engine\.name=local"):
        Pictures(replace(parts[0].image_input, family=FAMILIES[kind]))


def test_servers_that_keep_features_are_not_trained_with(parts: Any) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(UserError, match="leave urls out, or leave the vision tower as it is"):
        SglangEngine(parts[0], max_batch=1, urls=url)
    frozen = copy.deepcopy(parts[0])
    frozen.model.visual.requires_grad_(False)
    assert SglangEngine(frozen, max_batch=1, urls=url).images
    assert VllmEngine(parts[0], max_batch=1, urls=url).images


async def test_transformers_sees(parts: Any) -> None:
    model = parts[0]
    engine, own, given = TransformersEngine(model, max_batch=4), LocalEngine(model, max_batch=4), prompts(model)
    greedy = Sampling(6, temperature=0.0)
    theirs, ours = [
        await asyncio.gather(*(e.generate(ids, greedy, f"{i}") for i, ids in enumerate(given))) for e in (engine, own)
    ]
    for a, b in zip(theirs, ours, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    with pytest.raises(EngineError, match="sampled the placeholder"):
        await engine.generate([*given[1], model.image_input.placeholder], greedy, "s")
    await engine.close()
    await own.close()


@pytest.fixture(scope="module")
def folder(parts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("seeing")
    for part in (*parts, parts[0].image_input.processor):
        part.save_pretrained(place)
    return place


async def _check(engine: Any, model: Any, own: LocalEngine) -> None:
    """Greedy tokens are those of the embedded engine, one after the other and at once, and log-probs the trainer's."""
    greedy, given = Sampling(16, temperature=0.0), prompts(model)
    for number, ids in enumerate(given):
        theirs, ours = [await e.generate(ids, greedy, f"g{number}") for e in (engine, own)]
        assert theirs.ids == ours.ids
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
    hot = Sampling(16, temperature=1.2)
    made = await asyncio.gather(*(engine.generate(ids, hot, f"h{i}") for i, ids in enumerate(given * 2)))
    for ids, one in zip(given * 2, made, strict=True):
        assert one.logprobs == pytest.approx(logprobs_of(model, ids, one.ids, 1.2), abs=1e-4)


async def _check_turns(engine: Any, model: Any) -> None:
    """A conversation whose second turn follows a tool's image, and which was aborted in the first."""
    ids = prompts(model)[1]
    told: list[int] = []
    running = asyncio.create_task(engine.generate(ids, Sampling(600), "turns", told.extend))
    await eventually(lambda: len(told) > 0)
    engine.abort("turns")
    first = await running
    assert first.finish is GenerationFinish.ABORT
    assert 0 < len(first.ids) < 600
    on = await engine.generate(ids + first.ids, Sampling(8), "turns")
    later = ids + first.ids + on.ids + prompt(model, [9], picture(7, 64, 40), [12]).tolist()
    second = await engine.generate(later, Sampling(12), "turns")
    for before, one in ((ids, first), (ids + first.ids, on), (later, second)):
        assert one.logprobs == pytest.approx(logprobs_of(model, before, one.ids), abs=1e-4)
    engine.finish("turns")


async def _check_update(engine: Any, model: Any, own: LocalEngine, version: int) -> None:
    """New weights, those of the tower too: images are seen with them, also those that were seen before."""
    noise, before = torch.Generator().manual_seed(version), prompts(model)[1]
    former = await engine.generate(before, Sampling(16, temperature=0.0), "before")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    await own.update_weights(version)
    await engine.update_weights(version)
    after = await engine.generate(before, Sampling(16, temperature=0.0), "before")
    assert (after.weight_version, after.ids != former.ids) == (version, True)
    await _check(engine, model, own)


def launched(kind: str, model: Any, tokenizer: Any, folder: Path, request: pytest.FixtureRequest, **args: Any) -> Any:
    """An engine that launches a real server."""
    venv = request.getfixturevalue(f"{kind}_venv")
    env = {"PYTHONPATH": str(STAND_INS)} if kind == "sglang" else {}
    made = {"sglang": SglangEngine, "vllm": VllmEngine}[kind]
    return made(model, max_batch=8, model_path=str(folder), tokenizer=tokenizer, venv=venv, env=env, **args)


@pytest.mark.long
@pytest.mark.parametrize("way", ["from_disk", "from_distributed"])
async def test_real_servers_see_with_weights_that_come_otherwise(
    parts: Any, folder: Path, way: str, request: pytest.FixtureRequest
) -> None:
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    engine, own = launched("sglang", model, tokenizer, folder, request, weights=way), LocalEngine(model, max_batch=8)
    try:
        await engine.health()
        for version in (1, 2):
            await _check_update(engine, model, own, version)
    finally:
        await engine.close()
        await own.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_real_servers_see_with_an_adapter(
    parts: Any, folder: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    add_adapter(model, LoraSection(rank=4), str(folder))
    said: list[str] = []
    args: dict[str, Any] = {"flags": {"enable-lora": True}, "say": said.append}
    engine, own = launched(kind, model, tokenizer, folder, request, **args), LocalEngine(model, max_batch=8)
    try:
        await engine.health()
        noise = torch.Generator().manual_seed(0)
        for version in (1, 2):
            for parameter in adapter_parameters(model):
                parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=noise))
            await own.update_weights(version)
            await engine.update_weights(version)
            await _check(engine, model, own)
        assert any("the adapter alone" in line for line in said), said
    finally:
        await engine.close()
        await own.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_real_servers_see(parts: Any, folder: Path, kind: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    engine = launched(kind, model, tokenizer, folder, request)
    own = LocalEngine(model, max_batch=8)
    try:
        await engine.health()
        await _check(engine, model, own)
        await _check_turns(engine, model)
        await _check_update(engine, model, own, 1)
        sampled = [*prompts(model)[1], model.image_input.placeholder, 9]
        if kind == "vllm":
            one = await engine.generate(sampled, Sampling(8), "sampled")
            assert one.logprobs == pytest.approx(logprobs_of(model, sampled, one.ids), abs=1e-4)
        else:
            with pytest.raises(EngineError, match="sampled the placeholder"):
                await engine.generate(sampled, Sampling(8), "sampled")
    finally:
        await engine.close()
        await own.close()
