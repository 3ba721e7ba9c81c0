"""A batch packed into one row of prefix trees: whatever samples have in common is laid out once.

A tree is laid out depth-first, in segments: [prompt | answer 1 | ... | answer G] where samples share their prompt
alone, else every common beginning, to any depth, and behind it what continues it. Positions run along each path. A
segment attends to those that it continues and to itself, so every path sees exactly what it would see as a row of its
own. The last token of a segment predicts the first token of each that continues it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from agentrl.compute.batch import ALLOWED, KEYED, Batch, Piece, balanced, joined, packed_tokens, prefix_trees
from agentrl.compute.prefix_tree import Ints, PrefixTree
from agentrl.constraint import Masks

Span = tuple[int, int]
"""Packed tokens, from the first to before the second."""


@dataclass(frozen=True, slots=True)
class Segment:
    """packed[start:end] attends to the spans of `prefix`, all of them, and causally to itself."""

    start: int
    """Index of the first packed token."""
    end: int
    """Index after the last packed token."""
    prefix: tuple[Span, ...] = ()
    """(start, end) of what it continues, from the root on."""

    @property
    def reach(self) -> int:
        """Tokens of the prefix."""
        return sum(end - start for start, end in self.prefix)


@dataclass(frozen=True, slots=True)
class Path:
    """A sample of the row: the spans that hold its tokens, in order, and how many of the row's predictions, in order,
    are its own."""

    spans: tuple[Span, ...]
    predictions: int


@dataclass(frozen=True, slots=True)
class Packed:
    """One forward pass: P packed tokens that hold N predictions.

    ids, positions: int64 [P]. segments: every packed token lies in exactly one, each behind those of its prefix and all
    that continue one next to each other (depth-first). paths: every sample. predict: int64 [N], the packed token whose
    hidden state predicts (-1 for the first of a path, which none does); predicted: int64 [N], the packed token that is
    predicted, and source: int64 [N], the same in the batch's token columns. A packed token that several samples have
    in common may be predicted for each of them.
    """

    ids: Ints
    """int64 [P]: the token ids; those of images negative (`images.keyed`)."""
    positions: Ints
    """int64 [P]: the position of each token along its path."""
    segments: tuple[Segment, ...]
    paths: tuple[Path, ...]
    predict: Ints
    predicted: Ints
    source: Ints
    """int64 [N]: the index of that id in the batch's token columns."""
    where: Ints
    """int64 [P]: the index of each packed token in the batch's token columns."""
    masks: Masks | None = None
    """Which ids were allowed where the predicted tokens were sampled; None: all of them."""

    @property
    def target(self) -> Ints:
        """The ids that are predicted, int64 [N]."""
        return self.ids[self.predicted]


def indices(spans: Sequence[Span]) -> Ints:
    """The packed tokens of all spans, in order."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end in spans)])


def micro_batches(batch: Batch, tokens: int) -> Iterator[Packed]:
    """Yield the batch in packed rows of at most `tokens` tokens each; see `bins`."""
    for trees in bins(batch, tokens):
        yield pack(batch, trees)


def bins(batch: Batch, tokens: int, count: int = 0) -> list[list[PrefixTree]]:
    """Distribute the samples over bins of about equal packed tokens, `tokens` at most; return the trees of each bin,
    the fullest first. Where the batch has the column `cost`, they are of about equal cost instead, unless that takes
    more bins. What groups of a bin have in common is computed once, too, and is not counted on.

    count: how many bins are wanted; there are more where `tokens` would be exceeded, and fewer where there are fewer
    samples. A sample larger than `tokens` has a bin of its own. Groups are cut where that evens the bins, what their
    parts have in common in each. Samples without a sampled token are left out: they predict nothing. The paths of a
    rollout stay together, also where that takes more than `tokens`.
    """
    lengths = batch.lengths
    kept = np.flatnonzero(batch.sampled > 0)
    large = kept[lengths[kept] > tokens]
    found = [[PrefixTree(s, lengths[s], np.zeros(1, np.int64))] for s in large[:, None]]
    trees = prefix_trees(batch, kept[lengths[kept] <= tokens])
    for pieces in _even(trees, batch.costing(trees), tokens, count - len(large)):
        own: dict[int, list[int]] = {}  # a bin may hold several pieces of a group
        for piece in pieces:
            own.setdefault(piece.tree, []).extend(piece.places)
        found.append([trees[index].subset(sorted(own[index])) for index in sorted(own)])
    if "rollout" in batch.samples:
        found = _undivided(batch, kept, found)
    rows = [list(joined(batch, part)) for part in found]
    return sorted(rows, key=lambda part: (-sum(t.tokens for t in batch.costing(part)), part[0].samples.tolist()))


def _undivided(batch: Batch, kept: Ints, bins: list[list[PrefixTree]]) -> list[list[PrefixTree]]:
    """The bins with all paths of each rollout in one of them."""
    owner = np.full(len(batch), -1)
    for index, trees in enumerate(bins):
        for tree in trees:
            owner[tree.samples] = index
    whole = batch.undivided(owner)
    if np.array_equal(whole, owner):
        return bins
    found: list[list[PrefixTree]] = [[] for _ in bins]
    for tree in prefix_trees(batch, kept):
        owners = whole[tree.samples]
        for index in np.unique(owners).tolist():
            found[index].append(tree.subset(np.flatnonzero(owners == index)))
    return [trees for trees in found if trees]


def pack(batch: Batch, trees: Sequence[PrefixTree]) -> Packed:
    """Lay the trees out in one row, one after another."""
    where: list[Ints] = []  # the packed tokens in the batch's token columns
    positions: list[Ints] = []
    segments: list[Segment] = []
    paths: list[Path] = []
    predictions: list[tuple[Ints, Ints, Ints]] = []
    cursor = 0
    for tree in trees:
        spans: list[Span] = []
        for sample, shared, edges in zip(tree.samples.tolist(), tree.shared.tolist(), _edges(tree), strict=True):
            first, end = int(batch.offsets[sample]), int(batch.offsets[sample + 1])
            spans = _beginning(spans, shared)
            for low, high in pairwise(edges):
                segments.append(Segment(cursor, cursor + high - low, tuple(spans)))
                spans = _joined(spans, (cursor, cursor + high - low))
                cursor += high - low
            where.append(np.arange(first + shared, end))
            positions.append(np.arange(shared, end - first))
            wanted = np.flatnonzero(batch.tokens["loss_mask"][first:end])
            paths.append(Path(tuple(spans), len(wanted)))
            path = np.concatenate([[-1], indices(spans)])
            predictions.append((path[wanted], path[wanted + 1], first + wanted))
    predict, predicted, source = (np.concatenate(column) for column in zip(*predictions, strict=True))
    tokens = np.concatenate(where)
    return Packed(
        ids=batch.tokens.get(KEYED, batch.tokens["ids"])[tokens].astype(np.int64),
        positions=np.concatenate(positions),
        segments=tuple(segments),
        paths=tuple(paths),
        predict=predict,
        predicted=predicted,
        source=source,
        where=tokens,
        masks=Masks.of(batch.tokens[ALLOWED][source]) if ALLOWED in batch.tokens else None,
    )


def _edges(tree: PrefixTree) -> list[list[int]]:
    """For each path where the tokens that it adds begin and end, and where between others branch off, as lengths of the
    path, ascending; empty where it adds none."""
    found: list[list[int]] = []
    laid: list[list[int]] = []  # of the paths that the tokens before are laid out with, the outermost first
    for shared, length in zip(tree.shared.tolist(), tree.lengths.tolist(), strict=True):
        edges = [shared, length] if length > shared else []
        found.append(edges)
        if edges:
            while laid and laid[-1][0] >= shared:
                laid.pop()
            if laid and shared < laid[-1][1]:  # depth-first: the deepest branch of a path comes first
                laid[-1].insert(1, shared)
            laid.append(edges)
    return found


def _beginning(spans: Sequence[Span], tokens: int) -> list[Span]:
    """The first `tokens` of the spans."""
    found: list[Span] = []
    for start, end in spans:
        if tokens <= 0:
            break
        found.append((start, min(end, start + tokens)))
        tokens -= end - start
    return found


def _joined(spans: list[Span], more: Span) -> list[Span]:
    """All of them, as one where they are neighbours."""
    if spans and spans[-1][1] == more[0]:
        return [*spans[:-1], (spans[-1][0], more[1])]
    return [*spans, more]


def _even(trees: list[PrefixTree], costs: list[PrefixTree], tokens: int, count: int) -> list[list[Piece]]:
    """The pieces of each bin: `count` bins or more, as few as hold `tokens` at most; none is empty. costs: the
    trees, with what their tokens cost."""
    parts = max(1, count, -(-sum(tree.tokens for tree in trees) // tokens))
    while True:
        for evened in (trees,) if costs is trees else (costs, trees):
            placed = balanced(evened, parts)
            if all(_packed(pieces, trees) <= tokens for pieces in placed):
                return [pieces for pieces in placed if pieces]
        parts += max(1, parts // 32)


def _packed(pieces: Sequence[Piece], trees: Sequence[PrefixTree]) -> int:
    """The packed tokens of a bin, whatever its pieces were measured in."""
    return packed_tokens([replace(one, tokens=trees[one.tree].cost(one.places)) for one in pieces], trees)
