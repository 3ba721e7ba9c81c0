"""A partitioned batch: every sample exactly once, balanced by packed tokens, and outputs joined in the batch's
order."""

import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_help import make_batch, make_deep

from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.packing import bins

shapes = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=9)), min_size=1, max_size=8
)


def packed_tokens(batch: Batch) -> int:
    """Tokens that a worker computes for `batch`: those of samples that predict something, prompts once."""
    return sum(tree.tokens for tree in prefix_trees(batch, np.flatnonzero(batch.sampled > 0)))


def named(batch: Batch) -> Batch:
    return batch.with_samples(name=np.arange(len(batch))).with_tokens(place=np.arange(int(batch.offsets[-1])))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 9), st.integers(0, 3))
def test_every_sample_is_in_one_part_and_joined_in_order(
    drawn: list[tuple[int, list[int]]], parts: int, seed: int
) -> None:
    batch = named(make_batch(drawn, seed))
    partition = batch.distribute(parts)
    assert len(partition.parts) == parts
    assert sorted(np.concatenate([part.samples["name"] for part in partition.parts])) == list(range(len(batch)))
    for part in partition.parts:
        assert np.all(np.diff(part.samples["name"]) > 0)
        for i in range(len(part)):
            there = batch.span(int(part.samples["name"][i]))
            assert np.array_equal(part.tokens["ids"][part.span(i)], batch.tokens["ids"][there])
    assert np.array_equal(partition.join([part.tokens["place"] for part in partition.parts]), batch.tokens["place"])
    assert np.array_equal(partition.join([part.samples["name"] for part in partition.parts]), batch.samples["name"])
    again = partition.join(partition.parts)
    assert np.array_equal(again.offsets, batch.offsets)
    assert np.array_equal(again.tokens["place"], batch.tokens["place"])
    assert [pickle.dumps(p) for p in batch.distribute(parts).parts] == [pickle.dumps(p) for p in partition.parts]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 9), st.integers(0, 3))
def test_no_part_is_much_fuller_than_the_others(drawn: list[tuple[int, list[int]]], parts: int, seed: int) -> None:
    """Graham's bound, for whole groups and for single samples (whose prompts then count each)."""
    batch = make_batch(drawn, seed)
    kept = batch.select(np.flatnonzero(batch.sampled > 0))
    fullest = max(packed_tokens(part) for part in batch.distribute(parts).parts)
    largest = max((packed_tokens(kept.select(tree.samples)) for tree in prefix_trees(kept)), default=0)
    assert fullest <= 1.02 * (packed_tokens(batch) / parts + largest)
    assert fullest <= 1.02 * (kept.lengths.sum() / parts + kept.lengths.max(initial=0))
    assert fullest <= packed_tokens(batch)


def test_groups_stay_whole_where_that_balances() -> None:
    batch = make_batch([(100, [10] * 8)] * 8)
    partition = batch.distribute(4)
    assert [packed_tokens(part) for part in partition.parts] == [360] * 4
    assert all(len(set(part.samples["group"])) == 2 for part in partition.parts)


def test_exchanges_find_what_the_largest_first_rule_misses() -> None:
    sizes = [60, 60, 40, 40, 40]  # largest first: 140 and 100
    batch = make_batch([(0, [size]) for size in sizes])
    batch.tokens["loss_mask"][:] = 1
    assert [packed_tokens(part) for part in batch.distribute(2).parts] == [120, 120]


def test_a_group_is_split_where_whole_ones_do_not_balance() -> None:
    batch = make_batch([(20, [100] * 8)])
    assert [packed_tokens(part) for part in batch.distribute(4).parts] == [220] * 4
    uneven = make_batch([(20, [50] * 16), (20, [50] * 4), (20, [50] * 4)])
    loads = [packed_tokens(part) for part in uneven.distribute(4).parts]
    assert max(loads) <= 1.1 * sum(loads) / 4
    assert max(loads) < packed_tokens(uneven.select(range(16))) / 2


def test_a_group_with_a_long_prompt_is_not_split_in_vain() -> None:
    batch = make_batch([(4000, [1] * 8), (4000, [1] * 8)])
    batch.tokens["loss_mask"][:] = 1
    assert sorted(packed_tokens(part) for part in batch.distribute(4).parts) == [0, 0, 4008, 4008]


def test_pieces_go_where_their_prompt_is_already() -> None:
    batch = make_batch([(300, [80, 90, 50]), (350, [10, 60])])
    batch.tokens["loss_mask"][:] = 1
    assert sorted(packed_tokens(part) for part in batch.distribute(3).parts) == [390, 420, 430]


def branched() -> Batch:
    """A group with 20 tokens in common, either half of it 200 more, and each sample 30 for itself; the halves mixed."""
    batch = make_batch([(20, [230] * 8)])
    batch.tokens["loss_mask"][:] = 1
    rows = [batch.tokens["ids"][batch.span(i)] for i in range(8)]
    for i in range(2, 8):
        rows[i][20:220] = rows[i % 2][20:220]
    return batch


def test_a_group_is_cut_where_least_is_computed_twice() -> None:
    batch = named(branched())
    assert packed_tokens(batch) == 20 + 2 * 200 + 8 * 30
    dealt = batch.distribute(2)
    assert [part.samples["name"].tolist() for part in dealt.parts] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [packed_tokens(part) for part in dealt.parts] == [340, 340]
    assert sorted(packed_tokens(part) for part in batch.distribute(4).parts) == [280] * 4
    (first,), (second,) = bins(batch, 400)
    assert [sorted(tree.samples.tolist()) for tree in (first, second)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert first.tokens == second.tokens == 340


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 1000), st.integers(1, 9))
def test_deep_groups_are_dealt_once_in_order_and_balanced(depth: int, seed: int, parts: int) -> None:
    """The bounds are those of groups with a prompt alone."""
    batch = named(make_deep(depth, seed, groups=3))
    dealt = batch.distribute(parts)
    assert sorted(np.concatenate([part.samples["name"] for part in dealt.parts])) == list(range(len(batch)))
    assert np.array_equal(dealt.join([part.tokens["place"] for part in dealt.parts]), batch.tokens["place"])
    kept = np.flatnonzero(batch.sampled > 0)
    fullest = max(packed_tokens(part) for part in dealt.parts)
    largest = max(tree.tokens for tree in prefix_trees(batch, kept))
    assert fullest <= 1.02 * (packed_tokens(batch) / parts + largest)
    assert fullest <= 1.02 * (batch.lengths[kept].sum() / parts + batch.lengths.max())
    assert fullest <= packed_tokens(batch)


def test_a_long_chain_of_forks_is_cut() -> None:
    """As of an agent whose thinking is left out of later turns: each turn forks."""
    turns = np.arange(200 * 10)
    rows = [np.concatenate([turns[: 10 * k], 100_000 + k * 10 + np.arange(10)]) for k in range(1, 201)]
    batch = Batch(
        np.cumsum([0, *map(len, rows)]),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.ones(sum(map(len, rows)), np.uint8)},
        {"group": np.zeros(len(rows), np.int64)},
    )
    assert packed_tokens(batch) == 2 * 200 * 10
    assert max(packed_tokens(part) for part in batch.distribute(2).parts) <= 3100
    assert max(sum(tree.tokens for tree in part) for part in bins(batch, 3100)) <= 3100


def test_more_parts_than_samples_and_an_empty_batch() -> None:
    batch = named(make_batch([(3, [4, 5])]))
    partition = batch.distribute(5)
    assert sorted(len(part) for part in partition.parts) == [0, 0, 0, 1, 1]
    assert np.array_equal(partition.join([part.tokens["place"] for part in partition.parts]), batch.tokens["place"])
    nothing = batch.select([]).distribute(3)
    assert [len(part) for part in nothing.parts] == [0, 0, 0]
    assert len(nothing.join([part.tokens["place"] for part in nothing.parts])) == 0


def test_samples_without_sampled_tokens_weigh_nothing() -> None:
    batch = named(make_batch([(5, [50, 50]), (5, [500]), (5, [50, 50]), (5, [500])]))
    batch.tokens["loss_mask"][:] = 1
    for silent in (2, 5):
        batch.tokens["loss_mask"][batch.span(silent)] = 0
    partition = batch.distribute(2)
    assert [part.samples["name"].tolist() for part in partition.parts] == [[0, 1, 2], [3, 4, 5]]
    assert [packed_tokens(part) for part in partition.parts] == [105, 105]
    assert np.array_equal(partition.join([part.samples["name"] for part in partition.parts]), batch.samples["name"])


@dataclass
class Count:
    value: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def merge(self, others: "list[Count]") -> "Count":
        return Count(self.value + sum(other.value for other in others))


def test_other_outputs_are_merged_or_refused() -> None:
    partition = make_batch([(3, [4, 5]), (2, [6])]).distribute(2)
    assert partition.join([Count(2), Count(3)]) == Count(5)
    joined = partition.join([Count(2, {"ids": part.tokens["ids"]}) for part in partition.parts])
    np.testing.assert_array_equal(joined.columns["ids"], make_batch([(3, [4, 5]), (2, [6])]).tokens["ids"])
    assert partition.join([None, None]) is None
    with pytest.raises(ValueError, match="type NoneType, ndarray"):
        partition.join([None, np.zeros(3)])
    with pytest.raises(ValueError, match="neither the parts' tokens nor their samples"):
        partition.join([np.zeros(1000), np.zeros(3)])
    with pytest.raises(ValueError, match="1 outputs for 2 parts"):
        partition.join([None])


def test_arrays_with_further_dimensions_are_joined_too() -> None:
    batch = make_batch([(3, [4, 5]), (2, [6])])
    wide = np.arange(int(batch.offsets[-1]) * 3).reshape(-1, 3)
    partition = batch.with_tokens(wide=wide).distribute(2)
    assert np.array_equal(partition.join([part.tokens["wide"] for part in partition.parts]), wide)
