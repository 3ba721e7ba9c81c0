"""A batch packed into one row of shared-prefix trees: a prompt that samples share is laid out once.

A tree is [prompt | answer 1 | ... | answer G], positions running along each path; a lone sequence is a tree with an
empty prompt and one leaf. A leaf attends to its prompt and to itself, so every path sees exactly what it would see as a
row of its own. The last token of the prompt predicts the first token of every answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.compute.batch import Batch, Ints, PrefixTree, prefix_trees


@dataclass(frozen=True, slots=True)
class Segment:
    """packed[start:end] attends to packed[prefix_start:prefix_end], all of it, and causally to itself.

    predictions: how many of the row's predictions, in order, are of this segment's tokens (a prompt has none).
    """

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0
    predictions: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """One forward pass: P packed tokens that hold N predictions.

    ids, positions: int64 [P]. segments: every packed token lies in exactly one, prompts before their leaves.
    predict: int64 [N], the packed token whose hidden state predicts; target: int64 [N], the id it predicts; source:
    int64 [N], where that id stands in the batch's token columns.
    """

    ids: Ints
    positions: Ints
    segments: tuple[Segment, ...]
    predict: Ints
    target: Ints
    source: Ints


def micro_batches(batch: Batch, tokens: int) -> Iterator[Packed]:
    """Yield the batch in packed parts of at most `tokens` tokens each, groups kept together where they fit.

    A larger group is split over several parts, its prompt in each; a path larger than `tokens` is a part of its own.
    Samples without a sampled token are left out: they predict nothing.
    """
    kept = np.flatnonzero(batch.sampled > 0)
    part: list[PrefixTree] = []
    used = 0
    for tree in _bounded(prefix_trees(batch.select(kept)), batch.lengths[kept], tokens):
        cost = _cost(tree, batch.lengths[kept])
        if part and used + cost > tokens:
            yield pack(batch, _renamed(part, kept))
            part, used = [], 0
        part.append(tree)
        used += cost
    if part:
        yield pack(batch, _renamed(part, kept))


def pack(batch: Batch, trees: Sequence[PrefixTree]) -> Packed:
    """Lay the trees out in one row, one after another."""
    pieces: list[tuple[int, int, int]] = []  # (start in the batch, end, first position)
    segments: list[Segment] = []
    predict: list[Ints] = []
    source: list[Ints] = []
    cursor = 0
    for tree in trees:
        first = int(batch.offsets[tree.samples[0]])
        prefix = (cursor, cursor + tree.shared)
        if tree.shared:
            pieces.append((first, first + tree.shared, 0))
            segments.append(Segment(*prefix))
            cursor += tree.shared
        for sample in tree.samples:
            start, end = int(batch.offsets[sample]) + tree.shared, int(batch.offsets[sample + 1])
            pieces.append((start, end, tree.shared))
            wanted = np.flatnonzero(batch.tokens["loss_mask"][start:end])
            segments.append(Segment(cursor, cursor + end - start, *prefix, len(wanted)))
            before = cursor + wanted - 1
            before[wanted == 0] = prefix[1] - 1
            predict.append(before)
            source.append(start + wanted)
            cursor += end - start
    where = np.concatenate([np.arange(low, high) for low, high, _ in pieces])
    everywhere = np.concatenate(source)
    return Packed(
        ids=batch.tokens["ids"][where].astype(np.int64),
        positions=np.concatenate([np.arange(at, at + high - low) for low, high, at in pieces]),
        segments=tuple(segments),
        predict=np.concatenate(predict),
        target=batch.tokens["ids"][everywhere].astype(np.int64),
        source=everywhere,
    )


def _cost(tree: PrefixTree, lengths: Ints) -> int:
    return tree.shared + int(sum(lengths[s] - tree.shared for s in tree.samples))


def _bounded(trees: Sequence[PrefixTree], lengths: Ints, tokens: int) -> Iterator[PrefixTree]:
    """Yield the trees, those larger than `tokens` split."""
    for tree in trees:
        part: list[int] = []
        used = tree.shared
        for sample in tree.samples:
            cost = int(lengths[sample]) - tree.shared
            if part and used + cost > tokens:
                yield PrefixTree(tree.shared, tuple(part))
                part, used = [], tree.shared
            part.append(sample)
            used += cost
        yield PrefixTree(tree.shared, tuple(part))


def _renamed(trees: Sequence[PrefixTree], kept: Ints) -> list[PrefixTree]:
    return [PrefixTree(tree.shared, tuple(int(kept[s]) for s in tree.samples)) for tree in trees]
