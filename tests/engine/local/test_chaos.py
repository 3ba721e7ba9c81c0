"""Random crowds, cancelled, aborted, sent to sleep and evicted at random: whoever gets an answer gets the right one."""

import asyncio
import random
from typing import Any

import pytest
import torch
from tiny_models import NO_IDS, qwen3

from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine

VOCAB, CONTEXT = 61, 128


@pytest.fixture
def model() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return qwen3(vocab_size=VOCAB, max_position_embeddings=CONTEXT, initializer_range=0.3, **heads, **NO_IDS)


def assert_greedy(model: Any, prompt: list[int], g: Generation) -> None:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + g.ids])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(g.ids)[:, None]
    assert torch.all(logits.max(-1).values - logits.gather(1, chosen)[:, 0] < 1e-4)
    wanted = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    assert torch.allclose(torch.tensor(g.logprobs), wanted, atol=1e-4)


async def idle(rng: random.Random, most: int) -> None:
    for _ in range(rng.randint(0, most)):
        await asyncio.sleep(0)


async def converse(engine: LocalEngine, model: Any, prompt: list[int], name: str, rng: random.Random) -> int:
    """Up to four turns, some of them cancelled; the number of answers that were checked."""
    ids, checked = list(prompt), 0
    for _ in range(rng.randint(1, 4)):
        await idle(rng, 12)
        told: list[int] = []
        sampling = Sampling(rng.randint(1, 20), 0.0, stop_ids=(3,))
        task = asyncio.create_task(engine.generate(ids, sampling, name, on_tokens=told.extend))
        if rng.random() < 0.15:
            await idle(rng, 9)
            task.cancel()
        try:
            g = await task
        except asyncio.CancelledError:
            continue
        assert told == g.ids
        if g.ids:
            assert_greedy(model, ids, g)
            checked += 1
        elif g.finish is GenerationFinish.LENGTH:
            break
        ids += g.ids + [rng.randint(4, VOCAB - 1) for _ in range(rng.randint(1, 15))]
    if rng.random() < 0.9:
        engine.finish(name)
    return checked


async def disturb(engine: LocalEngine, rng: random.Random) -> None:
    while True:
        await idle(rng, 60)
        await asyncio.sleep(0)
        match rng.randint(0, 6):
            case 0 | 1:
                running = [r.request_id for r in engine.scheduler.requests()]
                engine.abort(rng.choice(running or ["nobody"]))
            case 2 | 3:
                await engine.update_weights(engine.weight_version + 1)
            case _:
                await engine.sleep()
                await engine.wake()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(("max_batch", "contexts"), [(1, 1), (3, 3), (8, 2), (20, 100)])
async def test_a_disturbed_crowd(
    model: Any, max_batch: int, contexts: int, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads:
        monkeypatch.setattr("agentrl.engine.local.engine.INLINE_SECONDS", 0.0)
    rng = random.Random(max_batch)
    token_bytes = LocalEngine(model, max_batch=1).runner.token_bytes
    engine = LocalEngine(model, max_batch=max_batch, cache_bytes=contexts * token_bytes * (CONTEXT + 1))
    prompts = [[rng.randint(4, VOCAB - 1) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    prompts[2:] = [[*prompts[1], *prompt][:30] for prompt in prompts[2:]]
    monkeypatch.setattr("agentrl.engine.local.scheduler.ALIKE_TOKENS", 4)
    trouble = asyncio.create_task(disturb(engine, random.Random(1)))
    crowd = [converse(engine, model, prompts[i % 4], str(i), random.Random(i)) for i in range(16)]
    checked = await asyncio.gather(*crowd)
    trouble.cancel()
    await asyncio.wait([trouble])
    assert sum(checked) >= 8
    scheduler, slots = engine.scheduler, engine.scheduler.slots
    assert not scheduler.busy
    assert not scheduler._feeding
    assert not scheduler._alike
    assert not scheduler.streaming
    held = {i: c for i, c in enumerate(slots.at) if c is not None}
    assert all(c.slot == i and slots.by_id[c.request_id] is c for i, c in held.items())
    assert len(slots.by_id) == len(held)
    assert sorted(slots._free) == [i for i in range(len(slots.at)) if i not in held]
    await engine.close()
