"""The local engine over a model of its own, whose weights come from a trainer elsewhere."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.engine.base import EngineError, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.weights.source import ModelWeights


def tiny(seed: int, tied: bool = True) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=tied))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


async def answer(engine: LocalEngine, name: str = "a") -> list[int]:
    return (await engine.generate([1, 2, 3], Sampling(30, 0.0), name)).ids


@pytest.mark.parametrize("tied", [True, False])
async def test_it_samples_from_what_it_was_given(tied: bool) -> None:
    engine, trainer = LocalEngine(tiny(0, tied), max_batch=4), tiny(1, tied)
    before = await answer(engine)
    await engine.update_weights(7, ModelWeights(trainer))
    assert await answer(engine) == await answer(LocalEngine(trainer, max_batch=4)) != before
    assert engine.weight_version == 7
    with torch.no_grad():  # they are the engine's own now
        trainer.model.norm.weight.mul_(-1)
    assert await answer(engine, "b") == await answer(LocalEngine(tiny(1, tied), max_batch=4))


async def test_experts_that_checkpoints_call_otherwise_arrive_too() -> None:
    """transformers keeps the experts of a layer as one tensor."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(**sizes, **heads, head_dim=8, moe_intermediate_size=16, intermediate_size=16)
        models.append(Qwen3MoeForCausalLM(config).eval())
    engine = LocalEngine(models[0], max_batch=4)
    assert dict(ModelWeights(models[1])).keys() != dict(ModelWeights(models[1], own_names=True)).keys()
    await engine.update_weights(1, ModelWeights(models[1], own_names=True))
    assert await answer(engine) == await answer(LocalEngine(models[1], max_batch=4))


async def test_a_request_under_way_waits_for_all_of_them_and_goes_on() -> None:
    engine, trainer = LocalEngine(tiny(0), max_batch=4), tiny(1)
    running = asyncio.create_task(engine.generate([4, 5], Sampling(100, 0.0), "b"))
    for _ in range(12):
        await asyncio.sleep(0)
    half, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[Any]:
        for i, item in enumerate(ModelWeights(trainer)):
            if i == 5:
                half.set()
                assert go_on.wait(10)
            yield item

    update = asyncio.create_task(engine.update_weights(1, slowly()))
    await asyncio.to_thread(half.wait, 10)
    late = asyncio.create_task(answer(engine, "late"))
    for _ in range(200):  # the loop lives, and nobody samples from half of them
        await asyncio.sleep(0)
    assert not running.done()
    assert not late.done()
    go_on.set()
    await update
    across = await running
    old = across.weight_version.count(0)
    assert across.weight_version == [0] * old + [1] * (100 - old)
    assert 0 < old < 50
    fresh = LocalEngine(trainer, max_batch=4)
    tail = await fresh.generate([4, 5, *across.ids[:old]], Sampling(100 - old, 0.0), "c")
    assert tail.ids == across.ids[old:]
    assert await late == await answer(fresh)


def without(name: str) -> Any:
    return lambda state: [(n, t) for n, t in state if n != name]


NORM = "model.norm.weight"
WRONG = {
    "was not given": without(NORM),
    "has no model.other": lambda state: [*state, ("model.other", torch.zeros(1))],
    r"model.norm.weight is \[31\], its own is \[32\]": lambda state: [
        (n, t[:-1] if n == NORM else t) for n, t in state
    ],
    "lm_head.weight was given twice": lambda state: [*state, ("lm_head.weight", torch.zeros(64, 32))],
}


@pytest.mark.parametrize("why", WRONG)
async def test_what_does_not_fit_is_said_and_nobody_samples_from_a_part(why: str) -> None:
    engine, trainer = LocalEngine(tiny(0), max_batch=4), tiny(1)
    running = asyncio.create_task(answer(engine, "under way"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=why):
        await engine.update_weights(1, WRONG[why](ModelWeights(trainer)))
    with pytest.raises(EngineError, match=why):
        await running
    with pytest.raises(EngineError, match="weights of step 1 were received only in part"):
        await answer(engine)
    await engine.update_weights(2, ModelWeights(trainer))
    assert await answer(engine) == await answer(LocalEngine(trainer, max_batch=4))


async def test_what_fails_as_they_are_read_leaves_no_half_update() -> None:
    engine = LocalEngine(tiny(0), max_batch=4)

    def lost() -> Iterator[Any]:
        yield NORM, torch.zeros(32)
        raise ConnectionError("the worker is gone")

    with pytest.raises(ConnectionError):
        await engine.update_weights(1, lost())
    with pytest.raises(EngineError, match="only in part"):
        await answer(engine)
    assert engine.weight_version == 0


async def test_sleep_outlasts_an_update() -> None:
    engine, trainer = LocalEngine(tiny(0), max_batch=4), tiny(1)
    task = asyncio.create_task(answer(engine))
    await asyncio.sleep(0)
    await engine.sleep()
    await engine.update_weights(1, ModelWeights(trainer))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    await engine.wake()
    assert await task


async def test_a_model_with_an_adapter_takes_no_merged_weights() -> None:
    from agentrl.models.lora import add_adapter
    from agentrl.recipe.sections.model import LoraSection

    model = tiny(0)
    add_adapter(model, LoraSection(rank=2), "base")
    with pytest.raises(EngineError, match="adapter of its own"):
        await LocalEngine(model, max_batch=4).update_weights(1, ModelWeights(tiny(1)))
