"""The local engine's tokens and log-probs are those of transformers' own forward, however requests come and go."""

import asyncio
import copy
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.engine.local.block_runner import PACKED_SHARE, BlockRunner
from agentrl.engine.local.choose import runner_for
from agentrl.engine.local.compiled_step import Alike
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.local.module_runner import ModuleRunner
from agentrl.engine.local.native import native
from agentrl.engine.local.recompute_runner import RecomputeRunner
from agentrl.engine.local.runner import Chunk, Work
from agentrl.errors import UserError
from agentrl.models import block, dense
from agentrl.models.dense import Dense, PackedDense, PackedGate, packs
from agentrl.models.panels import PanelDense, layout_of, native_panels

VOCAB = 97
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def small(config: type, model: type, **more: Any) -> Any:
    """A random model whose every weight matters, biases and gains included."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 192, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    made = model(config(**(sizes | more))).eval()
    for p in made.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return made


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 192, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


def mamba() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.3}
    return MambaForCausalLM(MambaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()


MODELS = {
    "qwen3": (lambda: small(Qwen3Config, Qwen3ForCausalLM, tie_word_embeddings=True), BlockRunner),
    "qwen2": (lambda: small(Qwen2Config, Qwen2ForCausalLM, hidden_size=64), BlockRunner),
    "llama": (
        lambda: small(LlamaConfig, LlamaForCausalLM, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
        BlockRunner,
    ),
    "llama_yarn": (lambda: small(LlamaConfig, LlamaForCausalLM, rope_parameters=YARN), BlockRunner),
    "gemma3": (
        lambda: small(
            Gemma3TextConfig, Gemma3ForCausalLM, sliding_window=10, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        ModuleRunner,
    ),
    "gpt2": (gpt2, ModuleRunner),
    "mamba": (mamba, RecomputeRunner),
}  # fmt: skip


def check(model: Any, prompt: Sequence[int], g: Generation, greedy: bool) -> None:
    """The generation against the module's forward over the whole sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *g.ids]])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = logits.log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(g.ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(g.logprobs), wanted, atol=1e-4)
    if greedy:
        best = logits.max(-1).values
        assert torch.all(best - logits.gather(1, torch.tensor(g.ids)[:, None])[:, 0] < 1e-4)


async def converse(engine: LocalEngine, model: Any, prompt: list[int], name: str, seed: int, greedy: bool) -> None:
    """Three turns of random lengths, with a few idle moments between them."""
    rng = np.random.default_rng(seed)
    ids = list(prompt)
    for _ in range(int(rng.integers(0, 6))):
        await asyncio.sleep(0)
    for turn in range(3):
        tokens = int(rng.integers(1, 14))
        sampling = Sampling(tokens, 0.0 if greedy else 1.0, stop_ids=(3, 4), seed=seed * 10 + turn)
        g = await engine.generate(ids, sampling, name)
        assert 1 <= len(g.ids) <= tokens
        assert (g.finish is GenerationFinish.STOP) == (g.ids[-1] in (3, 4))
        assert not {3, 4} & set(g.ids[:-1])
        check(model, ids, g, greedy)
        for _ in range(int(rng.integers(0, 9))):
            await asyncio.sleep(0)
        ids += g.ids + rng.integers(5, VOCAB, int(rng.integers(1, 9))).tolist()
    engine.finish(name)


async def crowd(model: Any, greedy: bool, groups: int = 3, samples: int = 3, **options: Any) -> LocalEngine:
    engine = LocalEngine(model, **options)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, VOCAB, n).tolist() for n in (1, *rng.integers(2, 30, groups - 1))]
    work = [
        converse(engine, model, p, f"{i}.{j}", 17 * i + j, greedy)
        for i, p in enumerate(prompts)
        for j in range(samples)
    ]
    await asyncio.gather(*work)
    assert not engine.scheduler.busy
    assert all(c is None for c in engine.scheduler.slots.at)
    return engine


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("greedy", [True, False])
async def test_tokens_and_logprobs_are_those_of_the_module(name: str, greedy: bool) -> None:
    make, runner = MODELS[name]
    engine = await crowd(make(), greedy, max_batch=16)
    assert type(engine.runner) is runner


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
async def test_a_batch_smaller_than_the_crowd(name: str) -> None:
    await crowd(MODELS[name][0](), True, groups=4, samples=4, max_batch=3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("contexts", [1, 2.3])
async def test_a_cache_too_small_for_all_evicts_and_retracts(contexts: float) -> None:
    model = MODELS["qwen3"][0]()
    token_bytes = BlockRunner(model).token_bytes
    room = int(contexts * token_bytes * 193)
    engine = await crowd(model, True, groups=4, samples=4, max_batch=16, cache_bytes=room)
    assert engine.runner.slots * (engine.runner.columns + 1) * token_bytes <= room


async def test_running_rows_are_retracted_when_they_outgrow_the_cache() -> None:
    """Four rows fit at 64 tokens, one at 192: the others wait, and go on exactly where they were."""
    model = MODELS["qwen3"][0]()
    engine = LocalEngine(model, max_batch=4, cache_bytes=BlockRunner(model).token_bytes * 65 * 5)
    prompts = [np.random.default_rng(i).integers(5, VOCAB, 20 + i).tolist() for i in range(4)]
    answers = await asyncio.gather(*(engine.generate(p, Sampling(150, 0.0), str(i)) for i, p in enumerate(prompts)))
    for prompt, g in zip(prompts, answers, strict=True):
        assert len(g.ids) == len(g.logprobs) == 150
        check(model, prompt, g, greedy=True)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@pytest.mark.parametrize("share", [PACKED_SHARE, 1 << 60])
async def test_bfloat16_is_close_to_the_module(name: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights laid out for this CPU, and without."""
    monkeypatch.setattr("agentrl.engine.local.block_runner.PACKED_SHARE", share)
    model = MODELS[name][0]().bfloat16()
    engine = LocalEngine(model, max_batch=4)
    assert BlockRunner(model).packs == (share == PACKED_SHARE and layout_of(model.lm_head.weight) is not None)
    prompt = np.random.default_rng(0).integers(5, VOCAB, 12).tolist()
    g = await engine.generate(prompt, Sampling(20), "a")
    with torch.no_grad():
        logits = model.float()(input_ids=torch.tensor([[*prompt, *g.ids]])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(g.ids)[:, None])[:, 0]
    assert (torch.tensor(g.logprobs) - wanted).abs().mean() < 0.1


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_packed_products_are_those_of_the_weights(kind: torch.dtype) -> None:
    """As exact as plain ones, for any number of rows; a CPU without bfloat16 packs nothing in it like this."""
    torch.manual_seed(0)
    x, residual = torch.randn(300, 48), torch.randn(300, 64)
    weights, biases = [torch.randn(64, 48) for _ in range(2)], [torch.randn(64) for _ in range(2)]
    half = [w.to(kind) for w in weights]
    if kind == torch.bfloat16 and not packs(half[0]):
        assert layout_of(half[0]) in (None, (PanelDense, PanelDense))
        return
    for given, kept in ((biases, [b.to(kind) for b in biases]), ([None, None], [None, None])):
        exact, gate = Dense([w.to(kind).float() for w in weights], given), PackedGate(half, kept)
        one = Dense([half[0].float()], given[:1])
        for rows in (1, 7, 300):
            xs, rs = x[:rows].to(kind), residual[:rows].to(kind)
            joined, alone = PackedDense(half, kept), PackedDense(half[:1], kept[:1])
            for found, wanted in (
                (joined(xs), exact(xs.float())),
                (gate(xs), exact(xs.float())),
                (alone.plus(rs, xs), one.plus(rs.float(), xs.float())),
                (gate.gated(xs, block.swiglu), exact.gated(xs.float(), block.swiglu)),
            ):
                most = 0.01 if kind == torch.bfloat16 else 1e-5
                assert (found.float() - wanted).abs().max() <= most * wanted.abs().max()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_of_panels_are_those_of_the_weights(kind: torch.dtype, threads: int) -> None:
    """To the last bit the same for any number of threads and of other rows; deeper than what is computed at once, with
    a last panel that is not full, and of rows that are not contiguous."""
    if native_panels() is None:
        pytest.skip("needs a C compiler (apt-get install gcc libc6-dev)")
    torch.manual_seed(0)
    x, residual = torch.randn(2, 200, 1500).transpose(0, 1)[:, 0], torch.randn(200, 150)
    weights, biases = [torch.randn(n, 1500).to(kind) for n in (99, 51)], [torch.randn(n).to(kind) for n in (99, 51)]
    before = torch.get_num_threads()
    for given in (biases, [None, None]):
        exact = Dense([w.float() for w in weights], [None if b is None else b.float() for b in given])
        found = PanelDense(weights, given)
        alone = found(x[7:8])
        torch.set_num_threads(threads)
        try:
            for rows in (0, 1, 5, 6, 97, 200):
                torch.testing.assert_close(found(x[:rows]), exact(x[:rows]), rtol=1e-4, atol=1e-3)
                torch.testing.assert_close(
                    found.plus(residual[:rows], x[:rows]), exact.plus(residual[:rows], x[:rows]), rtol=1e-4, atol=1e-3
                )
            assert torch.equal(found(x)[7:8], alone)
        finally:
            torch.set_num_threads(before)


def test_products_of_panels_in_a_forked_process_and_of_threads_at_once() -> None:
    """A process that was forked has none of the threads that its parent's products wait in."""
    if native_panels() is None:
        pytest.skip("needs a C compiler (apt-get install gcc libc6-dev)")
    dense, x, before = PanelDense([torch.randn(300, 64)]), torch.randn(4, 64), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = dense(x)
        with ThreadPoolExecutor(4) as threads:
            assert all(torch.equal(found, wanted) for found in threads.map(lambda _: dense(x), range(400)))
        process = multiprocessing.get_context("fork").Process(target=_same_again, args=(dense, x, wanted))
        process.start()
        process.join(30)
        alive = process.is_alive()
        process.kill()
        assert not alive
        assert process.exitcode == 0
    finally:
        torch.set_num_threads(before)


def _same_again(dense: Dense, x: torch.Tensor, wanted: torch.Tensor) -> None:
    assert all(torch.equal(dense(x), wanted) for _ in range(50))


@pytest.mark.parametrize(("vendor", "chosen"), [("AuthenticAMD", True), ("GenuineIntel", False)])
async def test_large_models_are_packed_where_that_gains(
    vendor: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one in float32 never is; nor is a large one of which all processes' copies do not fit."""
    monkeypatch.setattr("agentrl.models.dense.cpu_name", lambda: f"vendor_id\t: {vendor}\n")
    assert not BlockRunner(MODELS["qwen3"][0]()).packs
    monkeypatch.setattr("agentrl.engine.local.block_runner.COPY_BELOW", 0)
    model = MODELS["qwen3"][0]()
    large = BlockRunner(model)
    assert large.packs == chosen
    large.share(1 << 40)
    assert not large.packs
    await crowd(model, True, max_batch=16)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
async def test_a_model_in_panels_is_computed_in_float32(
    name: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_panels() is None:
        pytest.skip("needs a C compiler (apt-get install gcc libc6-dev)")
    monkeypatch.setattr("agentrl.engine.local.block_runner.COPY_BELOW", 0)
    for module in ("agentrl.engine.local.block_runner", "agentrl.models.block"):
        monkeypatch.setattr(f"{module}.layout_of", lambda weight: (PanelDense, PanelDense))
    model = MODELS[name][0]().to(kind)
    engine = LocalEngine(model, max_batch=4)
    prompts = [np.random.default_rng(i).integers(5, VOCAB, 12 + 9 * i).tolist() for i in range(6)]
    answers = await asyncio.gather(*(engine.generate(p, Sampling(20), str(i)) for i, p in enumerate(prompts)))
    for prompt, g in zip(prompts, answers, strict=True):
        check(copy.deepcopy(model).float(), prompt, g, greedy=False)
    (keys, *_), room = engine.runner.cache.keys, engine.runner.slots * (engine.runner.columns + 1)
    assert keys.dtype == torch.float32
    assert engine.runner.token_bytes * room == 2 * model.config.num_hidden_layers * keys.nbytes


@pytest.mark.parametrize(
    ("vendor", "capability", "has", "compiler", "single", "half"),
    [
        ("AuthenticAMD", "AVX2", False, True, PanelDense, PanelDense),
        ("AuthenticAMD", "AVX512", True, True, PackedDense, PackedDense),
        ("AuthenticAMD", "AVX2", False, False, PackedDense, None),
        ("GenuineIntel", "AVX2", False, True, None, PanelDense),
        ("GenuineIntel", "AVX512", True, True, None, PackedDense),
    ],
)
def test_matrices_are_laid_out_by_the_processor(
    vendor: str, capability: str, has: bool, compiler: bool, single: Any, half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.models.dense.cpu_name", lambda: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr("agentrl.models.dense.cpu_has_bfloat16", lambda: has)
    monkeypatch.setattr("agentrl.models.panels.native_panels", lambda: object() if compiler else None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for kind, wanted in ((torch.float32, single), (torch.bfloat16, half), (torch.float16, None)):
        found = layout_of(torch.zeros(2, 2, dtype=kind))
        assert (found and found[0]) is wanted


async def test_a_prompt_longer_than_one_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.local.scheduler.FEED_TOKENS", 16)
    monkeypatch.setattr("agentrl.engine.local.block_runner.SCORES_AT_ONCE", 500)
    await crowd(MODELS["qwen3"][0](), True, max_batch=16)


async def test_without_copies_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.local.block_runner.COPY_BELOW", 0)
    for name in ("qwen3", "qwen2"):
        await crowd(MODELS[name][0](), True, max_batch=16)


@pytest.mark.parametrize(
    ("vendor", "family", "wide", "chosen"),
    [
        ("AuthenticAMD", 26, "AVX512", True), ("AuthenticAMD", 25, "AVX512", False),
        ("AuthenticAMD", 26, "AVX2", False), ("GenuineIntel", 6, "AVX512", False),
    ],
)  # fmt: skip
def test_onednn_is_for_processors_that_compute_512_bits_at_once(
    vendor: str, family: int, wide: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"
    monkeypatch.setattr("agentrl.models.dense.cpu_name", lambda: told)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: wide)
    assert dense.prefers_onednn.__wrapped__() is (chosen and torch.backends.mkl.is_available())


def rows_of(prompts: Sequence[np.ndarray], samples: int, steps: int) -> Iterator[Work]:
    """Prompts, each of which `samples` rows continue; in every third step each prompt's first row by a chunk."""
    chunks = tuple(Chunk(i * samples, 0, ids) for i, ids in enumerate(prompts))
    none, random = np.zeros(0, np.int64), np.random.default_rng(3)
    yield Work(none, none, none.astype(bool), chunks)
    positions = np.repeat([len(ids) for ids in prompts], samples)
    for step in range(steps):
        active, more = random.random(len(positions)) < 0.9, ()
        if step % 3 == 1:
            active[::samples] = False
            more = tuple(
                Chunk(i, int(positions[i]), random.integers(0, VOCAB, 5)) for i in range(0, len(active), samples)
            )
        yield Work(random.integers(0, VOCAB, len(positions)), np.where(active, positions, 0), active, more)
        positions = positions + active
        positions[[c.slot for c in more]] += 5


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("samples", [1, 5, 16])
def test_a_compiled_step_gives_a_row_the_same_bits_whatever_is_beside_it(name: str, samples: int) -> None:
    """Rows that share a prompt read its keys once; each one alone, its logits are the same to the bit, and those of
    torch up to rounding."""
    if native() is None:
        pytest.skip("no C compiler is installed")
    model, random = MODELS[name][0](), np.random.default_rng(1)
    prompts = [random.integers(0, VOCAB, length) for length in (1, 7, 40, 101)]
    together, torch_only = BlockRunner(model), BlockRunner(model)
    torch_only.copies = False
    alone = [BlockRunner(model) for _ in range(len(prompts) * samples)]
    for runner in (together, torch_only, *alone):
        runner.resize(len(prompts) * samples, 130)
    together.copy([0], [5 % samples], 3)  # what was shared before ends with what is written over it
    for step, work in enumerate(rows_of(prompts, samples, 8)):
        logits, other = together.forward(work), torch_only.forward(work)
        fed = {chunk.slot: chunk for chunk in work.chunks}
        for slot, runner in enumerate(alone):
            only = np.arange(len(work.ids)) == slot
            if step == 0 or slot in fed:
                chunk = Chunk(slot, 0, prompts[slot // samples]) if step == 0 else fed[slot]
                own = runner.forward(Work(work.ids, work.positions * 0, only & False, (chunk,)))[-1]
                assert torch.equal(own, logits[len(work.ids) + slot // samples])
            elif work.active[slot]:
                assert torch.equal(runner.forward(Work(work.ids, work.positions * only, only, ()))[slot], logits[slot])
                row = Work(work.ids[only], work.positions[only], only[only], (), np.flatnonzero(only))
                assert torch.equal(runner.forward(row)[0], logits[slot])
        used = torch.from_numpy(np.concatenate([work.active, np.ones(len(fed), np.bool_)]))
        assert torch.allclose(logits[used], other[used], atol=2e-4)
        for runner in (together, torch_only):
            for i, ids in enumerate(prompts):
                if step == 0 and samples > 1:
                    runner.copy([i * samples] * (samples - 1), [i * samples + j for j in range(1, samples)], len(ids))
    assert (together._alike._group[::samples] >= 0).all() == (samples > 1)


def test_a_slot_that_is_written_over_or_moved_shares_no_more_than_it_holds() -> None:
    alike = Alike()
    alike.resize(6)
    slots = np.arange(6)
    alike.copied([0, 0], [1, 2], 10)
    assert alike.of(slots, np.full(6, 10))[0].tolist() == [0, 0, 0, -1, -1, -1]
    alike.copied([2, 3], [3, 2], 12)  # swapped
    assert alike.of(slots, np.full(6, 12))[0].tolist() == [0, 0, -1, 0, -1, -1]
    alike.copied([3], [4], 6)  # less than what 3 shares
    assert alike.of(slots, np.full(6, 12))[0].tolist() == [0, 0, -1, 0, -1, -1]
    alike.of(np.array([1]), np.array([9]))
    assert alike.of(slots, np.full(6, 12))[0].tolist() == [0, -1, -1, 0, -1, -1]
    alike.copied([3], [5], 11)
    alike.resize(4)
    alike.resize(6)
    group, shared = alike.of(slots, np.full(6, 12))
    assert group.tolist() == [0, -1, -1, 0, -1, -1]
    assert shared.tolist() == [10, 0, 0, 10, 0, 0]


@pytest.mark.parametrize("says", ["exit 3", "echo 'error: no such option' >&2; exit 1", "true"])
def test_a_compiler_that_fails_is_told_of_in_one_line(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{says}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native.__wrapped__() is None
    assert len(caplog.records) == 1
    assert "small models are sampled at half the speed" in caplog.text


@pytest.mark.slow
def test_what_was_compiled_is_kept_and_made_again_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native() is None:
        pytest.skip("no C compiler is installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.__wrapped__() is not None
    (kept,) = (tmp_path / "agentrl").iterdir()
    whole = kept.read_bytes()
    monkeypatch.setattr("agentrl.models.compiled.COMPILE_SECONDS", 0)
    assert native.__wrapped__() is not None  # without a compiler
    monkeypatch.undo()
    damaged = tmp_path / "other" / "agentrl" / kept.name  # where nothing was loaded from
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(whole[:100])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert native.__wrapped__() is not None
    assert len(damaged.read_bytes()) == len(whole)
    assert [path.name for path in damaged.parent.iterdir()] == [kept.name]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert native.__wrapped__() is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
async def test_products_of_other_cpus_without_a_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.local.block_runner.native", lambda: None)
    monkeypatch.setattr("agentrl.engine.local.sampler.native", lambda: None)
    for onednn in (True, False):
        monkeypatch.setattr("agentrl.models.dense.prefers_onednn", lambda onednn=onednn: onednn)
        await crowd(MODELS[name][0](), True, max_batch=16)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_the_shared_block_is_exact_and_differentiable(
    copy: bool, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and gradients of the packed-training forward against the module's own, for one sequence."""
    monkeypatch.setattr("agentrl.models.dense.prefers_onednn", lambda: onednn)
    for name in ("qwen3", "qwen2", "llama"):
        model = MODELS[name][0]()
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 20))
        beyond = torch.full((20, 20), -torch.inf).triu(1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor = beyond) -> Any:
            q, k, v = (t.transpose(0, 1).repeat_interleave(4 // t.shape[1], 0) for t in (q, k, v))
            return ((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v).transpose(0, 1).flatten(1)

        weights = block.weights_of(model, copy=copy, interleave=copy)
        logits = weights.head(block.hidden(weights, ids, block.Rope(model)(torch.arange(20)), attend))
        wanted = model(input_ids=ids[None]).logits[0]
        assert torch.allclose(logits.log_softmax(-1), wanted.log_softmax(-1), atol=1e-4)
        parameters = list(model.parameters())
        grads, wanted_grads = (
            torch.autograd.grad(x.log_softmax(-1)[:, 5].mean(), parameters) for x in (logits, wanted)
        )
        for g, w in zip(grads, wanted_grads, strict=True):
            assert torch.allclose(g, w, atol=1e-4 * max(1.0, float(w.abs().max())))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depend on the length"),
    ],
)
def test_variants_that_the_block_does_not_know_are_left_to_the_module(more: dict[str, Any], reason: str) -> None:
    model = small(LlamaConfig, LlamaForCausalLM, **more)
    assert reason in str(block.unsupported(model))
    assert not isinstance(LocalEngine(model, max_batch=2).runner, BlockRunner)


@pytest.mark.parametrize(("noise", "kind"), [(0.05, ModuleRunner), (0.5, RecomputeRunner)])
def test_half_precision_is_judged_by_what_the_model_makes_of_other_prompts(
    noise: float, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding may put one log-prob off by more than a tenth of a nat; a wrong cache puts them all off."""
    model, forward = gpt2().bfloat16(), ModuleRunner.forward
    random = torch.Generator().manual_seed(0)

    def rounded(self: ModuleRunner, work: Work) -> torch.Tensor:
        logits = forward(self, work)
        return logits + noise * torch.randn(logits.shape, generator=random)

    monkeypatch.setattr(ModuleRunner, "forward", rounded)
    assert type(runner_for(model)) is kind


def test_an_encoder_decoder_is_refused() -> None:
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 20}
    with pytest.raises(UserError, match="not a causal language model"):
        LocalEngine(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), max_batch=2)
