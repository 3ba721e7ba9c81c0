"""A batch dealt over workers: each gets about as many packed tokens, and every sample goes to exactly one.

What a worker computes for a group is its prompt once and the answers that the worker has of it. So groups stay whole
where that balances, and are dealt out (their prompt then computed by several workers) where it does not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.compute.batch import Batch
from agentrl.compute.packing import prefix_trees

Ints = npt.NDArray[np.int64]

SIZES = (np.inf, 1.0, 0.5, 0.25, 0.125, 0.0)  # largest pieces tried, in shares of a worker's part; 0: single samples
SLACK = 1.02  # whole groups are preferred as long as the fullest part is at most this much fuller


@dataclass(frozen=True, slots=True)
class Deal:
    """parts: the batches of the workers, some maybe empty. order: int64 [S], where their samples, one part after the
    other, stand in the batch that was dealt."""

    parts: list[Batch]
    order: Ints

    def join(self, outputs: Sequence[Any]) -> Any:
        """What the workers gave for their parts, as if one had done the whole batch.

        Arrays [a part's tokens, ...] or [a part's samples, ...] are put in the batch's order, as are batches; objects
        with `merge(others)` are merged; None stays None. Raises ValueError for anything else.
        """
        if len(outputs) != len(self.parts):
            raise ValueError(f"{len(outputs)} outputs for {len(self.parts)} parts")
        first = outputs[0]
        if all(output is None for output in outputs):
            return None
        if all(isinstance(output, Batch) for output in outputs):
            return Batch.concat(outputs).select(np.argsort(self.order))
        if all(isinstance(output, np.ndarray) for output in outputs):
            return self._column(outputs)
        if all(hasattr(output, "merge") for output in outputs):
            return first.merge(list(outputs[1:]))
        raise ValueError(f"cannot join outputs of type {', '.join(sorted({type(o).__name__ for o in outputs}))}")

    def _column(self, outputs: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        sizes = [len(output) for output in outputs]
        joined = np.concatenate([output for output in outputs if len(output)] or [outputs[0]])
        if sizes == [int(part.offsets[-1]) for part in self.parts]:
            dealt = Batch.concat([Batch(part.offsets, {}, {}) for part in self.parts])
            back: npt.NDArray[Any] = joined[dealt.positions(np.argsort(self.order))]
            return back
        if sizes == [len(part) for part in self.parts]:
            whole: npt.NDArray[Any] = joined[np.argsort(self.order)]
            return whole
        raise ValueError(f"outputs of {sizes} entries are neither the parts' tokens nor their samples")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Answers of one group that stay together: their tokens without the prompt, their samples."""

    group: int
    tokens: int
    samples: tuple[int, ...]


def deal(batch: Batch, parts: int) -> Deal:
    """The samples in `parts` parts, each in the order of the batch; the same batch is always dealt alike.

    Samples without a sampled token are never computed, so they weigh nothing and stay with the sample before them.
    """
    kept = np.flatnonzero(batch.sampled > 0)
    lengths = batch.lengths[kept]
    trees = prefix_trees(batch.select(kept))
    shared = [tree.shared for tree in trees]
    answers = [[(int(lengths[s]) - tree.shared, s) for s in tree.samples] for tree in trees]
    owner = np.full(len(batch), -1)
    for part, pieces in enumerate(_balanced(shared, answers, parts)):
        for piece in pieces:
            owner[kept[list(piece.samples)]] = part
    known = np.maximum.accumulate(np.where(owner >= 0, np.arange(len(batch)), 0))
    owner = np.maximum(owner[known], 0)
    chosen = [np.flatnonzero(owner == part) for part in range(parts)]
    return Deal([batch.select(indices) for indices in chosen], np.concatenate(chosen))


def _balanced(shared: Sequence[int], answers: Sequence[list[tuple[int, int]]], parts: int) -> list[list[_Piece]]:
    """The pieces of each part: of several ways to cut the groups the one that cuts least, unless it is fuller."""
    ideal = sum(shared, sum(tokens for group in answers for tokens, _ in group)) / parts
    found: list[tuple[float, list[list[_Piece]]]] = []
    for size in SIZES:
        pieces = [p for g, group in enumerate(answers) for p in _cut(g, shared[g], group, size * ideal)]
        placed = _evened(_placed(pieces, shared, parts), shared)
        found.append((max(_load(part, shared) for part in placed), placed))
    fullest = min(load for load, _ in found)
    return next(placed for load, placed in found if load <= SLACK * fullest)


def _cut(group: int, shared: int, answers: list[tuple[int, int]], size: float) -> Iterator[_Piece]:
    """A group in the fewest pieces of at most `size` tokens with their prompt (or of one answer), about equal ones."""
    tokens = sum(length for length, _ in answers)
    count = 1 if shared + tokens <= size else min(len(answers), int(-(-tokens // max(1.0, size - shared))))
    bins: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    loads = np.zeros(count)
    for answer in sorted(answers, key=lambda a: (-a[0], a[1])):
        place = int(loads.argmin())
        bins[place].append(answer)
        loads[place] += max(1, answer[0])
    for chosen in bins:
        yield _Piece(group, sum(length for length, _ in chosen), tuple(sorted(s for _, s in chosen)))


def _placed(pieces: Sequence[_Piece], shared: Sequence[int], parts: int) -> list[list[_Piece]]:
    """The largest piece first, each where the load is least afterwards (LPT, Graham 1969; a prompt that a part has
    already costs nothing). Pieces of a group in one part become one."""
    loads = np.zeros(parts)
    there: dict[int, list[int]] = {}  # group -> the parts that compute its prompt
    placed: list[dict[int, list[_Piece]]] = [{} for _ in range(parts)]
    for piece in sorted(pieces, key=lambda p: (-(p.tokens + shared[p.group]), p.samples)):
        after = loads + piece.tokens + shared[piece.group]
        after[there.get(piece.group, [])] -= shared[piece.group]
        part = int(after.argmin())
        loads[part] = after[part]
        if piece.group not in placed[part]:
            there.setdefault(piece.group, []).append(part)
        placed[part].setdefault(piece.group, []).append(piece)
    return [[_merged(pieces) for pieces in part.values()] for part in placed]


def _merged(pieces: Sequence[_Piece]) -> _Piece:
    samples = sorted(sample for piece in pieces for sample in piece.samples)
    return _Piece(pieces[0].group, sum(piece.tokens for piece in pieces), tuple(samples))


def _evened(parts: list[list[_Piece]], shared: Sequence[int]) -> list[list[_Piece]]:
    """Pieces moved from the fullest part, or exchanged with another's, as long as that makes the two fullest less."""
    for _ in range(8 * len(parts)):
        loads = np.array([_load(part, shared) for part in parts])
        full = int(loads.argmax())
        for other in np.argsort(loads, kind="stable").tolist():
            if _exchanged(parts[full], parts[other], loads[full] - loads[other], shared):
                break
        else:
            break
    return parts


def _exchanged(full: list[_Piece], other: list[_Piece], gap: float, shared: Sequence[int]) -> bool:
    """Give the piece, or exchange the two, whose difference in tokens is nearest to half the gap; False if none is."""
    given = np.array([p.tokens + shared[p.group] for p in full], float)
    taken = np.array([0, *(p.tokens + shared[p.group] for p in other)], float)
    change = given[:, None] - taken
    change[(change <= 0) | (change >= gap)] = np.inf
    off = np.abs(change - gap / 2)
    if not np.isfinite(off).any():
        return False
    i, j = np.unravel_index(int(off.argmin()), off.shape)
    swapped = full.pop(int(i))
    if j:
        full.append(other.pop(int(j) - 1))
    other.append(swapped)
    return True


def _load(pieces: Sequence[_Piece], shared: Sequence[int]) -> int:
    """Packed tokens of a part."""
    return sum(piece.tokens for piece in pieces) + sum(shared[group] for group in {piece.group for piece in pieces})
