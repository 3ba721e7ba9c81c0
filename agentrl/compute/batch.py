"""`Batch`: a step's samples as flat arrays with offsets, never padded to a rectangle; it pickles in microseconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from agentrl.compute.balance import Deal

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """S samples, T tokens in all; sample i is the tokens offsets[i]:offsets[i + 1].

    offsets: int64 [S + 1]. tokens: columns [T], among them `ids` int32, `loss_mask` uint8 and `logprobs` float32 (the
    engine's, 0 where not sampled); later `advantages`, `old_logprobs`, `reference_logprobs`, likewise.
    samples: columns [S], among them `prompt_length` int32, `group` int64 (equal for samples of one task) and `reward`
    float32. Every operation keeps every column.
    """

    offsets: npt.NDArray[np.int64]
    tokens: Mapping[str, Array]
    samples: Mapping[str, Array]

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], groups: Sequence[int] | None = None) -> "Batch":
        """One sample a trajectory; `groups` says which belong together (None: each for itself)."""
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
        """Tokens a sample, int64 [S]."""
        return np.diff(self.offsets)

    @property
    def sampled(self) -> npt.NDArray[np.int64]:
        """Sampled (masked-in) tokens a sample, int64 [S]."""
        total = np.concatenate([[0], np.cumsum(self.tokens["loss_mask"], dtype=np.int64)])
        counts: npt.NDArray[np.int64] = total[self.offsets[1:]] - total[self.offsets[:-1]]
        return counts

    def span(self, sample: int) -> slice:
        """Where a sample's tokens lie in the token columns."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))

    def spread(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """One value a sample [S] to its sampled tokens [T], 0 elsewhere."""
        spread: npt.NDArray[np.float32] = np.repeat(values, self.lengths) * self.tokens["loss_mask"]
        return spread.astype(np.float32)

    def with_tokens(self, **columns: Array) -> "Batch":
        """With further (or replaced) token columns [T]."""
        self._check(columns, int(self.offsets[-1]))
        return replace(self, tokens={**self.tokens, **columns})

    def with_samples(self, **columns: Array) -> "Batch":
        """With further (or replaced) sample columns [S]."""
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
        """Where the tokens of these samples, one after the other, lie in the token columns."""
        lengths = self.lengths[indices]
        offsets = _offsets(lengths)
        where: npt.NDArray[np.int64] = np.arange(offsets[-1]) + np.repeat(
            self.offsets[:-1][indices] - offsets[:-1], lengths
        )
        return where

    def deal(self, parts: int) -> "Deal":
        """The samples dealt over `parts` workers, balanced by packed tokens; see `agentrl.compute.balance`."""
        from agentrl.compute.balance import deal

        return deal(self, parts)

    def split(self, parts: int) -> "list[Batch]":
        """`parts` runs of consecutive samples whose sizes differ by at most one; some may be empty."""
        bounds = [len(self) * i // parts for i in range(parts + 1)]
        return [self.select(np.arange(low, high)) for low, high in pairwise(bounds)]

    def repeat(self, times: int) -> "Batch":
        """Every sample `times` times, the copies next to each other."""
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


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _concatenate(arrays: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _columns(batch: Batch) -> list[str]:
    return sorted([*batch.tokens, *batch.samples])
