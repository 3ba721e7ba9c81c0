"""The local engine's manners: sampling, seeds, groups, aborts, new weights, failures, sharing the event loop."""

import asyncio
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually
from tiny_models import NO_IDS, qwen3

from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.local.native import native
from agentrl.engine.local.runner import Work
from agentrl.engine.local.sampler import Choice, _by_torch, key_of, sample, uniforms
from agentrl.errors import UserError

VOCAB = 61


@pytest.fixture
def model() -> Any:
    return qwen3(vocab_size=VOCAB, max_position_embeddings=256, initializer_range=0.2, **NO_IDS)


@pytest.fixture
def engine(model: Any) -> LocalEngine:
    return LocalEngine(model, max_batch=32)


def count_work(engine: LocalEngine) -> list[Work]:
    """What the model is asked to compute, step by step."""
    seen: list[Work] = []
    forward = engine.runner.forward

    def watched(work: Work) -> torch.Tensor:
        seen.append(work)
        return forward(work)

    engine.runner.forward = watched  # type: ignore[method-assign]
    return seen


LAST = 0xCF9A04AFFA6BADC0
"""The key whose first number is the largest."""


def choices(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Choice:
    key = np.arange(n, dtype=np.uint64) * np.uint64(key_of(5))
    floats = np.full(n, temperature, np.float32), np.full(n, top_p, np.float32)
    return Choice(key, np.zeros(n, np.int64), *floats, np.full(n, top_k, np.int64))


def test_uniforms_are_uniform_and_independent_of_one_another() -> None:
    keys = np.array([key_of(s) for s in range(100)], np.uint64)
    u = np.stack([uniforms(keys, np.full(100, p, np.int64)) for p in range(200)])
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi square, 19 degrees of freedom
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 1.0, 3), (1.0, 0.75, 0), (1.5, 0.8, 4)]
)
def test_sampled_frequencies_are_those_of_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    n, logits = 40_000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -30.0])
    tokens, logprobs = sample(logits.expand(n, -1), choices(n, temperature, top_p, top_k))
    p = (logits / temperature).softmax(-1).double()
    assert np.allclose(logprobs, p.log()[torch.from_numpy(tokens)], atol=1e-5)
    order = p.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    nucleus = p[kept] / p[kept].sum()
    kept = kept[nucleus.cumsum(0) - nucleus < top_p]
    wanted = torch.zeros(6, dtype=torch.float64).index_copy(0, kept, p[kept] / p[kept].sum())
    seen = torch.bincount(torch.from_numpy(tokens), minlength=6) / n
    assert torch.all(seen[wanted == 0] == 0)
    assert torch.all((seen - wanted).abs() < 5 * (wanted * (1 - wanted) / n).sqrt() + 1e-6)


@pytest.mark.parametrize("vocabulary", [9, 832, 512 * 40 + 77])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_token_is_where_the_cumulative_probability_passes_the_number_drawn(vocabulary: int, compiled: bool) -> None:
    """Impossible ones are never drawn, such as those that a constraint forbids; nor is one, where a whole piece is."""
    made = native()
    if compiled and made is None:
        pytest.skip("no C compiler is installed")
    n, random = 200, torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(n, vocabulary, generator=random)
    logits[:, ::3] = -torch.inf
    logits[: n // 2, vocabulary // 40 : vocabulary * 3 // 4] = -torch.inf
    logits[: n // 2, 1] = 0.0
    keys = [*(key_of(seed) for seed in range(n - 2)), 0, LAST]
    drawn = np.array(keys, np.uint64), np.array([*range(n - 2), 0, 0])
    u, temperature = uniforms(*drawn), np.where(np.arange(n) % 5, np.float32(1), np.float32(1.4))
    pick = made.sample if compiled and made is not None else _by_torch
    assert (u[-2], u[-1]) == (0, 1 - 2**-23)
    tokens, logprobs = pick(logits, temperature, *drawn)
    p = (logits.double() / torch.from_numpy(temperature)[:, None]).softmax(-1)
    own = p.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
    after = p.cumsum(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
    assert (own > 0).all()
    assert ((after - own - 1e-5 <= u) & (u <= after + 1e-5)).all()
    assert np.allclose(logprobs, np.log(own), atol=2e-5)
    likeliest, best = pick(logits, 0 * temperature, *drawn)
    assert (likeliest == logits.argmax(-1).numpy()).all()
    assert np.allclose(best, logits.log_softmax(-1).max(-1).values, atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
async def test_the_last_rows_are_computed_alone(compiled: bool, engine: LocalEngine) -> None:
    """In their slots by a compiled step; by torch's operations, which compute the gaps before them, in the first."""
    if compiled and native() is None:
        pytest.skip("no C compiler is installed")
    engine.runner.copies = compiled  # type: ignore[attr-defined]
    assert engine.runner.any_slots is compiled
    seen, prompts = count_work(engine), [[i, i + 1, i + 2] for i in range(8)]
    lengths = [2] * 6 + [40] * 2
    await asyncio.gather(
        *(
            engine.generate(ids, Sampling(max_tokens=n, seed=1), str(i))
            for i, (ids, n) in enumerate(zip(prompts, lengths, strict=True))
        )
    )
    at = [work.slots.tolist() for work in seen if work.slots is not None]
    assert at[1] == list(range(8))
    assert at[-1] == ([6, 7] if compiled else [0, 1])
    assert at.count(at[-1]) > 30
    await engine.close()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_no_finite_logprob(bad: float) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    logits[1, 50] = bad
    assert np.isfinite(sample(logits, choices(4))[1]).tolist() == [True, False, True, True]


def test_greedy_rows_and_others_share_a_batch() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    mixed = choices(50)
    mixed.temperature[::2] = 0
    tokens, logprobs = sample(logits, mixed)
    alone, _ = sample(logits, choices(50))
    assert (tokens[::2] == logits.argmax(-1).numpy()[::2]).all()
    assert (tokens[1::2] == alone[1::2]).all()
    wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
    assert np.allclose(logprobs, wanted, atol=1e-5)


async def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(engine: LocalEngine) -> None:
    ask = Sampling(40, seed=7)
    alone = await engine.generate([5, 6, 7], ask, "alone")
    others = [engine.generate([i + 1] * (i % 9 + 1), Sampling(10 + i, seed=i), f"o{i}") for i in range(20)]
    crowded, *_ = await asyncio.gather(engine.generate([5, 6, 7], ask, "crowded"), *others)
    assert alone.ids == crowded.ids
    assert np.allclose(alone.logprobs, crowded.logprobs, atol=1e-5)
    other = await engine.generate([5, 6, 7], Sampling(40, seed=8), "other")
    assert other.ids != alone.ids


async def test_a_group_is_prefilled_once_and_turns_are_not_prefilled_again(engine: LocalEngine) -> None:
    seen = count_work(engine)
    prompt = list(range(1, 31))
    answers = await asyncio.gather(*(engine.generate(prompt, Sampling(6), f"g{i}") for i in range(8)))
    assert [len(c.ids) for w in seen for c in w.chunks] == [30]
    late = await engine.generate(prompt, Sampling(6), "late")
    assert [len(c.ids) for w in seen for c in w.chunks] == [30, 1]
    assert len({tuple(a.ids) for a in [*answers, late]}) > 1
    del seen[:]
    await asyncio.gather(
        *(engine.generate([*prompt, *a.ids, 9, 9], Sampling(3), f"g{i}") for i, a in enumerate(answers))
    )
    assert [len(c.ids) for w in seen for c in w.chunks] == [3] * 8  # the last sampled id was not computed before


@pytest.mark.parametrize("kind", [list, partial(array, "i")], ids=["list", "array"])
async def test_what_prompts_begin_with_alike_is_computed_once(
    model: Any, engine: LocalEngine, kind: Callable[[list[int]], Sequence[int]]
) -> None:
    system = [1 + i % 50 for i in range(40)]
    prompts = [kind([*system, own, own + 1, own + 2]) for own in (5, 20, 35, 50)]
    seen = count_work(engine)
    asked = [engine.generate(p, Sampling(6, seed=i), f"p{i}-{j}") for i, p in enumerate(prompts) for j in range(3)]
    answers = await asyncio.gather(*asked)
    assert [[(c.start, len(c.ids)) for c in w.chunks] for w in seen[:3]] == [[(0, 43)], [(40, 3)] * 3, []]
    late = await engine.generate(kind([*system, 7, 7]), Sampling(6, seed=9), "late")
    assert [(c.start, len(c.ids)) for w in seen[3:] for c in w.chunks] == [(40, 2)]
    for i, prompt in enumerate([*prompts, kind([*system, 7, 7])]):
        alone = await LocalEngine(model, max_batch=1).generate(prompt, Sampling(6, seed=i if i < 4 else 9), "alone")
        for answer in answers[3 * i : 3 * i + 3] or [late]:
            assert answer.ids == alone.ids
            np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-5)


async def test_prompts_that_wait_for_another_go_on_without_it(model: Any, engine: LocalEngine) -> None:
    system = [1 + i % 50 for i in range(40)]
    asked = [asyncio.create_task(engine.generate([*system, i], Sampling(8, seed=i), f"r{i}")) for i in range(4)]
    await asyncio.sleep(0)
    asked[0].cancel()
    seen = count_work(engine)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [[(c.start, len(c.ids)) for c in w.chunks] for w in seen[:2]] == [[(0, 41)], [(40, 1)] * 2]
    for i, found in enumerate(results[1:], 1):
        assert isinstance(found, Generation)
        assert found.ids == (await engine.generate([*system, i], Sampling(8, seed=i), f"again{i}")).ids
    assert not engine.scheduler._alike


async def test_few_tokens_in_common_are_not_waited_for(engine: LocalEngine) -> None:
    seen = count_work(engine)
    await asyncio.gather(*(engine.generate([*range(1, 21), 30 + i], Sampling(2), f"r{i}") for i in range(4)))
    assert [len(c.ids) for c in seen[0].chunks] == [21] * 4


async def test_another_history_than_the_former_is_computed_from_where_it_differs(engine: LocalEngine) -> None:
    first = await engine.generate([1, 2, 3, 4], Sampling(5, 0.0), "a")
    seen = count_work(engine)
    again = await engine.generate([1, 2, 3, 5], Sampling(5, 0.0), "a")
    assert [c.start for w in seen for c in w.chunks] == [3]
    fresh = await engine.generate([1, 2, 3, 5], Sampling(5, 0.0), "b")
    assert again.ids == fresh.ids
    assert len(first.ids) == 5


async def test_context_and_limits(engine: LocalEngine) -> None:
    assert engine.max_context == 256
    nothing = Generation([], [], GenerationFinish.LENGTH)
    assert await engine.generate([1] * 256, Sampling(5), "a") == nothing
    assert await engine.generate([1] * 300, Sampling(5), "a") == nothing
    assert await engine.generate([1], Sampling(0), "a") == nothing
    g = await engine.generate([1] * 250, Sampling(50), "a")
    assert len(g.ids) == 6
    assert g.finish is GenerationFinish.LENGTH


async def test_bad_requests_are_told(engine: LocalEngine) -> None:
    with pytest.raises(EngineError, match="empty prompt"):
        await engine.generate([], Sampling(5), "a")
    with pytest.raises(EngineError, match="id 61 is outside the model's vocabulary of 61"):
        await engine.generate([1, VOCAB], Sampling(5), "a")
    running = asyncio.create_task(engine.generate([1], Sampling(5), "a"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already generating"):
        await engine.generate([1], Sampling(5), "a")
    assert len((await running).ids) == 5


async def test_a_cache_that_cannot_hold_one_context_is_refused_or_sets_it(model: Any) -> None:
    with pytest.raises(UserError, match=r"hold 78 tokens, fewer than one context of 200"):
        LocalEngine(model, max_batch=4, max_context=200, cache_bytes=256 * 79 + 9)
    engine = LocalEngine(model, max_batch=4, cache_bytes=256 * 79 + 9)
    assert engine.max_context == 78
    assert len((await engine.generate([1, 2], Sampling(100), "a")).ids) == 76
    with pytest.raises(UserError, match="max_batch"):
        LocalEngine(model, max_batch=0)


async def test_abort_one_and_all(engine: LocalEngine) -> None:
    tasks = [asyncio.create_task(engine.generate([1, i], Sampling(200), f"r{i}")) for i in range(4)]
    for _ in range(6):
        await asyncio.sleep(0)
    engine.abort("r1")
    one = await tasks[1]
    assert one.finish is GenerationFinish.ABORT
    assert 0 < len(one.ids) == len(one.logprobs) < 20
    assert not any(tasks[i].done() for i in (0, 2, 3))
    engine.abort()
    assert all(g.finish is GenerationFinish.ABORT for g in await asyncio.gather(*tasks))
    continued = await engine.generate([1, 1, *one.ids], Sampling(3, 0.0), "r1")
    assert continued.ids == (await engine.generate([1, 1, *one.ids], Sampling(3, 0.0), "fresh")).ids


async def test_tokens_are_told_as_they_come_and_cost_only_those_who_ask(engine: LocalEngine) -> None:
    told: list[tuple[int, ...]] = []

    def raises(ids: Any) -> None:
        raise ValueError("a bug of the reader's")

    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))
    quiet = asyncio.create_task(engine.generate([1, 2], Sampling(30, 0.0), "quiet"))
    heard = asyncio.create_task(
        engine.generate([1, 3], Sampling(20, 0.0), "heard", lambda ids: told.append(tuple(ids)))
    )
    broken = asyncio.create_task(engine.generate([1, 4], Sampling(3, 0.0), "broken", raises))
    while len(told) < 10:
        await asyncio.sleep(0)
    assert [len(one) for one in told] == [1] * 10
    assert [r.request_id for r in engine.scheduler.streaming] == ["heard"]
    whole = await heard
    assert [i for one in told for i in one] == whole.ids
    assert len((await broken).ids) == len(problems) == 3
    assert len((await quiet).ids) == 30


@pytest.mark.parametrize("running", [False, True], ids=["idle", "running"])
async def test_a_fork_begins_with_what_its_parent_has_computed(engine: LocalEngine, running: bool) -> None:
    prompt = list(range(1, 31))
    first = await engine.generate(prompt, Sampling(10, 0.0), "parent")
    stem = [*prompt, *first.ids]
    if running:
        more = asyncio.create_task(engine.generate([*stem, 5], Sampling(40, 0.0), "parent"))
        while not engine.scheduler.slots.rows.active.any():
            await asyncio.sleep(0)
    seen = count_work(engine)
    ask = Sampling(12, seed=3)
    forks = {"whole": [*stem, 7, 8], "before": [*prompt[:20], 9, 9, 9], "same": prompt, "new": [40, 41]}
    found = {}
    for name, ids in forks.items():
        engine.fork(name, ["nobody", "parent"])
        found[name] = await engine.generate(ids, ask, name)
    fed = [(c.start, len(c.ids)) for work in seen for c in work.chunks]
    assert fed == [(40, 2) if running else (39, 3), (20, 3), (29, 1), (0, 2)]
    assert not engine.scheduler.forks
    for name, ids in forks.items():
        fresh = await engine.generate(ids, ask, f"fresh {name}")
        assert fresh.ids == found[name].ids
        assert np.allclose(fresh.logprobs, found[name].logprobs, atol=1e-5)
    if running:
        assert len((await more).ids) == 40


async def test_forks_are_forgotten_and_their_slots_are_taken_back(model: Any) -> None:
    """Idle branches take no more than the cache; one whose parent was evicted computes all of its prompt."""
    token_bytes, context = LocalEngine(model, max_batch=1).runner.token_bytes, 80
    engine = LocalEngine(model, max_batch=2, max_context=context, cache_bytes=3 * token_bytes * (context + 1))
    stem, ask = list(range(1, 31)), Sampling(30, 0.0)
    await engine.generate(stem, Sampling(2, 0.0), "0")
    for i in range(1, 6):
        engine.fork(str(i), [str(j) for j in range(i)])
        found = await engine.generate([*stem, i], ask, str(i))
        assert found.ids == (await LocalEngine(model, max_batch=2).generate([*stem, i], ask, "x")).ids
    assert len(engine.scheduler.slots.by_id) <= 3
    engine.fork("never", ["5"])
    engine.finish("never")
    engine.fork("late", ["5"])
    await engine.update_weights(1)
    seen = count_work(engine)
    await engine.generate([*stem, 8], Sampling(1, 0.0), "late")
    assert [c.start for work in seen for c in work.chunks] == [0]
    assert not engine.scheduler.forks


async def test_cancelling_frees_the_row_and_spares_the_group(model: Any) -> None:
    engine = LocalEngine(model, max_batch=2)
    prompt = [1, 2, 3]
    tasks = [asyncio.create_task(engine.generate(prompt, Sampling(50, seed=i), f"r{i}")) for i in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # it was to prefill for the others
    tasks[4].cancel()  # it waits
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results] == [True, True, False, False, True]
    alone = await LocalEngine(model, max_batch=2).generate(prompt, Sampling(50, seed=2), "x")
    assert isinstance(results[2], Generation)
    assert results[2].ids == alone.ids
    assert not engine._requests
    assert not engine.scheduler.busy


async def test_cancelling_in_the_moment_of_finishing(engine: LocalEngine) -> None:
    """The step that ends the request runs between the cancellation and the coroutine's noticing it."""
    task = asyncio.create_task(engine.generate([1, 2], Sampling(1), "a"))
    await asyncio.sleep(0)
    engine._requests["a"].future.cancel()
    while engine.scheduler.busy:
        await engine._step()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await engine.generate([1, 2], Sampling(1), "a")).ids) == 1


async def test_an_engine_of_its_own_weights_changes_only_when_it_is_told(model: Any) -> None:
    engine = LocalEngine(model, max_batch=4, overlap=True)
    before = await engine.generate([1, 2, 3], Sampling(20, 0.0), "a")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    engine.finish("a")
    same = await engine.generate([1, 2, 3], Sampling(20, 0.0), "b")
    assert (same.ids, same.logprobs) == (before.ids, before.logprobs)
    await engine.update_weights(1)
    after = await engine.generate([1, 2, 3], Sampling(20, 0.0), "c")
    fresh = await LocalEngine(model, max_batch=4).generate([1, 2, 3], Sampling(20, 0.0), "c")
    assert after.ids != before.ids
    assert (after.ids, after.weight_version) == (fresh.ids, 1)
    assert all(p.requires_grad for p in model.parameters())


async def test_new_weights_count_at_once_and_running_requests_go_on(model: Any, engine: LocalEngine) -> None:
    before = await engine.generate([1, 2, 3], Sampling(30, 0.0), "a")
    running = asyncio.create_task(engine.generate([4, 5], Sampling(100, 0.0), "b"))
    for _ in range(12):
        await asyncio.sleep(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    await engine.update_weights(3)
    after = await engine.generate([1, 2, 3], Sampling(30, 0.0), "a")
    assert after.ids != before.ids
    assert (before.weight_version, after.weight_version) == (0, 3)
    fresh = await LocalEngine(model, max_batch=4).generate([1, 2, 3], Sampling(30, 0.0), "a")
    assert after.ids == fresh.ids
    across = await running
    assert len(across.ids) == len(across.logprobs) == 100
    old = across.weight_version.count(0)
    assert across.weight_version == [0] * old + [3] * (100 - old)
    assert 0 < old < 50
    tail = await engine.generate([4, 5, *across.ids[:50]], Sampling(50, 0.0), "c")
    assert tail.ids == across.ids[50:]  # greedy under the new weights, from where they came in


async def test_sleep_frees_memory_and_wake_goes_on(engine: LocalEngine) -> None:
    whole = await engine.generate([1, 2], Sampling(20, 0.0), "a")
    under_way = asyncio.create_task(engine.generate([1, 2], Sampling(20, 0.0), "b"))
    for _ in range(9):
        await asyncio.sleep(0)
    await engine.sleep()
    assert not engine.runner.cache.keys  # type: ignore[attr-defined]
    late = asyncio.create_task(engine.generate([1, 2], Sampling(20, 0.0), "c"))
    await asyncio.sleep(0.01)
    assert not under_way.done()
    assert not late.done()
    await engine.wake()
    assert (await under_way).ids == (await late).ids == whole.ids


async def test_a_failure_reaches_everybody_and_the_engine_recovers(model: Any, engine: LocalEngine) -> None:
    good = await engine.generate([1, 2], Sampling(5, 0.0), "good")
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    await engine.update_weights(1)
    asked = [engine.generate([1, 2 + i], Sampling(5), f"r{i}") for i in range(40)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(r, EngineError) and "not finite" in str(r) for r in results)
    model.load_state_dict(saved)
    await engine.update_weights(2)
    assert (await engine.generate([1, 2], Sampling(5, 0.0), "good")).ids == good.ids


async def test_an_error_before_a_step_is_computed_reaches_everybody(engine: LocalEngine) -> None:
    def broken(slots: int, columns: int) -> None:
        if slots:
            raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "resize", broken)
        asked = [engine.generate([1, 2 + i], Sampling(5), f"r{i}") for i in range(4)]
        results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    assert all(isinstance(r, EngineError) and "no room" in str(r) for r in results)
    assert len((await engine.generate([1, 2], Sampling(5), "good")).ids) == 5


async def test_a_closed_engine_says_so(engine: LocalEngine) -> None:
    await engine.health()
    task = asyncio.create_task(engine.generate([1], Sampling(200), "a"))
    await asyncio.sleep(0)
    await engine.close()
    assert (await task).finish is GenerationFinish.ABORT
    with pytest.raises(EngineError, match="closed"):
        await engine.health()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([1], Sampling(1), "b")


async def test_one_engine_serves_several_event_loops(model: Any) -> None:
    engine = LocalEngine(model, max_batch=4)

    def turn() -> list[int]:
        return asyncio.run(engine.generate([1, 2], Sampling(5, 0.0), "a")).ids

    first = await asyncio.to_thread(turn)
    assert await asyncio.to_thread(turn) == first


async def test_others_run_between_the_steps_of_a_small_model(engine: LocalEngine) -> None:
    """Every step gives the event loop a turn, so a tool's callbacks come in between tokens."""
    seen = count_work(engine)
    task = asyncio.create_task(engine.generate([1], Sampling(100), "a"))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= len(seen) == 100


async def test_slow_steps_leave_the_event_loop_free(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take long run in a thread: the loop turns many times meanwhile, and calls in between are honoured."""
    forward = engine.runner.forward
    in_thread, go_on = threading.Event(), threading.Event()

    def slow(work: Work) -> torch.Tensor:
        if threading.current_thread().name.startswith("agentrl-local-engine"):
            in_thread.set()
            assert go_on.wait(60)
        time.sleep(0.03)
        return forward(work)

    engine.runner.forward = slow  # type: ignore[method-assign]
    monkeypatch.setattr("agentrl.engine.local.engine.INLINE_SECONDS", 0.005)
    tasks = [asyncio.create_task(engine.generate([1, i], Sampling(12, 0.0), f"r{i}")) for i in range(4)]
    await eventually(in_thread.is_set)
    for _ in range(20):
        await asyncio.sleep(0)
    tasks[0].cancel()
    engine.abort("r1")
    engine.finish("r2")
    updating = asyncio.create_task(engine.update_weights(1))
    await asyncio.sleep(0)
    go_on.set()
    await updating
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1].finish is GenerationFinish.ABORT
    engine.runner.forward = forward  # type: ignore[method-assign]
    for i in (2, 3):
        assert results[i].ids == (await engine.generate([1, i], Sampling(12, 0.0), f"again{i}")).ids
    await engine.close()
