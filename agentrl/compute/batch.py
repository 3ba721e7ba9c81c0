"""`Batch`: samples as flat arrays with offsets, without padding; and its partition over workers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Group, Trajectory

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

SIZES = (np.inf, 1.0, 0.5, 0.25, 0.125, 0.0)
"""Limits on the size of a piece that `balanced` tries, as shares of a part; 0: single samples."""
SLACK = 1.02
"""Larger pieces are preferred if their fullest part is at most this much fuller."""


@dataclass(frozen=True, slots=True)
class Batch:
    """S samples of T tokens in all; sample i is the tokens offsets[i]:offsets[i + 1]. Every method keeps every column.

    A rollout that branched has a sample for each of its paths, next to each other: `loss_mask` is 1 for each trained
    token in one of them.
    """

    offsets: npt.NDArray[np.int64]
    """int64 [S + 1]: where each sample begins, and the end of the last."""
    tokens: Mapping[str, Array]
    """Columns [T] by name: `ids` int32, `loss_mask` uint8 and `logprobs` float32 (the engine's, 0 where not sampled);
    added later: `advantages`, `old_logprobs`, `reference_logprobs`, `values` and others, float32. Of rollouts that
    branched also `began` int32, which orders a rollout's tokens by when they were sampled."""
    samples: Mapping[str, Array]
    """Columns [S] by name: `prompt_length` int32, `group` int64 (equal for samples of one task) and `reward` float32.
    Of rollouts that branched also `rollout` int64, equal for the paths of one."""

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], groups: Sequence[int] | None = None) -> "Batch":
        """One sample a trajectory, or a path of one that branched; `groups` says which belong together (None: each for
        itself)."""
        if any(t.segments for t in trajectories):
            return _from_trees(trajectories, range(len(trajectories)) if groups is None else groups)
        lengths = np.array([len(t.ids) for t in trajectories], np.int64)
        named = range(len(trajectories)) if groups is None else groups
        return cls(
            offsets=_offsets(lengths),
            tokens={
                "ids": _concatenate([t.ids for t in trajectories], np.int32),
                "loss_mask": _concatenate([t.loss_mask for t in trajectories], np.uint8),
                "logprobs": _concatenate([t.logprobs for t in trajectories], np.float32),
            },
            samples={
                "prompt_length": np.array([t.prompt_length for t in trajectories], np.int32),
                "group": np.array(list(named), np.int64),
                "reward": np.array([t.reward for t in trajectories], np.float32),
            },
        )

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> "Batch":
        """Return the valid trajectories of all groups, in order; the sample column `group` is the index into
        `groups`."""
        pairs = [(trajectory, index) for index, group in enumerate(groups) for trajectory in group.trajectories]
        return cls.from_trajectories([t for t, _ in pairs], [index for _, index in pairs])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each sample, int64 [S]."""
        return np.diff(self.offsets)

    @property
    def sampled(self) -> npt.NDArray[np.int64]:
        """Number of sampled tokens (loss mask 1) of each sample, int64 [S]."""
        total = np.concatenate([[0], np.cumsum(self.tokens["loss_mask"], dtype=np.int64)])
        counts: npt.NDArray[np.int64] = total[self.offsets[1:]] - total[self.offsets[:-1]]
        return counts

    @property
    def rollouts(self) -> npt.NDArray[np.int64]:
        """The rollout that each sample is a path of, int64 [S], numbered from 0 in the order of the batch."""
        if "rollout" not in self.samples:
            return np.arange(len(self))
        named = self.samples["rollout"]
        found: npt.NDArray[np.int64] = np.cumsum(np.concatenate([[0], named[1:] != named[:-1]])[: len(named)])
        return found

    def span(self, sample: int) -> slice:
        """Return the slice of a sample's tokens in the token columns."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))

    def spread(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Repeat one value per sample [S] over its sampled tokens [T]; 0 elsewhere."""
        spread: npt.NDArray[np.float32] = np.repeat(values, self.lengths) * self.tokens["loss_mask"]
        return spread.astype(np.float32)

    def with_tokens(self, **columns: Array) -> "Batch":
        """Return the batch with further (or replaced) token columns [T]."""
        self._check(columns, int(self.offsets[-1]))
        return replace(self, tokens={**self.tokens, **columns})

    def with_samples(self, **columns: Array) -> "Batch":
        """Return the batch with further (or replaced) sample columns [S]."""
        self._check(columns, len(self))
        return replace(self, samples={**self.samples, **columns})

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> "Batch":
        """Return the samples at `indices`, in that order; an index may occur twice."""
        chosen = np.asarray(indices, np.int64)
        positions = self.positions(chosen)
        return Batch(
            _offsets(self.lengths[chosen]),
            {name: column[positions] for name, column in self.tokens.items()},
            {name: column[chosen] for name, column in self.samples.items()},
        )

    def positions(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices in the token columns of the tokens of these samples, one sample after the other, int64."""
        lengths = self.lengths[indices]
        offsets = _offsets(lengths)
        positions: npt.NDArray[np.int64] = np.arange(offsets[-1]) + np.repeat(
            self.offsets[:-1][indices] - offsets[:-1], lengths
        )
        return positions

    def distribute(self, parts: int) -> "Partition":
        """Split the samples over `parts` workers by packed tokens, each part in the order of the batch; deterministic.

        Groups stay whole where that balances, since a worker computes the prompt of a group once for all of its
        samples. Where it does not, a group is split, and several workers compute its prompt. Samples without a sampled
        token are never computed: they count as 0 tokens, and stay with the sample before them.
        """
        kept = np.flatnonzero(self.sampled > 0)
        lengths = self.lengths[kept]
        trees = prefix_trees(self.select(kept))
        shared = [tree.shared for tree in trees]
        answers = [[(int(lengths[s]) - tree.shared, s) for s in tree.samples] for tree in trees]
        owner = np.full(len(self), -1)
        for part, pieces in enumerate(balanced(shared, answers, parts)):
            for piece in pieces:
                owner[kept[list(piece.samples)]] = part
        known = np.maximum.accumulate(np.where(owner >= 0, np.arange(len(self)), 0))
        owner = np.maximum(owner[known], 0)
        chosen = [np.flatnonzero(owner == part) for part in range(parts)]
        return Partition([self.select(indices) for indices in chosen], np.concatenate(chosen))

    def split(self, parts: int) -> "list[Batch]":
        """Return `parts` runs of consecutive rollouts whose counts differ by at most one; some may be empty."""
        starts = np.append(np.flatnonzero(np.diff(self.rollouts, prepend=-1)), len(self))
        count = len(starts) - 1
        bounds = [int(starts[count * i // parts]) for i in range(parts + 1)]
        return [self.select(np.arange(low, high)) for low, high in pairwise(bounds)]

    def repeat(self, times: int) -> "Batch":
        """Return every sample `times` times, the copies next to each other."""
        return self.select(np.repeat(np.arange(len(self)), times))

    @staticmethod
    def concat(batches: "Sequence[Batch]") -> "Batch":
        """Return all samples in order. Groups keep their numbers, so that equal numbers become one group.

        Raises ValueError if the batches have different columns.
        """
        first = batches[0]
        for other in batches[1:]:
            if set(other.tokens) != set(first.tokens) or set(other.samples) != set(first.samples):
                raise ValueError(f"cannot join batches with columns {_columns(first)} and {_columns(other)}")
        return Batch(
            _offsets(np.concatenate([b.lengths for b in batches])),
            {name: np.concatenate([b.tokens[name] for b in batches]) for name in first.tokens},
            {name: np.concatenate([b.samples[name] for b in batches]) for name in first.samples},
        )

    @staticmethod
    def _check(columns: Mapping[str, Array], length: int) -> None:
        if wrong := {name: len(column) for name, column in columns.items() if len(column) != length}:
            raise ValueError(f"columns must have {length} entries, but have {wrong}")


def _from_trees(trajectories: Sequence[Trajectory], groups: Sequence[int]) -> Batch:
    """Return the paths of the trajectories. Of each, those that train a token; one at least, for its reward."""
    paths: list[Ints] = []
    masks: list[Array] = []
    owners: list[int] = []
    for index, t in enumerate(trajectories):
        left = t.loss_mask.copy()  # trained tokens that no path has yet
        found = t.paths()
        kept = []
        for path in found:
            mask = left[path]
            if mask.any():
                left[path] = 0
                kept.append((path, mask))
        for path, mask in kept or [(found[0], np.zeros(len(found[0]), np.uint8))]:
            paths.append(path)
            masks.append(mask)
            owners.append(index)
    whole = [trajectories[index] for index in owners]
    return Batch(
        offsets=_offsets(np.array([len(path) for path in paths], np.int64)),
        tokens={
            "ids": _concatenate([t.ids[path] for t, path in zip(whole, paths, strict=True)], np.int32),
            "loss_mask": _concatenate(masks, np.uint8),
            "logprobs": _concatenate(
                [t.logprobs[p] * m for t, p, m in zip(whole, paths, masks, strict=True)], np.float32
            ),
            "began": _concatenate(paths, np.int32),
        },
        samples={
            "prompt_length": np.array([_first(mask) for mask in masks], np.int32),
            "group": np.array([groups[index] for index in owners], np.int64),
            "reward": np.array([t.reward for t in whole], np.float32),
            "rollout": np.array(owners, np.int64),
        },
    )


def _first(mask: Array) -> int:
    """Return the index of the first token that is set; the length where none is."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _concatenate(arrays: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _columns(batch: Batch) -> list[str]:
    return sorted([*batch.tokens, *batch.samples])


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Samples whose first ids are equal, and computed once."""

    shared: int
    """Length of the shared prefix, in tokens."""
    samples: tuple[int, ...]
    """Indices into the batch."""


def prefix_trees(batch: Batch) -> list[PrefixTree]:
    """Return a tree for each run of consecutive samples of a group; its prefix is the longest that their prompts
    share."""
    trees = []
    groups = batch.samples["group"]
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(batch)] if len(batch) else [0]
    for low, high in pairwise(starts):
        samples = tuple(range(low, high))
        trees.append(PrefixTree(_common_prefix(batch, samples) if len(samples) > 1 else 0, samples))
    return trees


def _common_prefix(batch: Batch, samples: Sequence[int]) -> int:
    """Return the length of the longest common prefix of the samples' prompts."""
    prompts = [batch.tokens["ids"][batch.span(s)][: batch.samples["prompt_length"][s]] for s in samples]
    length = min(len(p) for p in prompts)
    for prompt in prompts[1:]:
        differs = np.flatnonzero(prompt[:length] != prompts[0][:length])
        length = int(differs[0]) if len(differs) else length
    return length


@dataclass(frozen=True, slots=True)
class Partition:
    """A batch split over workers."""

    parts: list[Batch]
    """The batch of each worker; some may be empty."""
    order: Ints
    """int64 [S]: the index in the whole batch of each sample, one part after the other."""

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the workers' outputs for their parts, as if one worker had computed the whole batch.

        Batches, and arrays [tokens of the part, ...] or [samples of the part, ...], are put into the order of the whole
        batch; objects with `merge(others)` are merged; None stays None. Raises ValueError for anything else.
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
            lengths = Batch.concat([Batch(part.offsets, {}, {}) for part in self.parts])
            by_token: npt.NDArray[Any] = joined[lengths.positions(np.argsort(self.order))]
            return by_token
        if sizes == [len(part) for part in self.parts]:
            by_sample: npt.NDArray[Any] = joined[np.argsort(self.order)]
            return by_sample
        raise ValueError(f"outputs of {sizes} entries are neither the parts' tokens nor their samples")


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one group that stay in one part."""

    group: int
    """Index of the group."""
    tokens: int
    """Their tokens without the shared prompt."""
    samples: tuple[int, ...]
    """Indices of the samples."""


def balanced(shared: Sequence[int], answers: Sequence[list[tuple[int, int]]], parts: int) -> list[list[Piece]]:
    """Distribute groups over `parts` parts of about equal packed tokens; return the pieces of each part, perhaps none.

    shared: number of tokens of each group's shared prompt. answers: for each group, (tokens without the prompt,
    sample). Groups are cut by several limits in turn (SIZES), and the one that cuts least is chosen among those whose
    fullest part is within SLACK of the best.
    """
    ideal = sum(shared, sum(tokens for group in answers for tokens, _ in group)) / parts
    found: list[tuple[float, list[list[Piece]]]] = []
    for size in SIZES:
        pieces = [p for g, group in enumerate(answers) for p in _cut(g, shared[g], group, size * ideal)]
        placed = _rebalanced(_assigned(pieces, shared, parts), shared)
        found.append((max(packed_tokens(part, shared) for part in placed), placed))
    fullest = min(load for load, _ in found)
    return next(placed for load, placed in found if load <= SLACK * fullest)


def _cut(group: int, shared: int, answers: list[tuple[int, int]], size: float) -> Iterator[Piece]:
    """Cut a group into the fewest pieces, of about equal size, of at most `size` tokens with their prompt, or of one
    answer."""
    tokens = sum(length for length, _ in answers)
    count = 1 if shared + tokens <= size else min(len(answers), int(-(-tokens // max(1.0, size - shared))))
    bins: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    loads = np.zeros(count)
    for answer in sorted(answers, key=lambda a: (-a[0], a[1])):
        lightest = int(loads.argmin())
        bins[lightest].append(answer)
        loads[lightest] += max(1, answer[0])
    for chosen in bins:
        yield Piece(group, sum(length for length, _ in chosen), tuple(sorted(s for _, s in chosen)))


def _assigned(pieces: Sequence[Piece], shared: Sequence[int], parts: int) -> list[list[Piece]]:
    """Assign the pieces to parts, the largest first, each to the part with the least load afterwards (LPT, Graham 1969;
    a prompt that a part has already costs nothing). Pieces of one group in one part become one piece."""
    loads = np.zeros(parts)
    computing: dict[int, list[int]] = {}  # group -> the parts that compute its prompt
    placed: list[dict[int, list[Piece]]] = [{} for _ in range(parts)]
    for piece in sorted(pieces, key=lambda p: (-(p.tokens + shared[p.group]), p.samples)):
        after = loads + piece.tokens + shared[piece.group]
        after[computing.get(piece.group, [])] -= shared[piece.group]
        part = int(after.argmin())
        loads[part] = after[part]
        if piece.group not in placed[part]:
            computing.setdefault(piece.group, []).append(part)
        placed[part].setdefault(piece.group, []).append(piece)
    return [[_merged(pieces) for pieces in part.values()] for part in placed]


def _merged(pieces: Sequence[Piece]) -> Piece:
    samples = sorted(sample for piece in pieces for sample in piece.samples)
    return Piece(pieces[0].group, sum(piece.tokens for piece in pieces), tuple(samples))


def _rebalanced(parts: list[list[Piece]], shared: Sequence[int]) -> list[list[Piece]]:
    """Move pieces out of the fullest part, or exchange them with another part's, as long as that lowers the fuller of
    the two."""
    for _ in range(8 * len(parts)):
        loads = np.array([packed_tokens(part, shared) for part in parts])
        full = int(loads.argmax())
        for other in np.argsort(loads, kind="stable").tolist():
            if _moved(parts[full], parts[other], loads[full] - loads[other], shared):
                break
        else:
            break
    return parts


def _moved(full: list[Piece], other: list[Piece], gap: float, shared: Sequence[int]) -> bool:
    """Move one piece from `full` to `other`, or exchange two, so that the change in tokens is nearest to half of `gap`;
    return False if no move changes less than `gap`."""
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


def packed_tokens(pieces: Sequence[Piece], shared: Sequence[int]) -> int:
    """Return the number of packed tokens of a part: each prompt counts once. shared: see `balanced`."""
    return sum(piece.tokens for piece in pieces) + sum(shared[group] for group in {piece.group for piece in pieces})
