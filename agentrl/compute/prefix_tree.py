"""`PrefixTree`: sequences as the paths of a tree, so that what some of them have in common is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

LEAST = 8
"""A common prefix is laid out by itself where it is so many tokens longer than the one around it. Below, computing it
once saves less than its segment costs."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """n samples of a batch, the paths of a tree in depth-first order.

    samples: int64 [n], indices into the batch. lengths: int64 [n], their tokens. shared: int64 [n], how many tokens at
    its beginning each has in common with the one before it and does not compute again; 0 for the first.
    """

    samples: Ints
    lengths: Ints
    shared: Ints

    @cached_property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return int((self.lengths - self.shared).sum())

    @property
    def pairs(self) -> int:
        """Pairs of computed tokens of which one attends to the other or to itself."""
        return int((self.lengths * (self.lengths + 1) - self.shared * (self.shared + 1)).sum()) // 2

    @cached_property
    def root(self) -> int | None:
        """What any two paths have in common; None where some have more than others."""
        behind = self.shared[1:]
        if len(behind) and (behind != behind[0]).any():
            return None
        return int(behind[0]) if len(behind) else 0

    def subset(self, places: Sequence[int] | Ints) -> "PrefixTree":
        """The tree of the paths at `places`, which ascend."""
        chosen = np.asarray(places, np.int64)
        return PrefixTree(self.samples[chosen], self.lengths[chosen], self._shared(chosen))

    def cost(self, places: Sequence[int] | Ints) -> int:
        """The tokens that are computed for the paths at `places`, which ascend."""
        chosen = np.asarray(places, np.int64)
        return int(self.lengths[chosen].sum() - self._shared(chosen).sum())

    def cost_between(self, low: int, high: int) -> int:
        """That of the paths low .. high - 1."""
        return int(self._sums[high] - self._sums[low] + self.shared[low])

    @cached_property
    def _sums(self) -> Ints:
        """The tokens that are computed for all paths before each, and for all."""
        return np.concatenate([[0], np.cumsum(self.lengths - self.shared)])

    def common(self, place: int) -> Ints:
        """How many tokens at its beginning the path at `place` has in common with each, int64 [n]."""
        before = np.minimum.accumulate(self.shared[1 : place + 1][::-1])[::-1]
        behind = np.minimum.accumulate(self.shared[place + 1 :])
        return np.concatenate([before, self.lengths[place : place + 1], behind])

    def _shared(self, places: Ints) -> Ints:
        """What each of these paths has in common with the one before it among them: the least of all between."""
        if len(places) == 1:
            return np.zeros(1, np.int64)
        between = self.shared[places[0] + 1 : places[-1] + 1]
        least = np.minimum.reduceat(between, places[:-1] - places[0])
        return np.concatenate([np.zeros(1, np.int64), least])


def prefix_tree(samples: Ints, rows: Sequence[npt.NDArray[np.generic]], least: int, outermost: int = 1) -> PrefixTree:
    """The tree of `rows`, the ids of `samples`. Branches stand in the order of their first samples.

    least: of any node but the outermost, the tokens that it adds; what is shorter is computed by each of its branches.
    outermost: those of an outermost node.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    if len(rows) == 1:
        return PrefixTree(samples, lengths, np.zeros(1, np.int64))
    ids = [row.tobytes() for row in rows]  # their order as bytes puts rows that begin alike next to each other
    order = sorted(range(len(rows)), key=ids.__getitem__)
    common = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    if min(common) == max(common) >= outermost:
        return PrefixTree(samples, lengths, np.array([0, *common], np.int64))
    places, shared = _depth_first(order, common, least, outermost)
    return PrefixTree(samples[places], lengths[places], np.array(shared, np.int64))


def _common(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> int:
    """How many ids at their beginning are equal."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass(slots=True)
class _Branch:
    """What several rows have in common, up to `depth`; `first` is the least of the rows below."""

    depth: int
    below: "list[int | _Branch]"
    first: int = 0

    def close(self) -> "_Branch":
        self.first = min(map(_first, self.below))
        return self

    def kept(self, least: int) -> "list[int | _Branch]":
        """Rows and branches below, in the order of their first rows; for a branch of fewer than `least` tokens its
        own."""
        found: list[int | _Branch] = []
        pending = list(self.below)
        while pending:
            child = pending.pop()
            if isinstance(child, _Branch) and self.depth > child.depth - least:
                pending.extend(child.below)
            else:
                found.append(child)
        return sorted(found, key=_first)


def _first(child: int | _Branch) -> int:
    return child if isinstance(child, int) else child.first


def _depth_first(
    order: Sequence[int], common: Sequence[int], least: int, outermost: int
) -> tuple[list[int], list[int]]:
    """Rows in depth-first order, and what each has in common with the one before.

    order: the rows, sorted by their ids; common: what each has in common with the next. least, outermost: see
    `prefix_tree`.
    """
    open_ = [_Branch(0, [])]
    for row, depth in zip(order, [*common, 0], strict=True):
        last: int | _Branch = row
        while open_[-1].depth > depth:
            open_[-1].below.append(last)
            last = open_.pop().close()
        if open_[-1].depth < depth:
            open_.append(_Branch(depth, []))
        open_[-1].below.append(last)
    rows: list[int] = []
    shared: list[int] = []
    pending: list[tuple[int | _Branch, int]] = [(open_[0], 0)]
    while pending:
        node, before = pending.pop()
        if isinstance(node, _Branch):
            children = node.kept(least if node.depth else outermost)
            depths = [before] + [node.depth] * (len(children) - 1)
            pending.extend(reversed(list(zip(children, depths, strict=True))))
        else:
            rows.append(node)
            shared.append(before)
    return rows, shared
