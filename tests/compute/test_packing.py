"""Packed losses and gradients equal those of separate sequences, for every shape and way."""

import pickle
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_help import SHAPES, VOCABULARY, TorchForward, make_batch, make_deep, make_model, prefixes, shapes
from transformers import (
    PreTrainedModel,
)

from agentrl.compute import forward as forward_module
from agentrl.compute import tree_attention as attention
from agentrl.compute.activation_checkpointing import recompute
from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.flops import Workload
from agentrl.compute.forward import BlockForward, Forward, ModuleForward, SequenceForward, choose
from agentrl.compute.hf_attention import checkpoint_contexts
from agentrl.compute.micro_batches import EMPTY, aligned_micro_batches
from agentrl.compute.packing import Segment, indices, micro_batches, pack
from agentrl.compute.prefix_tree import LEAST
from agentrl.models.load import load_model
from agentrl.recipe.sections.model import ModelSection


def separate(model: PreTrainedModel, batch: Batch, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs [T] (0 where not sampled) by plain rows; adds the gradient of sum(weight * logprob)."""
    out = torch.zeros(int(batch.offsets[-1]))
    for sample in range(len(batch)):
        span = batch.span(sample)
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        mask = torch.from_numpy(batch.tokens["loss_mask"][span].astype(bool))[1:]
        log_p = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        chosen = log_p.gather(1, ids[1:, None])[:, 0] * mask
        (chosen * weight[span][1:]).sum().backward()
        out[span][1:] = chosen.detach()
    return out


def packed(forward: Forward, batch: Batch, weight: torch.Tensor, temperature: float, budget: int) -> torch.Tensor:
    out = torch.zeros(int(batch.offsets[-1]))
    for row in micro_batches(batch, budget):
        logprobs, _ = forward(row, temperature)
        (logprobs * weight[row.source]).sum().backward()
        out[row.source] = logprobs.detach()
    return out


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [10_000, 40])
@pytest.mark.parametrize("kind", [BlockForward, TorchForward, ModuleForward, SequenceForward])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_packed_equals_separate(family: str, kind: Any, budget: int, temperature: float) -> None:
    model, batch = make_model(family), make_batch(SHAPES)
    weight = torch.randn(int(batch.offsets[-1]), generator=torch.Generator().manual_seed(1)) / 50
    wanted = separate(model, batch, weight, temperature)
    wanted_gradients = gradients(model)
    found = packed(kind(model), batch, weight, temperature, budget)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-5, rtol=1e-5)


@cache
def wanted_of(depth: int) -> tuple[PreTrainedModel, Batch, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A model, a deep batch, weights of its tokens, and the log-probs and gradients of separate sequences."""
    model, batch = make_model("qwen3"), make_deep(depth, seed=depth)
    weight = torch.randn(int(batch.offsets[-1]), generator=torch.Generator().manual_seed(depth)) / 50
    return model, batch, weight, separate(model, batch, weight, 0.8), gradients(model)


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (BlockForward, 1),
        (BlockForward, LEAST),
        (TorchForward, 1),
        (TorchForward, LEAST),
        (ModuleForward, 1),
        (ModuleForward, LEAST),
        (SequenceForward, 1),
    ],
)
@pytest.mark.parametrize("depth", range(1, 9))
def test_trees_of_any_depth_equal_separate_sequences(
    kind: Any, depth: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.compute.batch.LEAST", least)
    model, batch, weight, wanted, wanted_gradients = wanted_of(depth)
    found = packed(kind(model), batch, weight, 0.8, 10_000 if depth % 2 else 200)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [{"SHORT": 3, "STEP": 4}, {"HALVED": 3}])
@pytest.mark.parametrize("depth", [2, 8])
def test_deep_trees_by_every_attention(depth: int, change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.compute.batch.LEAST", 1)
    for name, value in change.items():
        monkeypatch.setattr(attention, name, value)
    model, batch, weight, wanted, wanted_gradients = wanted_of(depth)
    torch.testing.assert_close(packed(TorchForward(model), batch, weight, 0.8, 10_000), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [TorchForward, ModuleForward])
def test_long_sequences_take_the_other_attention_and_agree(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model("qwen3"), make_batch(SHAPES)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = packed(kind(model), batch, weight, 1.0, 10_000)
    wanted_gradients = gradients(model)
    monkeypatch.setattr(attention, "SHORT", 3)
    monkeypatch.setattr(attention, "STEP", 4)
    torch.testing.assert_close(packed(kind(model), batch, weight, 1.0, 10_000), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [TorchForward, ModuleForward])
def test_a_segment_in_two_halves_attends_as_one(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model("qwen3"), make_batch(SHAPES)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = separate(model, batch, weight, 1.0)
    wanted_gradients = gradients(model)
    monkeypatch.setattr(attention, "HALVED", 3)
    row = pack(batch, prefix_trees(batch))
    assert sum(len(b.own) for b in attention.bucket_layout(row.segments).buckets) > len(row.segments)
    torch.testing.assert_close(packed(kind(model), batch, weight, 1.0, 10_000), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-4, rtol=1e-4)


def test_large_vocabularies_recompute_probabilities_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.compute import kernels

    model, batch = make_model("qwen2"), make_batch(SHAPES)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = packed(BlockForward(model), batch, weight, 0.9, 10_000)
    wanted_gradients = gradients(model)
    monkeypatch.setattr(kernels, "CHUNK", 0)
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 5)
    monkeypatch.setattr(kernels, "KEPT", 0)
    torch.testing.assert_close(packed(BlockForward(model), batch, weight, 0.9, 10_000), wanted)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_every_product_and_layout_of_the_weights_agrees(
    family: str, copies: bool, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_model(family), make_batch(SHAPES)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = packed(SequenceForward(model), batch, weight, 1.0, 10_000)
    wanted_gradients = gradients(model)
    monkeypatch.setattr("agentrl.models.dense.prefers_onednn", lambda: onednn)
    forward = TorchForward(model)
    forward.copies = copies
    if copies:
        compiled = BlockForward(model)
        torch.testing.assert_close(packed(compiled, batch, weight, 1.0, 10_000), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed(forward, batch, weight, 1.0, 10_000), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-4, rtol=1e-4)


def test_entropy_and_its_gradient() -> None:
    model, batch = make_model("qwen3"), make_batch(SHAPES)
    row = pack(batch, prefix_trees(batch))
    found: list[torch.Tensor] = []
    other: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    ways = ((BlockForward(model), found), (TorchForward(model), other), (SequenceForward(model), wanted))
    for forward, entropies in ways:
        _, entropy = forward(row, 0.8)
        entropy.sum().backward()
        entropies += [entropy.detach(), *gradients(model)]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(other, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "way", "why"),
    [
        ("qwen3", BlockForward, "own forward"),
        ("windowed", SequenceForward, "sliding window"),
        ("gpt2", ModuleForward, "no own forward: architecture 'gpt2'"),
    ],
)
def test_the_fastest_exact_way_is_chosen_and_said(family: str, way: type, why: str) -> None:
    model = make_model(family)
    forward, said = choose(model)
    assert isinstance(forward, way)
    assert why in said
    batch = make_batch(SHAPES)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = separate(model, batch, weight, 1.0)
    torch.testing.assert_close(packed(forward, batch, weight, 1.0, 100), wanted, atol=1e-4, rtol=1e-4)


def test_the_module_attends_as_before_afterwards() -> None:
    model = make_model("qwen3")
    before = model.config._attn_implementation
    ModuleForward(model)(pack(make_batch(SHAPES), prefix_trees(make_batch(SHAPES))), 1.0)
    assert model.config._attn_implementation == before


def test_modules_are_walked_once_to_replace_their_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each pass, nor for each layer that is computed again: that is milliseconds of Python each time."""
    model, batch = make_model("qwen3"), make_batch(SHAPES)
    walks: list[str] = []
    walk = model.set_attn_implementation
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: walks.append(name) or walk(name))
    recompute(model)
    packed(ModuleForward(model), batch, torch.ones(int(batch.offsets[-1])), 1.0, 40)
    assert len(walks) == 1
    assert model.config._attn_implementation == make_model("qwen3").config._attn_implementation


def test_layers_computed_again_in_the_backward_pass_attend_alike() -> None:
    model, batch = make_model("qwen3"), make_batch(SHAPES)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = packed(ModuleForward(model), batch, weight, 1.0, 10_000)
    wanted_gradients = gradients(model)
    again = {"use_reentrant": False, "context_fn": partial(checkpoint_contexts, model)}
    model.activation_checkpointing_enable(again)
    model.train()
    assert torch.equal(packed(ModuleForward(model), batch, weight, 1.0, 10_000), wanted)
    torch.testing.assert_close(gradients(model), wanted_gradients)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 60), st.integers(0, 5))
def test_micro_batches_predict_every_sampled_token_once(
    drawn: list[tuple[int, list[int]]], budget: int, seed: int
) -> None:
    batch = make_batch(drawn, seed)
    rows = list(micro_batches(batch, budget))
    sources = np.sort(np.concatenate([row.source for row in rows])) if rows else np.zeros(0, int)
    assert np.array_equal(sources, np.flatnonzero(batch.tokens["loss_mask"]))
    longest = int(batch.lengths.max())
    for row in rows:
        assert len(row.ids) <= max(budget, longest)
        covered = np.concatenate([np.arange(s.start, s.end) for s in row.segments])
        assert np.array_equal(np.sort(covered), np.arange(len(row.ids)))
        assert np.array_equal(row.target, batch.tokens["ids"][row.source])
        for i, position in zip(row.predict, row.source, strict=True):
            sample = int(np.searchsorted(batch.offsets, position, "right")) - 1
            assert row.positions[i] == position - batch.offsets[sample] - 1
            assert row.ids[i] == batch.tokens["ids"][position - 1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 1000), st.integers(1, 400), st.sampled_from([1, 4, LEAST]))
def test_micro_batches_of_deep_trees(depth: int, seed: int, budget: int, least: int) -> None:
    batch = make_deep(depth, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.compute.batch.LEAST", least)
        rows = list(micro_batches(batch, budget))
    sources = np.sort(np.concatenate([row.source for row in rows]))
    assert np.array_equal(sources, np.flatnonzero(batch.tokens["loss_mask"]))
    sample_of = np.searchsorted(batch.offsets, np.arange(batch.offsets[-1]), "right") - 1
    for row in rows:
        assert len(row.ids) <= max(budget, int(batch.lengths.max()))
        first = 0
        for path in row.paths:
            own = slice(first, first + path.predictions)
            sample, found = sample_of[row.source[own]], indices(path.spans)
            assert len(set(sample)) == 1
            assert np.array_equal(row.ids[found], batch.tokens["ids"][batch.span(int(sample[0]))])
            assert np.array_equal(row.positions[found], np.arange(len(found)))
            steps = row.source[own] - batch.offsets[sample]
            assert np.array_equal(row.predict[own], found[steps - 1])
            assert np.array_equal(row.predicted[own], found[steps])
            first += path.predictions
        assert np.array_equal(row.target, batch.tokens["ids"][row.source])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 1000))
def test_a_tree_computes_every_beginning_once(depth: int, seed: int) -> None:
    batch = make_deep(depth, seed)
    trees = prefix_trees(batch, least=1)
    assert sum(tree.tokens for tree in trees) == prefixes(batch) == len(pack(batch, trees).ids)
    for tree in trees:
        places = np.flatnonzero(np.random.default_rng(seed).random(len(tree.samples)) < 0.6)
        if len(places):
            part = batch.select(np.sort(tree.samples[places]))
            assert tree.subset(places).tokens == tree.cost(places) == prefixes(part)


def test_branches_stand_in_the_order_of_their_samples() -> None:
    """So a batch whose samples share their prompt alone is laid out as it stands; what is short is not laid apart."""
    batch = make_batch([(20, [30, 30, 30, 30])])
    rows = [batch.tokens["ids"][batch.span(i)] for i in range(4)]
    rows[2][20:25] = rows[0][20:25]
    rows[3][20:40] = rows[1][20:40]
    (tree,) = prefix_trees(batch)
    assert (tree.samples.tolist(), tree.shared.tolist()) == ([0, 1, 3, 2], [0, 20, 40, 20])
    (tree,) = prefix_trees(batch, least=5)
    assert (tree.samples.tolist(), tree.shared.tolist()) == ([0, 2, 1, 3], [0, 25, 20, 40])
    spans = [(s.start, s.end, s.prefix) for s in pack(batch, [tree]).segments]
    assert spans == [
        (0, 20, ()), (20, 25, ((0, 20),)), (25, 50, ((0, 25),)), (50, 75, ((0, 25),)), (75, 95, ((0, 20),)),
        (95, 105, ((0, 20), (75, 95))), (105, 115, ((0, 20), (75, 95))),
    ]  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """A rank beside others, of which the fullest needs `fullest` micro-batches."""

    fullest: int
    size: int = 2
    beats: list[int] = field(default_factory=list)

    def max_over_ranks(self, count: int) -> int:
        return max(count, self.fullest)

    def heartbeat(self) -> None:
        self.beats.append(len(self.beats))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 60), st.integers(0, 12))
def test_ranks_make_as_many_micro_batches_as_the_fullest(
    drawn: list[tuple[int, list[int]]], budget: int, fullest: int
) -> None:
    batch = make_batch(drawn)
    alone = len(list(micro_batches(batch, budget)))
    ranks = Ranks(fullest)
    rows = list(aligned_micro_batches(batch, budget, ranks))
    assert len(rows) == len(ranks.beats) == max(alone, fullest)
    sources = np.sort(np.concatenate([row.source for row in rows])) if rows else np.zeros(0, int)
    assert np.array_equal(sources, np.flatnonzero(batch.tokens["loss_mask"]))
    sizes = [len(row.ids) for row in rows if row is not EMPTY]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) <= max(budget, int(batch.lengths.max()))


def test_micro_batches_are_even_and_no_more_than_needed() -> None:
    rng = np.random.default_rng(0)
    batch = make_batch([(20, rng.integers(10, 200, 16).tolist()) for _ in range(12)])
    sizes = [len(row.ids) for row in micro_batches(batch, 1500)]
    assert len(sizes) <= -(-sum(sizes) // 1500) + 1
    assert np.mean(sizes) > 0.95 * max(sizes)
    assert [len(row.ids) for row in micro_batches(batch, 100_000)] == [len(pack(batch, prefix_trees(batch)).ids)]


def test_a_shared_prompt_is_computed_once() -> None:
    batch = make_batch([(20, [5, 5, 5])])
    assert len(pack(batch, prefix_trees(batch)).ids) == 20 + 15


def of_groups(common: int, own: int, groups: int = 3, samples: int = 2) -> Batch:
    """Groups whose prompts of `common + own` tokens have the first `common` in common, and answers of 4 tokens."""
    batch = make_batch([(common + own, [4] * samples)] * groups)
    for sample in range(len(batch)):
        batch.tokens["ids"][batch.span(sample)][:common] = batch.tokens["ids"][:common]
    return batch


@pytest.mark.parametrize("kind", [BlockForward, ModuleForward])
def test_what_prompts_of_groups_begin_with_is_computed_once(kind: type[Forward]) -> None:
    batch = of_groups(20, 9)
    (row,) = micro_batches(batch, 1000)
    assert len(row.ids) == 20 + 3 * (9 + 2 * 4) == Workload.of(batch).tokens
    model, weight = make_model("qwen3"), torch.randn(int(batch.offsets[-1]))
    wanted, wanted_gradients = separate(model, batch, weight, 1.0), gradients(model)
    torch.testing.assert_close(packed(kind(model), batch, weight, 1.0, 1000), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(model), wanted_gradients, atol=1e-4, rtol=1e-4)
    rows = list(micro_batches(batch, 40))
    assert all(len(row.ids) <= 40 for row in rows)
    assert sum(len(row.ids) for row in rows) == 3 * (29 + 2 * 4), "each bin has one group"


def test_too_little_in_common_leaves_groups_apart() -> None:
    for batch, tokens in ((of_groups(LEAST - 1, 20), 3 * (27 + 8)), (of_groups(10, 1000), 3 * (1010 + 8))):
        assert [len(row.ids) for row in micro_batches(batch, 10_000)] == [tokens]
    lone = of_groups(10, 30, samples=1)  # a fifth of the tokens, for which a faster kernel would be given up
    assert [len(row.ids) for row in micro_batches(lone, 10_000)] == [3 * 44]
    assert [len(row.ids) for row in micro_batches(of_groups(30, 10, samples=1), 10_000)] == [30 + 3 * 14]


def test_prompts_that_differ_share_their_common_start() -> None:
    batch = make_batch([(10, [4, 4])])
    batch.tokens["ids"][14 + 6] = (batch.tokens["ids"][6] + 1) % VOCABULARY
    assert prefix_trees(batch)[0].root == 6
    model, weight = make_model("qwen3"), torch.ones(28)
    wanted = separate(model, batch, weight, 1.0)
    torch.testing.assert_close(packed(BlockForward(model), batch, weight, 1.0, 100), wanted, atol=1e-5, rtol=1e-5)


def test_select_split_concat_repeat_keep_every_column() -> None:
    batch = make_batch(SHAPES)
    again = Batch.concat(batch.split(4))
    for name, column in {**batch.tokens, **batch.samples}.items():
        assert np.array_equal({**again.tokens, **again.samples}[name], column), name
    assert np.array_equal(again.offsets, batch.offsets)
    assert [len(part) for part in batch.split(4)] == [2, 3, 2, 3]
    twice = batch.select([3]).repeat(2)
    assert np.array_equal(twice.tokens["ids"], np.tile(batch.tokens["ids"][batch.span(3)], 2))
    assert len(batch.select([])) == 0
    with pytest.raises(ValueError, match="columns must have 10 entries"):
        batch.with_samples(extra=np.zeros(3))


def test_a_batch_pickles_as_flat_arrays() -> None:
    batch = make_batch([(50, [60] * 8)] * 16)
    blob = pickle.dumps(batch, protocol=5)
    assert len(blob) < batch.offsets[-1] * 5 + 20_000
    assert np.array_equal(pickle.loads(blob).tokens["ids"], batch.tokens["ids"])


WRONG: dict[str, Any] = {
    "across sequences": lambda s: (Segment(0, max(x.end for x in s)),),
    "no prompt": lambda s: tuple(Segment(x.start, x.end) for x in s),
    "another prompt": lambda s: tuple(replace(x, prefix=((0, 5),)) if x.prefix or x is s[-1] else x for x in s),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_in_half_precision_rounding_is_told_from_wrong_attention(
    wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding at one unlikely token may exceed any fixed bound that a wrong mask on a small model stays below."""
    model = load_model(ModelSection(dtype="bfloat16"))[0]
    noise = 0.05 * torch.randn(29, generator=torch.Generator().manual_seed(0))
    noise[3] = 0.3
    exact = ModuleForward.__call__

    def noisy(self: Any, row: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = exact(self, row, temperature)
        return logprobs + noise, entropy

    if wrong is None:
        monkeypatch.setattr(ModuleForward, "__call__", noisy)
    else:
        planned = forward_module.make_layout
        monkeypatch.setattr(forward_module, "make_layout", lambda s, device: planned(WRONG[wrong](s), device))
    chosen, said = choose(model)
    assert isinstance(chosen, ModuleForward if wrong is None else SequenceForward), said
    assert wrong is None or "where other prompts make" in said
