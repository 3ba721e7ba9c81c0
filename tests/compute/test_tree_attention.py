"""The masks and lengths that CUDA kernels are given say what the buckets do; the kernels themselves run on CPUs where
torch has them (flex_attention's forward pass), and stand-ins say the rest."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_help import make_batch, make_deep
from pretend_gpu import flash
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from agentrl.compute import tree_attention
from agentrl.compute.batch import prefix_trees
from agentrl.compute.forward import choose
from agentrl.compute.packing import Packed, Segment, indices, pack
from agentrl.compute.tree_attention import (
    BLOCK,
    RowLayout,
    block_mask,
    bucket_layout,
    by_flash,
    by_flex,
    faults,
    kernel_for,
    mask_of,
    padded,
    subtree_ends,
)
from agentrl.models.load import load_model
from agentrl.recipe.sections.model import ModelSection

CPU = torch.device("cpu")
shapes = st.lists(
    st.tuples(st.integers(1, 300), st.lists(st.integers(1, 150), min_size=1, max_size=4)), min_size=1, max_size=3
)


def segments_of(shape: list[tuple[int, list[int]]]) -> tuple[Segment, ...]:
    batch = make_batch(shape)
    return pack(batch, prefix_trees(batch)).segments


def tensors(tokens: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(tokens, heads, 16), torch.randn(tokens, groups, 16), torch.randn(tokens, groups, 16)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(shapes)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_over_the_mask_is_attention_over_the_buckets(shape: list[tuple[int, list[int]]]) -> None:
    row = RowLayout(segments_of(shape), CPU)
    query, key, value = tensors(row.tokens)
    wanted = bucket_layout(row.segments).attend(query, key, value, 0.3)
    torch.testing.assert_close(by_flex(query, key, value, row, 0.3).flatten(1), wanted, atol=1e-5, rtol=1e-5)


def deep_row(depth: int, seed: int = 0) -> Packed:
    batch = make_deep(depth, seed)
    return pack(batch, prefix_trees(batch, least=1))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_over_deep_trees(depth: int) -> None:
    row = RowLayout(deep_row(depth).segments, CPU)
    query, key, value = tensors(row.tokens)
    wanted = bucket_layout(row.segments).attend(query, key, value, 0.3)
    torch.testing.assert_close(by_flex(query, key, value, row, 0.3).flatten(1), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("depth", range(1, 9))
def test_a_query_sees_its_path_alone(depth: int) -> None:
    """By the definition: a token sees those before it on the paths that it lies on, and itself."""
    row = deep_row(depth, seed=depth)
    wanted = torch.zeros(len(row.ids), len(row.ids), dtype=torch.bool)
    for path in row.paths:
        own = torch.from_numpy(indices(path.spans))
        wanted[own[:, None], own] |= torch.ones(len(own), len(own), dtype=torch.bool).tril()
    places = torch.arange(len(row.ids))
    sees = mask_of(subtree_ends(row.segments, len(row.ids)), CPU)
    none = torch.zeros((), dtype=torch.long)
    assert torch.equal(sees(none, none, places[:, None], places), wanted)
    found = torch.zeros_like(wanted)
    for s in row.segments:
        found[s.start : s.end, indices(s.prefix)] = True
        found[s.start : s.end, s.start : s.end] = torch.ones(s.end - s.start, s.end - s.start, dtype=torch.bool).tril()
    assert torch.equal(found, wanted)


def forests() -> st.SearchStrategy[tuple[Segment, ...]]:
    deep = st.builds(lambda depth, seed: deep_row(depth, seed).segments, st.integers(1, 8), st.integers(0, 99))
    return st.one_of(shapes.map(segments_of), deep)


@settings(max_examples=25, deadline=None)
@given(forests())
def test_blocks_are_those_of_the_mask(segments: tuple[Segment, ...]) -> None:
    """Against torch's own way, which looks at every pair."""
    tokens = max(s.end for s in segments)
    length = padded(tokens)
    found = block_mask(segments, tokens, CPU)
    mask = mask_of(subtree_ends(segments, tokens), CPU)
    wanted = create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, ours, theirs = (getattr(m, f"{name}_{what}") for m, what in (
            (wanted, "num_blocks"), (found, "indices"), (wanted, "indices")))  # fmt: skip
        for block, count in enumerate(counts[0, 0].tolist()):
            assert sorted(ours[0, 0, block, :count].tolist()) == sorted(theirs[0, 0, block, :count].tolist()), name


def test_most_of_a_long_forest_is_never_looked_at() -> None:
    mask = block_mask(segments_of([(1280, [1280] * 8)] * 4), 4 * 9 * 1280, CPU)
    assert mask.sparsity() > 90


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    tree_attention.kernel_fault.cache_clear()
    monkeypatch.setattr(tree_attention, "_FAULTS", {})
    monkeypatch.setattr(varlen, "varlen_attn", flash)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_lone_sequences_go_to_flash_attention_in_half_precision(
    groups: int, untried: None, caplog: pytest.LogCaptureFixture
) -> None:
    row = RowLayout((Segment(0, 7), Segment(7, 7), Segment(7, 200), Segment(200, 230)), CPU)
    query, key, value = (x.bfloat16() for x in tensors(230, groups=groups))
    assert kernel_for(row.shared, query, key) is by_flash
    wanted = bucket_layout(row.segments).attend(query, key, value, 0.2)
    torch.testing.assert_close(row.attend(query, key, value, 0.2), wanted, atol=0.02, rtol=0.02)
    assert not caplog.records


def test_a_shared_prompt_and_whole_precision_go_to_flex_attention(
    untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "_difference", lambda *about: 0.0)
    query, key, _ = tensors(9)
    assert kernel_for(True, query.bfloat16(), key.bfloat16()) is by_flex
    assert kernel_for(True, query, key) is by_flex
    assert kernel_for(False, query, key) is by_flex


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_few_key_heads_are_repeated_for_flex_attention(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        heads.append(key.shape[1])
        assert options["enable_gqa"] == (query.shape[1] != key.shape[1])
        return flex_attention(query, key, value, **options)

    monkeypatch.setattr(tree_attention, "_flex", lambda device: watched)
    monkeypatch.setattr(tree_attention, "GROUPED", ())
    monkeypatch.setattr(tree_attention, "FEW_HEADS", 2)
    row = RowLayout(segments_of([(9, [5, 6]), (4, [3])]), CPU)
    query, key, value = tensors(row.tokens, groups=groups)
    found = by_flex(query, key, value, row, 0.3).flatten(1)
    torch.testing.assert_close(found, bucket_layout(row.segments).attend(query, key, value, 0.3), atol=1e-5, rtol=1e-4)
    assert heads == [4 if groups <= 2 else groups]


def test_flash_attention_of_an_older_torch_gets_a_key_for_every_query_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, scale: float, window_size: Any) -> Tensor:
        assert query.shape == key.shape == value.shape
        return flash(query, key, value, *lengths, scale=scale, window_size=window_size)

    row = RowLayout((Segment(0, 5), Segment(5, 12)), CPU)
    query, key, value = tensors(12)
    monkeypatch.setattr(varlen, "varlen_attn", older)
    found = by_flash(query, key, value, row, 0.3).flatten(1)
    torch.testing.assert_close(found, bucket_layout(row.segments).attend(query, key, value, 0.3), atol=1e-5, rtol=1e-4)


def test_a_kernel_that_fails_leaves_the_work_to_the_buckets(untried: None, caplog: pytest.LogCaptureFixture) -> None:
    """flex_attention has no backward pass on a CPU: a real failure of the real trial."""
    row = RowLayout(segments_of([(9, [5, 6]), (4, [3])]), CPU)
    query, key, value = tensors(row.tokens)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            wanted = bucket_layout(row.segments).attend(query, key, value, 0.3)
            assert torch.equal(row.attend(query, key, value, 0.3), wanted)
    assert len(caplog.records) == 1
    assert "does without by_flex" in caplog.text
    assert faults(CPU).startswith("by_flex does not run here: ")


def test_a_kernel_that_does_not_run_is_said_at_the_start_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "_FAULTS", {("cpu", "by_flex"): "no C compiler"})
    said = choose(load_model(ModelSection())[0])[1]
    assert "attention in buckets, which is slow (by_flex does not run here: no C compiler)" in said


def test_a_kernel_that_computes_something_else_is_not_used(
    untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def off(*about: Any, **options: Any) -> Tensor:
        return flash(*about, **options) * 1.2

    monkeypatch.setattr(varlen, "varlen_attn", off)
    query, key, _ = (x.bfloat16() for x in tensors(9))
    assert kernel_for(False, query, key) is not by_flash
    assert "without by_flash: it is off by 0.2" in caplog.text


def test_the_trial_inside_a_layer_that_is_computed_again(untried: None) -> None:
    """Its backward pass must not start that of the layer around it."""
    row = RowLayout((Segment(0, 30),), CPU)
    query, key, value = (x.bfloat16().requires_grad_() for x in tensors(30))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return row.attend(q * 2, k, v, 0.3)

    torch.utils.checkpoint.checkpoint(layer, query, key, value, use_reentrant=False).sum().backward()
    assert np.isfinite(query.grad.float().numpy()).all()


@pytest.mark.parametrize("reach", [0, 70])
def test_keys_are_repeated_for_their_heads_where_a_mask_forbids_fewer(
    reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "SHORT", 3)
    row = bucket_layout(segments_of([(reach, [5, 60]), (4, [3])]), CPU)
    query, key, value = tensors(row.tokens, groups=2)
    wanted = row.attend(query, key, value, 0.3)
    monkeypatch.setattr(tree_attention, "GROUPED", ())
    torch.testing.assert_close(row.attend(query, key, value, 0.3), wanted)


def test_each_thread_may_compile_as_many_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are computed again compile in autograd's thread, whose configuration is its own."""
    monkeypatch.setattr(tree_attention, "_compiled", lambda: torch._dynamo.config.recompile_limit)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(tree_attention._flex, "cuda").result() >= tree_attention.KINDS
