"""`Batch`: a step's samples as flat arrays with offsets, never padded to a rectangle; it pickles in microseconds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Group, Trajectory

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

SIZES = (np.inf, 1.0, 0.5, 0.25, 0.125, 0.0)  # of the largest piece, in shares of a part; 0: single samples
SLACK = 1.02  # whole groups are preferred as long as the fullest part is at most this much fuller


@dataclass(frozen=True, slots=True)
class Batch:
    """S samples, T tokens in all; sample i is the tokens offsets[i]:offsets[i + 1].

    offsets: int64 [S + 1]. tokens: columns [T], among them `ids` int32, `loss_mask` uint8 and `logprobs` float32 (the
    engine's, 0 where not sampled); later `advantages`, `old_logprobs`, `reference_logprobs`, likewise.
    samples: columns [S], among them `prompt_length` int32, `group` int64 (equal for samples of one task) and `reward`
    float32. Every operation keeps every column.

    A rollout that branched has a sample for each of its paths, next to each other: `loss_mask` is 1 for each trained
    token in one of them. Such batches have the sample column `rollout` int64, equal for the paths of one rollout, and
    the token column `began` int32, which orders a rollout's tokens by when they were sampled.
    """

    offsets: npt.NDArray[np.int64]
    tokens: Mapping[str, Array]
    samples: Mapping[str, Array]

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
        """The valid trajectories of all groups, in order; sample column `group` is the index into `groups`."""
        pairs = [(trajectory, index) for index, group in enumerate(groups) for trajectory in group.trajectories]
        return cls.from_trajectories([t for t, _ in pairs], [index for _, index in pairs])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, int64 [S]."""
        return np.diff(self.offsets)

    @property
    def sampled(self) -> npt.NDArray[np.int64]:
        """Sampled (masked-in) tokens of each sample, int64 [S]."""
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
        """Return the indices of these samples' tokens, one sample after the other, in the token columns."""
        lengths = self.lengths[indices]
        offsets = _offsets(lengths)
        where: npt.NDArray[np.int64] = np.arange(offsets[-1]) + np.repeat(
            self.offsets[:-1][indices] - offsets[:-1], lengths
        )
        return where

    def deal(self, parts: int) -> "Deal":
        """Distribute the samples over `parts` workers, balanced by packed tokens; see `deal`."""
        return deal(self, parts)

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
        """All samples in order. Group numbers are kept: number them apart beforehand if they must not mix.

        Raises ValueError when the batches' columns differ."""
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
    """Samples (indices into the batch) whose first `shared` ids are equal and computed once."""

    shared: int
    samples: tuple[int, ...]


def prefix_trees(batch: Batch) -> list[PrefixTree]:
    """Neighbouring samples of one group make a tree; they share the longest common prefix of their prompts."""
    trees = []
    groups = batch.samples["group"]
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(batch)] if len(batch) else [0]
    for low, high in pairwise(starts):
        samples = tuple(range(low, high))
        trees.append(PrefixTree(_common_prefix(batch, samples) if len(samples) > 1 else 0, samples))
    return trees


def _common_prefix(batch: Batch, samples: Sequence[int]) -> int:
    """How many ids at the start of the samples' prompts are equal."""
    prompts = [batch.tokens["ids"][batch.span(s)][: batch.samples["prompt_length"][s]] for s in samples]
    length = min(len(p) for p in prompts)
    for prompt in prompts[1:]:
        differs = np.flatnonzero(prompt[:length] != prompts[0][:length])
        length = int(differs[0]) if len(differs) else length
    return length


@dataclass(frozen=True, slots=True)
class Deal:
    """parts: the batches of the workers, some maybe empty. order: int64 [S], where their samples, one part after the
    other, stand in the batch that was dealt."""

    parts: list[Batch]
    order: Ints

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the workers' outputs for their parts, as if one worker had computed the whole batch.

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
class Piece:
    """Answers of one group that stay together: their tokens without the prompt, their samples."""

    group: int
    tokens: int
    samples: tuple[int, ...]


def deal(batch: Batch, parts: int) -> Deal:
    """Distribute the samples over `parts` parts, each in the order of the batch, deterministically.

    Groups stay whole where that balances: a worker computes a group's prompt once, for all samples of it that it has.
    Where it does not, they are split, and several workers compute their prompt.

    Samples without a sampled token are never computed, so they weigh nothing and stay with the sample before them.
    """
    kept = np.flatnonzero(batch.sampled > 0)
    lengths = batch.lengths[kept]
    trees = prefix_trees(batch.select(kept))
    shared = [tree.shared for tree in trees]
    answers = [[(int(lengths[s]) - tree.shared, s) for s in tree.samples] for tree in trees]
    owner = np.full(len(batch), -1)
    for part, pieces in enumerate(balanced(shared, answers, parts)):
        for piece in pieces:
            owner[kept[list(piece.samples)]] = part
    known = np.maximum.accumulate(np.where(owner >= 0, np.arange(len(batch)), 0))
    owner = np.maximum(owner[known], 0)
    chosen = [np.flatnonzero(owner == part) for part in range(parts)]
    return Deal([batch.select(indices) for indices in chosen], np.concatenate(chosen))


def balanced(shared: Sequence[int], answers: Sequence[list[tuple[int, int]]], parts: int) -> list[list[Piece]]:
    """Distribute groups over `parts` parts of about equal packed tokens; return the pieces of each, some maybe none.

    shared: tokens of each group's prompt. answers: of each group, (tokens without the prompt, sample). Of several ways
    to cut the groups the one that cuts least is taken, unless its fullest part is fuller.
    """
    ideal = sum(shared, sum(tokens for group in answers for tokens, _ in group)) / parts
    found: list[tuple[float, list[list[Piece]]]] = []
    for size in SIZES:
        pieces = [p for g, group in enumerate(answers) for p in _cut(g, shared[g], group, size * ideal)]
        placed = _evened(_placed(pieces, shared, parts), shared)
        found.append((max(packed_tokens(part, shared) for part in placed), placed))
    fullest = min(load for load, _ in found)
    return next(placed for load, placed in found if load <= SLACK * fullest)


def _cut(group: int, shared: int, answers: list[tuple[int, int]], size: float) -> Iterator[Piece]:
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
        yield Piece(group, sum(length for length, _ in chosen), tuple(sorted(s for _, s in chosen)))


def _placed(pieces: Sequence[Piece], shared: Sequence[int], parts: int) -> list[list[Piece]]:
    """The largest piece first, each where the load is least afterwards (LPT, Graham 1969; a prompt that a part has
    already costs nothing). Pieces of a group in one part become one."""
    loads = np.zeros(parts)
    there: dict[int, list[int]] = {}  # group -> the parts that compute its prompt
    placed: list[dict[int, list[Piece]]] = [{} for _ in range(parts)]
    for piece in sorted(pieces, key=lambda p: (-(p.tokens + shared[p.group]), p.samples)):
        after = loads + piece.tokens + shared[piece.group]
        after[there.get(piece.group, [])] -= shared[piece.group]
        part = int(after.argmin())
        loads[part] = after[part]
        if piece.group not in placed[part]:
            there.setdefault(piece.group, []).append(part)
        placed[part].setdefault(piece.group, []).append(piece)
    return [[_merged(pieces) for pieces in part.values()] for part in placed]


def _merged(pieces: Sequence[Piece]) -> Piece:
    samples = sorted(sample for piece in pieces for sample in piece.samples)
    return Piece(pieces[0].group, sum(piece.tokens for piece in pieces), tuple(samples))


def _evened(parts: list[list[Piece]], shared: Sequence[int]) -> list[list[Piece]]:
    """Pieces moved from the fullest part, or exchanged with another's, as long as that makes the two fullest less."""
    for _ in range(8 * len(parts)):
        loads = np.array([packed_tokens(part, shared) for part in parts])
        full = int(loads.argmax())
        for other in np.argsort(loads, kind="stable").tolist():
            if _exchanged(parts[full], parts[other], loads[full] - loads[other], shared):
                break
        else:
            break
    return parts


def _exchanged(full: list[Piece], other: list[Piece], gap: float, shared: Sequence[int]) -> bool:
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


def packed_tokens(pieces: Sequence[Piece], shared: Sequence[int]) -> int:
    """Return the packed tokens of a part."""
    return sum(piece.tokens for piece in pieces) + sum(shared[group] for group in {piece.group for piece in pieces})
