"""Pack samples into one row of shared-prefix trees, in which a prompt that samples share occurs once.

A tree is [prompt | answer 1 | ... | answer G], with positions along each path; a single sequence is a tree with an
empty prompt and one leaf. A leaf attends to its prompt and to itself, so that the result of each path is that of a row
of its own. The last token of the prompt predicts the first token of every answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.compute.batch import Batch, Ints, Piece, PrefixTree, balanced, packed_tokens, prefix_trees


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed tokens [start:end], which attend to all of [prefix_start:prefix_end] and causally to themselves."""

    start: int
    """Index of the first packed token."""
    end: int
    """Index after the last packed token."""
    prefix_start: int = 0
    """Start of its prefix."""
    prefix_end: int = 0
    """End of its prefix; equal to `prefix_start` without one."""
    predictions: int = 0
    """Number of its tokens that are predicted; 0 for a prompt. The row's predictions are in the order of the
    segments."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The input of one forward pass: P packed tokens with N predictions."""

    ids: Ints
    """int64 [P]: the token ids."""
    positions: Ints
    """int64 [P]: the position of each token along its path."""
    segments: tuple[Segment, ...]
    """Segments that cover every packed token once, prompts before their leaves."""
    predict: Ints
    """int64 [N]: the packed token whose hidden state predicts."""
    target: Ints
    """int64 [N]: the id that is predicted."""
    source: Ints
    """int64 [N]: the index of that id in the batch's token columns."""


def micro_batches(batch: Batch, tokens: int) -> Iterator[Packed]:
    """Yield the batch in packed rows of at most `tokens` tokens each; see `bins`."""
    for trees in bins(batch, tokens):
        yield pack(batch, trees)


def bins(batch: Batch, tokens: int, count: int = 0) -> list[list[PrefixTree]]:
    """Distribute the samples over bins of about equal packed tokens, `tokens` at most; return the trees of each bin,
    the fullest first.

    count: desired number of bins; there are more if `tokens` would be exceeded, and fewer if there are fewer samples. A
    sample larger than `tokens` has a bin of its own. Groups are split where that evens the bins, with their prompt in
    each. Samples without a sampled token are left out.
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
    """Return the trees as one packed row, one after another."""
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
    sources = np.concatenate([np.arange(low, high) for low, high, _ in pieces])
    predicted = np.concatenate(source)
    return Packed(
        ids=batch.tokens["ids"][sources].astype(np.int64),
        positions=np.concatenate([np.arange(first, first + high - low) for low, high, first in pieces]),
        segments=tuple(segments),
        predict=np.concatenate(predict),
        target=batch.tokens["ids"][predicted].astype(np.int64),
        source=predicted,
    )


def _even(
    shared: Sequence[int], answers: Sequence[list[tuple[int, int]]], tokens: int, count: int
) -> list[list[Piece]]:
    """Return the pieces of each bin, none of which is empty: the fewest bins, at least `count`, of at most `tokens`."""
    total = sum(shared) + sum(own for group in answers for own, _ in group)
    parts = max(1, count, -(-total // tokens))
    while True:
        placed = balanced(shared, answers, parts)
        if all(packed_tokens(pieces, shared) <= tokens for pieces in placed):
            return [pieces for pieces in placed if pieces]
        parts += max(1, parts // 32)


def _tree(shared: int, samples: Ints) -> PrefixTree:
    """Return the tree of these samples; a single one has no shared prefix."""
    return PrefixTree(shared if len(samples) > 1 else 0, tuple(samples.tolist()))
