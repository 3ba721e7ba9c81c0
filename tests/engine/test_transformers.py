"""The plain reference over `generate` of transformers: what it samples is what the embedded engine samples."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_help import metrics
from train_help import small as small_run
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import agentrl
from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling, engine_class
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.transformers import TransformersEngine
from agentrl.errors import UserError
from agentrl.weights.source import ModelWeights

VOCAB = 61


def tiny(config: type = Qwen3Config, kind: type = Qwen3ForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    return kind(config(**(sizes | more))).eval()


class Unmasked(Qwen3ForCausalLM):
    """Takes up padding, as a state does that no mask reaches."""

    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, attention_mask: Any = None, **how: Any
    ) -> Any:
        how.pop("position_ids", None)
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **how)


MODELS = {
    "qwen3": tiny,
    "gpt2": lambda: tiny(GPT2Config, GPT2LMHeadModel, n_embd=32, n_layer=2, n_head=2, n_positions=128),
    "mamba": lambda: tiny(MambaConfig, MambaForCausalLM, state_size=4),
    "unmasked": lambda: tiny(kind=Unmasked),
}
ASKED = [
    Sampling(9, seed=1),
    Sampling(5, temperature=0.0, seed=2),
    Sampling(12, temperature=0.7, top_p=0.8, seed=3),
    Sampling(7, temperature=1.3, top_k=4, seed=4),
    Sampling(8, top_p=0.9, top_k=9, seed=5, stop_ids=(3, 7, 11, 13, 17, 19, 23)),
]


async def turns(engine: Any) -> list[Generation]:
    """Prompts of several lengths at once, then a second turn of each."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, 4 + 3 * (i % 3)).tolist() for i in range(len(ASKED))]
    first = await each(engine, prompts)
    longer = [[*p, *turn.ids, 5, 6] for p, turn in zip(prompts, first, strict=True)]
    return [*first, *await each(engine, longer)]


async def each(engine: Any, prompts: list[list[int]]) -> list[Generation]:
    asked = enumerate(zip(prompts, ASKED, strict=True))
    told: list[list[int]] = [[] for _ in prompts]
    work = (engine.generate(prompt, how, f"r{i}", told[i].extend) for i, (prompt, how) in asked)
    found = await asyncio.gather(*work)
    assert told == [turn.ids for turn in found]
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
async def test_it_samples_what_the_embedded_engine_samples(name: str) -> None:
    model = MODELS[name]()
    model.generation_config = GenerationConfig(repetition_penalty=3.0, temperature=0.3, eos_token_id=5, min_length=30)
    own = model.generation_config
    engine = TransformersEngine(model, max_batch=3)
    found, wanted = await turns(engine), await turns(LocalEngine(model, max_batch=8))
    assert [turn.ids for turn in found] == [turn.ids for turn in wanted]
    assert [turn.finish for turn in found] == [turn.finish for turn in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert engine._ragged is (name != "unmasked")
    assert model.generation_config is own


async def test_it_takes_new_weights_in_place_as_a_copy_and_one_by_one() -> None:
    model, other = tiny(), tiny()
    kinds = ((model, False), (model, True), (other, False))
    shared, follower, receiver = (TransformersEngine(kind, max_batch=4, overlap=copied) for kind, copied in kinds)
    before = await shared.generate([1, 2, 3], Sampling(6, temperature=0), "a")
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    stale = await follower.generate([1, 2, 3], Sampling(6, temperature=0), "a")
    assert stale.ids == before.ids
    for engine, weights in ((shared, None), (follower, None), (receiver, ModelWeights(model))):
        await engine.update_weights(4, weights)
        turn = await engine.generate([1, 2, 3], Sampling(6, temperature=0), "b")
        assert turn.weight_version == 4
        assert turn.ids != before.ids
    with pytest.raises(EngineError, match="it has no stranger"):
        await receiver.update_weights(5, [("stranger", torch.zeros(1))])
    with pytest.raises(EngineError, match="came only in part"):
        await receiver.generate([1], Sampling(1), "c")


async def test_aborts_sleep_and_close() -> None:
    engine = TransformersEngine(tiny(), max_batch=2)
    work = [asyncio.create_task(engine.generate([1, 2], Sampling(100, seed=i), f"r{i}")) for i in range(3)]
    while len(engine._running) != 2 or not engine._running[0].ids:
        await asyncio.sleep(0.001)
    engine.abort("r2")
    assert (await work[2]).finish is GenerationFinish.ABORT
    engine.abort("r0")
    first, second = await work[0], await work[1]
    assert first.finish is GenerationFinish.ABORT
    assert 0 < len(first.ids) < 100
    assert (second.finish, len(second.ids)) == (GenerationFinish.LENGTH, 100)
    await engine.sleep()
    waits = asyncio.create_task(engine.generate([1, 2], Sampling(2), "late"))
    await asyncio.sleep(0.01)
    assert not waits.done()
    await engine.update_weights(1)
    assert not waits.done()
    await engine.wake()
    assert len((await waits).ids) == 2
    await engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        await engine.generate([1], Sampling(1), "x")


async def test_what_goes_wrong_is_an_error_of_the_engine() -> None:
    engine = TransformersEngine(tiny(), max_batch=2, max_context=8)
    for prompt, line in (([], "an empty prompt"), ([VOCAB], f"id {VOCAB} is outside"), ([-1], "id -1 is outside")):
        with pytest.raises(EngineError, match=line):
            await engine.generate(prompt, Sampling(1), "a")
    assert (await engine.generate([1] * 8, Sampling(1), "a")).finish is GenerationFinish.LENGTH
    assert len((await engine.generate([1] * 5, Sampling(9), "a")).ids) == 3
    engine._model.forward = lambda *a, **k: 1 / 0
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await engine.generate([1], Sampling(1), "a")
    del engine._model.forward
    assert len((await engine.generate([1], Sampling(1), "a")).ids) == 1


def test_what_it_cannot_serve_is_refused() -> None:
    with pytest.raises(UserError, match="max_batch is 0"):
        TransformersEngine(tiny(), max_batch=0)
    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="T5ForConditionalGeneration is not a causal language model"):
        TransformersEngine(T5ForConditionalGeneration(config), max_batch=1)
    assert engine_class("transformers") is TransformersEngine


@pytest.mark.long
def test_a_run_learns_with_it(tmp_path: Path) -> None:
    result = agentrl.train(
        small_run(
            tmp_path / "run", env={"name": "gsm8k"}, engine={"name": "transformers"}, rollout__tasks=8, rollout__n=8,
            train__steps=8, train__lr=1e-3,
        )
    )  # fmt: skip
    rewards = [row["reward/mean"] for row in metrics(result.folder)[1:]]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.1
