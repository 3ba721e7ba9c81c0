"""`Batch`: samples as flat arrays with offsets, without padding; and its partition over workers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.compute.prefix_tree import LEAST, Ints, PrefixTree, prefix_tree
from agentrl.images import keyed
from agentrl.trajectory import Group, Trajectory

Array = npt.NDArray[Any]

KEYED = "keyed_ids"
"""The token column of a batch with images that is computed in place of `ids`."""
ALLOWED = "allowed"
"""The token column of a batch with tokens that were sampled under a constraint: `constraint.Allowed`."""
COST = "cost"
"""The token column by which workers and micro-batches are evened, int32; without it each token costs as much."""
SIZES = (np.inf, 1.0, 0.5, 0.25, 0.125, 0.0)
"""Limits on the size of a piece that `balanced` tries, as shares of a part; 0: single samples."""
SLACK = 1.02
"""Larger pieces are preferred if their fullest part is at most this much fuller."""
SAVED = 1 / 32
"""Share of a row's tokens that must be saved for groups to be laid out as one tree, whose segments are deeper."""
SAVED_OF_SINGLE_SAMPLES = 1 / 4
"""The same where no group has samples in common: sequences that share nothing have faster kernels on a GPU."""


@dataclass(frozen=True, slots=True)
class Batch:
    """S samples of T tokens in all; sample i is the tokens offsets[i]:offsets[i + 1]. Every method keeps every column.

    A rollout that branched has a sample for each of its paths, next to each other: `loss_mask` is 1 for each trained
    token in one of them.
    """

    offsets: npt.NDArray[np.int64]
    """int64 [S + 1]: where each sample begins, and the end of the last."""
    tokens: Mapping[str, Array]
    """Columns [T] by name: `ids` int32, `loss_mask` uint8 and `logprobs` float32 (the engine's, 0 where not sampled; of
    a token that several paths share, on each of them); added later: `advantages`, `old_logprobs`, `reference_logprobs`,
    `values` and others, float32. Of rollouts that branched also `began` int32, which orders a rollout's tokens by when
    they were sampled. Where there are images `keyed_ids` int64: `ids` whose placeholders say their image
    (`images.keyed`). Where tokens were sampled under a constraint `allowed` object: which ids were allowed there
    (`constraint.Allowed`)."""
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
        routed = [t.experts for t in trajectories if t.experts is not None]
        experts = {"experts": np.concatenate(routed)} if routed and len(routed) == len(trajectories) else {}
        named = range(len(trajectories)) if groups is None else groups
        return cls(
            offsets=_offsets(lengths),
            tokens=_keyed(trajectories, [slice(None)] * len(trajectories))
            | _allowed(trajectories, [slice(None)] * len(trajectories))
            | {
                "ids": _concatenate([t.ids for t in trajectories], np.int32),
                "loss_mask": _concatenate([t.loss_mask for t in trajectories], np.uint8),
                "logprobs": _concatenate([t.logprobs for t in trajectories], np.float32),
                **experts,
            },
            samples={
                "prompt_length": np.array([t.prompt_length for t in trajectories], np.int32),
                "group": np.array(list(named), np.int64),
                "reward": np.array([t.reward for t in trajectories], np.float32),
            },
        )

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> "Batch":
        """The valid trajectories of all groups, in order; the sample column `group` is the index into
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
        return np.cumsum(np.concatenate([[0], named[1:] != named[:-1]])[: len(named)])

    def span(self, sample: int) -> slice:
        """The slice of a sample's tokens in the token columns."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))

    def spread(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Repeat one value per sample [S] over its sampled tokens [T]; 0 elsewhere."""
        spread: npt.NDArray[np.float32] = np.repeat(values, self.lengths) * self.tokens["loss_mask"]
        return spread.astype(np.float32)

    def with_tokens(self, **columns: Array) -> "Batch":
        """The batch with further (or replaced) token columns [T]."""
        self._check(columns, int(self.offsets[-1]))
        return replace(self, tokens={**self.tokens, **columns})

    def with_samples(self, **columns: Array) -> "Batch":
        """The batch with further (or replaced) sample columns [S]."""
        self._check(columns, len(self))
        return replace(self, samples={**self.samples, **columns})

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> "Batch":
        """The samples at `indices`, in that order; an index may occur twice."""
        chosen = np.asarray(indices, np.int64)
        positions = self.positions(chosen)
        return Batch(
            _offsets(self.lengths[chosen]),
            {name: column[positions] for name, column in self.tokens.items()},
            {name: column[chosen] for name, column in self.samples.items()},
        )

    def positions(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices in the token columns of the tokens of these samples, one sample after the other, int64."""
        lengths = self.lengths[indices]
        offsets = _offsets(lengths)
        positions: npt.NDArray[np.int64] = np.arange(offsets[-1]) + np.repeat(
            self.offsets[:-1][indices] - offsets[:-1], lengths
        )
        return positions

    def distribute(self, parts: int) -> "Partition":
        """Split the samples over `parts` workers by packed tokens, each part in the order of the batch; deterministic.

        Groups stay whole where that balances: a worker computes what samples of a group have in common once, for all of
        them that it has. Where it does not, a group is split, and several workers compute it. Samples without a sampled
        token are never computed: they count as 0 tokens, and stay with the sample before them. The column `cost`, where
        there is one, says what each token counts.
        """
        trees = self.costing(prefix_trees(self, np.flatnonzero(self.sampled > 0)))
        owner = np.full(len(self), -1)
        for part, pieces in enumerate(balanced(trees, parts)):
            for piece in pieces:
                owner[trees[piece.tree].samples[list(piece.places)]] = part
        known = np.maximum.accumulate(np.where(owner >= 0, np.arange(len(self)), 0))
        owner = self.undivided(np.maximum(owner[known], 0))
        chosen = [np.flatnonzero(owner == part) for part in range(parts)]
        return Partition([self.select(indices) for indices in chosen], np.concatenate(chosen))

    def with_image_cost(self, features: float) -> "Batch":
        """The batch with the column `cost`, in sixteenths of a token, if it holds images: a placeholder costs
        `features` tokens more than another token."""
        if KEYED not in self.tokens or COST in self.tokens or not features:
            return self
        return self.with_tokens(
            **{COST: np.where(self.tokens[KEYED] < 0, round(16 * (1 + features)), 16).astype(np.int32)}
        )

    def costing(self, trees: list[PrefixTree]) -> list[PrefixTree]:
        """The trees with costs in place of tokens, themselves where each token costs as much."""
        if COST not in self.tokens:
            return trees
        before = _offsets(self.tokens[COST])
        starts = [self.offsets[tree.samples] for tree in trees]
        return [
            PrefixTree(
                tree.samples, *(before[start + tokens] - before[start] for tokens in (tree.lengths, tree.shared))
            )
            for tree, start in zip(trees, starts, strict=True)
        ]

    def undivided(self, owner: Ints) -> Ints:
        """`owner`, int64 [S], the part of each sample, with all paths of a rollout in the part that has most of
        its tokens: a loss may compare a rollout's tokens as a whole."""
        if "rollout" not in self.samples or not len(self):
            return owner
        rollouts, tokens = self.rollouts, np.zeros((int(self.rollouts[-1]) + 1, int(owner.max()) + 1), np.int64)
        there = owner >= 0
        np.add.at(tokens, (rollouts[there], owner[there]), self.lengths[there])
        return np.where(there, tokens.argmax(1)[rollouts], owner)

    def split(self, parts: int) -> "list[Batch]":
        """`parts` runs of consecutive rollouts whose counts differ by at most one; some may be empty."""
        starts = np.append(np.flatnonzero(np.diff(self.rollouts, prepend=-1)), len(self))
        count = len(starts) - 1
        bounds = [int(starts[count * i // parts]) for i in range(parts + 1)]
        return [self.select(np.arange(low, high)) for low, high in pairwise(bounds)]

    def repeat(self, times: int) -> "Batch":
        """Every sample `times` times, the copies next to each other."""
        return self.select(np.repeat(np.arange(len(self)), times))

    @staticmethod
    def concat(batches: "Sequence[Batch]") -> "Batch":
        """All samples in order. Groups keep their numbers, so that equal numbers become one group.

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
    """The paths of the trajectories. Of each, those that train a token; one at least, for its reward."""
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
        tokens=_keyed(whole, paths)
        | _allowed(whole, paths)
        | {
            "ids": _concatenate([t.ids[path] for t, path in zip(whole, paths, strict=True)], np.int32),
            "loss_mask": _concatenate(masks, np.uint8),
            "logprobs": _concatenate([t.logprobs[path] for t, path in zip(whole, paths, strict=True)], np.float32),
            "began": _concatenate(paths, np.int32),
        },
        samples={
            "prompt_length": np.array([_first(mask) for mask in masks], np.int32),
            "group": np.array([groups[index] for index in owners], np.int64),
            "reward": np.array([t.reward for t in whole], np.float32),
            "rollout": np.array(owners, np.int64),
        },
    )


def _keyed(trajectories: Sequence[Trajectory], paths: Sequence[Ints | slice]) -> dict[str, Array]:
    """The column `keyed_ids` of these paths of the trajectories, where there are images."""
    if not any(t.images for t in trajectories):
        return {}
    rows = [keyed(t.ids, t.images)[path] for t, path in zip(trajectories, paths, strict=True)]
    return {KEYED: _concatenate(rows, np.int64)}


def _allowed(trajectories: Sequence[Trajectory], paths: Sequence[Ints | slice]) -> dict[str, Array]:
    """The column ALLOWED of these paths of the trajectories, where any token was sampled under a constraint."""
    if all(t.allowed is None for t in trajectories):
        return {}
    rows = [
        np.full(len(t.ids), None, object)[path] if t.allowed is None else t.allowed[path]
        for t, path in zip(trajectories, paths, strict=True)
    ]
    return {ALLOWED: _concatenate(rows, np.object_)}


def _first(mask: Array) -> int:
    """The index of the first token that is set; the length where none is."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _concatenate(arrays: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _columns(batch: Batch) -> list[str]:
    return sorted([*batch.tokens, *batch.samples])


def prefix_trees(batch: Batch, samples: Ints | None = None, least: int | None = None) -> list[PrefixTree]:
    """Neighbouring samples of one group make a tree, whatever they have in common: prompts, turns, answers.

    samples: those that count, ascending (None: all). least: see `prefix_tree` (None: LEAST).
    """
    chosen = np.arange(len(batch)) if samples is None else samples
    groups, ids = batch.samples["group"][chosen], batch.tokens.get(KEYED, batch.tokens["ids"])
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(chosen)] if len(chosen) else [0]
    return [
        prefix_tree(chosen[low:high], [ids[batch.span(s)] for s in chosen[low:high].tolist()], least or LEAST)
        for low, high in pairwise(starts)
    ]


def joined(batch: Batch, trees: Sequence[PrefixTree]) -> Sequence[PrefixTree]:
    """Trees of groups as one, for a single row: what all or some of them begin with, such as a system prompt and the
    schemas of tools, is computed once; `trees` where that saves too little."""
    if len(trees) < 2:
        return trees
    samples, ids = np.concatenate([tree.samples for tree in trees]), batch.tokens.get(KEYED, batch.tokens["ids"])
    tree = prefix_tree(samples, [ids[batch.span(s)] for s in samples.tolist()], LEAST, LEAST)
    tokens = sum(tree.tokens for tree in trees)
    share = SAVED if any(len(tree.samples) > 1 for tree in trees) else SAVED_OF_SINGLE_SAMPLES
    return [tree] if tokens - tree.tokens >= share * tokens else trees


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
        batch; objects with `merge(others)` are merged, and such arrays in a mapping `columns` of theirs joined; None
        stays None. Raises ValueError for anything else.
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
            columns = {
                name: self._column([output.columns[name] for output in outputs])
                for name in getattr(first, "columns", ())
            }
            merged = first.merge(list(outputs[1:]))
            if columns:
                merged.columns = columns
            return merged
        raise ValueError(f"cannot join outputs of type {', '.join(sorted({type(o).__name__ for o in outputs}))}")

    def _column(self, outputs: Sequence[Array]) -> Array:
        sizes = [len(output) for output in outputs]
        joined = np.concatenate([output for output in outputs if len(output)] or [outputs[0]])
        if sizes == [int(part.offsets[-1]) for part in self.parts]:
            lengths = Batch.concat([Batch(part.offsets, {}, {}) for part in self.parts])
            return joined[lengths.positions(np.argsort(self.order))]
        if sizes == [len(part) for part in self.parts]:
            return joined[np.argsort(self.order)]
        raise ValueError(f"outputs of {sizes} entries are neither the parts' tokens nor their samples")


@dataclass(frozen=True, slots=True)
class Piece:
    """Paths of one tree that stay together: their places in it, ascending, and the tokens computed for them alone."""

    tree: int
    tokens: int
    places: tuple[int, ...]


def balanced(trees: Sequence[PrefixTree], parts: int) -> list[list[Piece]]:
    """Distribute trees over `parts` parts of about equal packed tokens; return the pieces of each, some maybe none.

    Of several ways to cut the trees the one that cuts least is taken, unless its fullest part is fuller.
    """
    if parts == 1:
        return [[Piece(index, tree.tokens, tuple(range(len(tree.samples)))) for index, tree in enumerate(trees)]]
    ideal = sum(tree.tokens for tree in trees) / parts
    found: list[tuple[float, list[list[Piece]]]] = []
    for way in _ways(trees, parts, ideal):
        placed = _evened(way, trees)
        found.append((max(packed_tokens(part, trees) for part in placed), placed))
        fullest = min(load for load, _ in found)
        load, best = next(one for one in found if one[0] <= SLACK * fullest)
        if load <= SLACK * ideal:  # no way has a fullest part below the mean, so none of the others can displace it
            break
    return best


def _ways(trees: Sequence[PrefixTree], parts: int, ideal: float) -> Iterator[list[list[Piece]]]:
    """The trees in parts, cut more and more. ideal: the mean tokens of a part where nothing is cut."""
    for number, size in enumerate(SIZES):
        yield _placed([p for i, t in enumerate(trees) for p in _cut(i, t, size * ideal)], trees, parts)
        if number == 0 and any(tree.root is None for tree in trees):
            yield _in_order(trees, parts)


def _cut(index: int, tree: PrefixTree, size: float) -> Iterator[Piece]:
    """A tree in few pieces of about `size` tokens each (or of one path), cut where that repeats least: where it forks
    first, in about equal pieces; a branch that has more than `size` tokens by itself is cut likewise."""
    pending = [(0, len(tree.samples))]
    while pending:
        low, high = pending.pop()
        whole = tree.cost_between(low, high)
        if whole <= size or high - low == 1:
            yield Piece(index, whole, tuple(range(low, high)))
            continue
        shared = int(tree.shared[low + 1 : high].min())
        edges = [low, *(low + 1 + np.flatnonzero(tree.shared[low + 1 : high] == shared)).tolist(), high]
        small: list[tuple[int, tuple[int, int]]] = []
        for first, end in pairwise(edges):
            own = tree.cost_between(first, end) - shared
            if own > size and end - first > 1:
                pending.append((first, end))
            else:
                small.append((own, (first, end)))
        if small:
            yield from _even_pieces(index, shared, small, size)


def _even_pieces(index: int, shared: int, branches: list[tuple[int, tuple[int, int]]], size: float) -> Iterator[Piece]:
    """The fewest pieces of at most `size` tokens (or of one branch), about equal ones, of branches (own tokens, places)
    behind `shared` common tokens."""
    tokens = sum(own for own, _ in branches)
    count = min(len(branches), int(-(-tokens // max(1.0, size - shared)))) if shared + tokens > size else 1
    bins: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in range(max(1, count))]
    loads = np.zeros(len(bins))
    for branch in sorted(branches, key=lambda b: (-b[0], b[1])):
        place = int(loads.argmin())
        bins[place].append(branch)
        loads[place] += max(1, branch[0])
    for chosen in bins:
        places = sorted(place for _, edge in chosen for place in range(*edge))
        yield Piece(index, shared + sum(own for own, _ in chosen), tuple(places))


def _in_order(trees: Sequence[PrefixTree], parts: int) -> list[list[Piece]]:
    """Every part a run of paths as they stand, depth-first, the fullest as small as it can be: what neighbours have in
    common is computed twice where a tree is cut, and nothing else."""
    least = max(int(tree.lengths.max()) for tree in trees)
    most = max(least, sum(tree.tokens for tree in trees))
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if len(_filled(trees, middle)) <= parts else (middle + 1, most)
    found = _filled(trees, most)
    return found + [[] for _ in range(parts - len(found))]


def _filled(trees: Sequence[PrefixTree], most: int) -> list[list[Piece]]:
    """Runs of paths, each of `most` tokens at most."""
    found: list[list[Piece]] = [[]]
    load = 0
    for index, tree in enumerate(trees):
        low = 0
        for place, (length, shared) in enumerate(zip(tree.lengths.tolist(), tree.shared.tolist(), strict=True)):
            own = length - (shared if place > low else 0)
            if load + own > most:
                if place > low:
                    found[-1].append(Piece(index, tree.cost_between(low, place), tuple(range(low, place))))
                found.append([])
                load, low, own = 0, place, length
            load += own
        found[-1].append(Piece(index, tree.cost_between(low, len(tree.lengths)), tuple(range(low, len(tree.lengths)))))
    return found


def _placed(pieces: Sequence[Piece], trees: Sequence[PrefixTree], parts: int) -> list[list[Piece]]:
    """The largest piece first, each where the load is least afterwards (LPT, Graham 1969; what a part computes already
    costs nothing). Pieces of a tree in one part become one."""
    loads, least = [0] * parts, [(0, part) for part in range(parts)]  # a heap; entries of former loads are passed over
    owners: dict[int, Ints] = {}  # tree with several roots -> the part that computes each path, -1 where none does yet
    holders: dict[int, dict[int, int]] = {}  # tree -> what each part has of it already
    placed: list[dict[int, list[Piece]]] = [{} for _ in range(parts)]
    for piece in sorted(pieces, key=lambda p: (-p.tokens, p.tree, p.places)):
        tree, there = trees[piece.tree], holders.get(piece.tree, {})
        if tree.root is None and (owner := owners.get(piece.tree)) is not None:
            common, known = tree.common(piece.places[0]), owner >= 0
            there = {int(part): int(common[owner == part].max()) for part in np.unique(owner[known])}
        while loads[least[0][1]] != least[0][0]:
            heappop(least)
        load, part = min((loads[part] + piece.tokens - there.get(part, 0), part) for part in {*there, least[0][1]})
        loads[part] = load
        heappush(least, (load, part))
        added = replace(piece, tokens=piece.tokens - there[part]) if part in there else piece
        placed[part].setdefault(piece.tree, []).append(added)
        if len(piece.places) < len(tree.samples) and tree.root is not None:
            holders.setdefault(piece.tree, {})[part] = tree.root
        elif len(piece.places) < len(tree.samples):
            owners.setdefault(piece.tree, np.full(len(tree.samples), -1))[list(piece.places)] = part
    return [[_as_one(own) if len(own) > 1 else own[0] for own in part.values()] for part in placed]


def _as_one(pieces: Sequence[Piece]) -> Piece:
    """Pieces of a tree as one; the tokens of each are what it adds to those before it."""
    places = sorted(chain.from_iterable(piece.places for piece in pieces))
    return Piece(pieces[0].tree, sum(piece.tokens for piece in pieces), tuple(places))


def _evened(parts: list[list[Piece]], trees: Sequence[PrefixTree]) -> list[list[Piece]]:
    """Pieces moved from the fullest part, or exchanged with another's, as long as that makes the two fullest less."""
    loads = np.array([packed_tokens(part, trees) for part in parts])
    for _ in range(8 * len(parts)):
        full = int(loads.argmax())
        for other in np.argsort(loads, kind="stable").tolist():
            if _exchanged(parts[full], parts[other], loads[full] - loads[other]):
                loads[[full, other]] = [packed_tokens(parts[part], trees) for part in (full, other)]
                break
        else:
            break
    return parts


def _exchanged(full: list[Piece], other: list[Piece], gap: float) -> bool:
    """Give the piece, or exchange the two, whose difference in tokens is nearest to half the gap; False if none is."""
    given = np.array([p.tokens for p in full], float)
    taken, first = np.unique(np.array([0, *(p.tokens for p in other)], float), return_index=True)
    above = np.searchsorted(taken, given - gap / 2)
    nearest = np.clip([above - 1, above], 0, len(taken) - 1)
    off = np.abs(given - taken[nearest] - gap / 2)
    if not off.size or (least := off.min()) >= gap / 2:  # more would be given than the gap, or nothing
        return False
    i, j = min((int(i), int(first[nearest[side, i]])) for side, i in np.argwhere(off == least))
    swapped = full.pop(i)
    if j:
        full.append(other.pop(j - 1))
    other.append(swapped)
    return True


def packed_tokens(pieces: Sequence[Piece], trees: Sequence[PrefixTree]) -> int:
    """The packed tokens of a part."""
    by_tree: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_tree.setdefault(piece.tree, []).append(piece)
    return sum(
        own[0].tokens if len(own) == 1 else trees[tree].cost(sorted(place for piece in own for place in piece.places))
        for tree, own in by_tree.items()
    )
