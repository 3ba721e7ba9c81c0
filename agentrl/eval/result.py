"""The result of an evaluation on one held-out split."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from agentrl.errors import UserError
from agentrl.eval.statistics import accuracy_interval, pass_at_k
from agentrl.trajectory import Group, Trajectory


class Accuracy(NamedTuple):
    """An accuracy with its 95 % interval."""

    value: float
    """Share of samples solved, 0..1."""
    low: float | None = None
    """Lower bound of the interval; None in results saved before intervals were."""
    high: float | None = None
    """Upper bound of the interval; None in results saved before intervals were."""

    @classmethod
    def read(cls, saved: Any) -> "Accuracy":
        """Read from JSON: [value, low, high], or a single number, which was saved before intervals were."""
        return cls(*saved) if isinstance(saved, list) else cls(saved)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.1%}"
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


class Part(NamedTuple):
    """The accuracy on the tasks of a split that agree in a field of their data."""

    tasks: int
    """Number of tasks."""
    samples: int
    """Number of samples, failed ones excluded."""
    accuracy: Accuracy
    """Share of samples solved, with its interval."""


@dataclass(frozen=True, slots=True)
class SplitResult:
    """The figures of one split. Samples that failed are counted in `failed` only."""

    split: str
    """Name of the split."""
    tasks: int
    """Number of tasks played."""
    samples: int
    """Number of samples, failed ones excluded."""
    accuracy: float
    """Share of samples solved, 0..1."""
    low: float
    """Lower bound of the accuracy's 95 % interval."""
    high: float
    """Upper bound of the accuracy's 95 % interval."""
    pass_at: Mapping[int, float]
    """k -> probability that at least one of k samples solves the task, mean over tasks."""
    reward: float
    """Mean reward per sample."""
    turns: float
    """Mean number of assistant turns per sample."""
    tool_calls: float
    """Mean number of tool calls per sample."""
    tool_errors: float
    """Share of the tool calls that ended with an error, 0..1."""
    tokens: float
    """Mean number of sampled tokens per sample."""
    finish: Mapping[str, int]
    """Finish reason -> number of samples."""
    failed: int
    """Number of samples lost to an error that is not the model's."""
    by: Mapping[str, Part] = field(default_factory=dict)
    """Value of the field that was asked for -> the part of the split that has it, the lowest accuracy first."""

    @property
    def interval(self) -> Accuracy:
        """The accuracy with its interval."""
        return Accuracy(self.accuracy, self.low, self.high)

    def json(self) -> dict[str, Any]:
        """Return the fields as a dictionary, which `json.dumps` takes."""
        return asdict(self) | {"by": {value: part._asdict() for value, part in self.by.items()}}


def summarize(split: str, groups: Sequence[Group], solved: Callable[[Trajectory], bool]) -> SplitResult:
    """Compute the figures of a split. solved: returns whether one trajectory solved its task."""
    played = [t for group in groups for t in group.trajectories]
    correct = [sum(solved(t) for t in group.trajectories) for group in groups]
    samples = [len(group.trajectories) for group in groups]
    accuracy, low, high = accuracy_interval(correct, samples)
    calls = [use for t in played for use in t.tool_uses]
    return SplitResult(
        split=split,
        tasks=len(groups),
        samples=len(played),
        accuracy=accuracy,
        low=low,
        high=high,
        pass_at=_pass_at(correct, samples),
        reward=_mean([t.reward for t in played]),
        turns=_mean([len(t.turns) for t in played]),
        tool_calls=len(calls) / max(1, len(played)),
        tool_errors=_mean([use.error is not None for use in calls]),
        tokens=_mean([t.sampled_tokens for t in played]),
        finish=dict(Counter(str(t.finish) for t in played)),
        failed=sum(len(group.failed) for group in groups),
    )


def parts(groups: Sequence[Group], name: str, solved: Callable[[Trajectory], bool]) -> dict[str, Part]:
    """Return the accuracy by each value of the field `name` of the tasks' data, the lowest first; tasks without the
    field, or without a sample, are left out."""
    chosen: dict[str, list[Group]] = {}
    for group in groups:
        if name in group.task.data and group.trajectories:
            chosen.setdefault(f"{group.task.data[name]!s:.80}", []).append(group)
    found = {}
    for value, those in chosen.items():
        samples = [len(group.trajectories) for group in those]
        correct = [sum(map(solved, group.trajectories)) for group in those]
        found[value] = Part(len(those), sum(samples), Accuracy(*accuracy_interval(correct, samples)))
    return dict(sorted(found.items(), key=lambda item: (item[1].accuracy.value, item[0])))


def failures(what: str, groups: Sequence[Group]) -> str | None:
    """Return one line about failed samples: how many, and the most frequent error; None if no sample failed.

    Raises UserError with that line if all samples failed. what: names the step or evaluation.
    """
    lost = [t.failure for group in groups for t in group.failed if t.failure is not None]
    if not lost:
        return None
    (boundary, message), count = Counter((f.boundary, f.message) for f in lost).most_common(1)[0]
    total = sum(len(group.trajectories) + len(group.failed) for group in groups)
    line = f"{what}: {len(lost)} of {total} samples failed ({count} by {boundary}: {message})"
    if len(lost) == total:
        raise UserError(line)
    return line


def _pass_at(correct: Sequence[int], samples: Sequence[int]) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... and k = samples per task; each k over the tasks with at least k samples."""
    most = max(samples, default=0)
    ks = sorted({1, most, *(2**i for i in range(most.bit_length()) if 2**i <= most)} - {0})
    return {k: _mean([pass_at_k(c, s, k) for c, s in zip(correct, samples, strict=True) if s >= k]) for k in ks}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
