"""What an evaluation says about one held-out split."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from agentrl.errors import UserError
from agentrl.eval.statistics import accuracy_interval, pass_at_k
from agentrl.trajectory import Group, Trajectory


class Accuracy(NamedTuple):
    """value: share of samples solved, 0..1. low, high: its 95 % interval; None where it is not known any more."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def read(cls, saved: Any) -> "Accuracy":
        """From JSON; a lone number is what was saved before intervals were."""
        return cls(*saved) if isinstance(saved, list) else cls(saved)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.1%}"
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, slots=True)
class SplitResult:
    """accuracy: share of samples solved, with its 95 % interval low..high. pass_at: k -> chance that one of k is right.

    turns, tool_calls: means a sample. tool_errors: share of the tool calls that went wrong. failed: samples that the
    machinery lost, in no other figure. finish: reason -> count.
    """

    split: str
    tasks: int
    samples: int
    accuracy: float
    low: float
    high: float
    pass_at: Mapping[int, float]
    reward: float
    turns: float
    tool_calls: float
    tool_errors: float
    tokens: float
    finish: Mapping[str, int]
    failed: int

    @property
    def interval(self) -> Accuracy:
        return Accuracy(self.accuracy, self.low, self.high)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(split: str, groups: Sequence[Group], solved: Callable[[Trajectory], bool]) -> SplitResult:
    """`solved` is the environment's word on one trajectory."""
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


def failures(what: str, groups: Sequence[Group]) -> str | None:
    """A line when the machinery lost samples: how many, and what went wrong most often. None when it lost none.

    Raises UserError when it lost all: then there is nothing to learn or to tell from `what`.
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
    """For k = 1, 2, 4, ... and the number of samples itself; tasks that lost samples count for the k they reach."""
    most = max(samples, default=0)
    ks = sorted({1, most, *(2**i for i in range(most.bit_length()) if 2**i <= most)} - {0})
    return {k: _mean([pass_at_k(c, s, k) for c, s in zip(correct, samples, strict=True) if s >= k]) for k in ks}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
