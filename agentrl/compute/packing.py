"""A batch packed into one row of shared-prefix trees: a prompt that samples share is laid out once.

A tree is [prompt | answer 1 | ... | answer G], positions running along each path; a lone sequence is a tree with an
empty prompt and one leaf. A leaf attends to its prompt and to itself, so every path sees exactly what it would see as a
row of its own. The last token of the prompt predicts the first token of every answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.compute.batch import Batch, Ints, Piece, PrefixTree, balanced, packed_tokens, prefix_trees


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
    """Yield the batch in packed parts of at most `tokens` tokens each; see `bins`."""
    for trees in bins(batch, tokens):
        yield pack(batch, trees)


def bins(batch: Batch, tokens: int, count: int = 0) -> list[list[PrefixTree]]:
    """Distribute the samples over bins of about equal packed tokens, `tokens` at most; return them, the fullest first.

    count: how many bins are wanted; there are more where `tokens` would be exceeded, and fewer where there are fewer
    samples. A sample larger than `tokens` has a bin of its own. Groups are cut where that evens the bins, their prompt
    in each. Samples without a sampled token are left out: they predict nothing.
    """
    kept = np.flatnonzero(batch.sampled > 0)
    lengths = batch.lengths[kept]
    large = np.flatnonzero(lengths > tokens)
    found = [(int(lengths[s]), [PrefixTree(0, (int(kept[s]),))]) for s in large]
    shared: list[int] = []
    answers: list[list[tuple[int, int]]] = []
    for tree in prefix_trees(batch.select(kept)):
        if fitting := [(int(lengths[s]) - tree.shared, s) for s in tree.samples if lengths[s] <= tokens]:
            shared.append(tree.shared)
            answers.append(fitting)
    for pieces in _even(shared, answers, tokens, count - len(large)):
        own: dict[int, list[int]] = {}  # a bin may hold several pieces of a group
        for piece in pieces:
            own.setdefault(piece.group, []).extend(piece.samples)
        joined = [_tree(shared[group], kept[sorted(own[group])]) for group in sorted(own)]
        found.append((packed_tokens(pieces, shared), joined))
    return [trees for _, trees in sorted(found, key=lambda part: (-part[0], part[1][0].samples))]


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


def _even(
    shared: Sequence[int], answers: Sequence[list[tuple[int, int]]], tokens: int, count: int
) -> list[list[Piece]]:
    """Return the pieces of each bin: `count` bins or more, as few as hold `tokens` at most; none is empty."""
    total = sum(shared) + sum(own for group in answers for own, _ in group)
    parts = max(1, count, -(-total // tokens))
    while True:
        placed = balanced(shared, answers, parts)
        if all(packed_tokens(pieces, shared) <= tokens for pieces in placed):
            return [pieces for pieces in placed if pieces]
        parts += max(1, parts // 32)


def _tree(shared: int, samples: Ints) -> PrefixTree:
    """A lone sample shares its prompt with nobody."""
    return PrefixTree(shared if len(samples) > 1 else 0, tuple(samples.tolist()))
