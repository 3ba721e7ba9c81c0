"""The result of an evaluation on one held-out split."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from agentrl.errors import UserError
from agentrl.eval.outcome import Call, Outcome, by_task
from agentrl.eval.statistics import accuracy_interval, mean_interval, pass_all_k, pass_at_k
from agentrl.plugins.types import Json
from agentrl.trajectory import Group


class Accuracy(NamedTuple):
    """An accuracy with its 95 % interval."""

    value: float
    """Share of samples solved, 0..1."""
    low: float | None = None
    """Lower bound of the interval; None in results saved before intervals were."""
    high: float | None = None
    """Upper bound of the interval; None in results saved before intervals were."""

    @classmethod
    def read(cls, saved: Json) -> "Accuracy":
        """Read from JSON: [value, low, high], or a single number, which was saved before intervals were."""
        return cls(*saved) if isinstance(saved, list) else cls(saved)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.1%}"
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


class MeanReward(NamedTuple):
    """A mean reward with its 95 % interval."""

    value: float
    """Mean over samples."""
    low: float
    """Lower bound of the interval."""
    high: float
    """Upper bound of the interval."""

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class Part(NamedTuple):
    """The accuracy on the tasks of a split that agree in a field of their data."""

    tasks: int
    """Number of tasks."""
    samples: int
    """Number of samples, failed ones excluded."""
    accuracy: Accuracy
    """Share of samples solved, with its interval."""
    reward: MeanReward = MeanReward(0.0, 0.0, 0.0)
    """Mean reward per sample, with its interval."""


class ToolFigures(NamedTuple):
    """How a tool was used."""

    calls: int
    """Number of calls."""
    errors: int
    """Number of calls that ended with an error."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What became of one task."""

    task: str
    """Its id."""
    samples: int
    """Number of samples, failed ones excluded."""
    solved: int
    """Number of samples that solved it."""
    reward: float
    """Mean reward per sample."""
    failed: int
    """Number of samples lost to an error that is not the model's."""
    errors: tuple[str, ...]
    """Their errors, each once."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "TaskResult":
        """That of a task's outcomes, one or more."""
        valid = [one for one in outcomes if one.valid]
        lost = [one.failure for one in outcomes if one.failure is not None]
        solved, reward = sum(bool(one.solved) for one in valid), _mean([one.reward for one in valid])
        return cls(outcomes[0].task, len(valid), solved, reward, len(lost), tuple(dict.fromkeys(lost)))


@dataclass(frozen=True, slots=True)
class SplitResult:
    """The figures of one split. Samples that failed are counted in `failed` and `errors` only."""

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
    """k -> probability that at least one of k samples solves the task (pass@k), mean over tasks."""
    pass_all: Mapping[int, float]
    """k -> probability that all of k samples solve the task (pass^k), mean over tasks."""
    reward: float
    """Mean reward per sample."""
    rewards: Mapping[str, float]
    """Reward part, before weighting -> its mean per sample; 0 counts where a sample lacks it."""
    turns: float
    """Mean number of assistant turns per sample."""
    tool_calls: float
    """Mean number of tool calls per sample."""
    tool_errors: float
    """Share of the tool calls that ended with an error, 0..1."""
    tools: Mapping[str, ToolFigures]
    """Tool -> its calls and errors; `unknown`: tools that do not exist."""
    tokens: float
    """Mean number of sampled tokens per sample."""
    seconds: float = field(compare=False)
    """Mean wall time per sample, with others in flight."""
    finish: Mapping[str, int]
    """Finish reason -> number of samples."""
    failed: int
    """Number of samples lost to an error that is not the model's."""
    errors: Mapping[str, int]
    """Error of failed samples -> their number, the most frequent first."""
    usage: Mapping[str, int]
    """Tokens by kind as an endpoint counted them, failed samples included; empty without one."""
    cost: float | None = None
    """What they cost in the unit of the prices; None without prices."""
    reward_low: float = 0.0
    """Lower bound of the mean reward's 95 % interval."""
    reward_high: float = 0.0
    """Upper bound of the mean reward's 95 % interval."""
    by: Mapping[str, Part] = field(default_factory=dict)
    """Value of the field that was asked for -> the part of the split that has it, the lowest accuracy first."""

    @property
    def interval(self) -> Accuracy:
        """The accuracy with its interval."""
        return Accuracy(self.accuracy, self.low, self.high)

    @property
    def mean_reward(self) -> MeanReward:
        """The mean reward with its interval."""
        return MeanReward(self.reward, self.reward_low, self.reward_high)

    def json(self) -> dict[str, Json]:
        """The fields as a dictionary, which `json.dumps` takes."""
        tools = {name: one._asdict() for name, one in self.tools.items()}
        return asdict(self) | {"tools": tools, "by": {value: part._asdict() for value, part in self.by.items()}}


def summarize(
    split: str, outcomes: Sequence[Outcome], by: str | None = None, prices: Mapping[str, float] | None = None
) -> SplitResult:
    """Compute the figures of a split. by: a field of the tasks' data. prices: of a million tokens by kind."""
    tasks = by_task(outcomes)
    played = [one for one in outcomes if one.valid]
    correct, samples = _counts(tasks)
    accuracy, low, high = accuracy_interval(correct, samples)
    reward, reward_low, reward_high = mean_interval(_rewards(tasks))
    calls = [call for one in played for call in one.calls]
    parts = dict.fromkeys(name for one in played for name in one.rewards)
    usage = sum((Counter(one.usage) for one in outcomes), Counter[str]())
    return SplitResult(
        split=split,
        tasks=len(tasks),
        samples=len(played),
        accuracy=accuracy,
        low=low,
        high=high,
        pass_at=_over_k(pass_at_k, correct, samples),
        pass_all=_over_k(pass_all_k, correct, samples),
        reward=reward,
        reward_low=reward_low,
        reward_high=reward_high,
        rewards={name: _mean([one.rewards.get(name, 0.0) for one in played]) for name in sorted(parts)},
        turns=_mean([one.turns for one in played]),
        tool_calls=len(calls) / max(1, len(played)),
        tool_errors=_mean([call.wrong for call in calls]),
        tools=_tools(calls),
        tokens=_mean([one.tokens for one in played]),
        seconds=_mean([one.seconds for one in played]),
        finish=dict(Counter(one.finish for one in played)),
        failed=len(outcomes) - len(played),
        errors=dict(Counter(one.failure for one in outcomes if one.failure is not None).most_common()),
        usage=dict(usage),
        cost=None if not prices else cost(usage, prices),
        by={} if by is None else parts_by(tasks, by),
    )


def cost(usage: Mapping[str, int], prices: Mapping[str, float]) -> float:
    """What tokens cost. prices: of a million `input`, `cached_input` and `output` tokens; input that was cached
    costs as much as other input where it has no price of its own."""
    cached, price = usage.get("cached_input", 0), prices.get("input", 0.0)
    total = (usage.get("input", 0) - cached) * price + cached * prices.get("cached_input", price)
    return (total + usage.get("output", 0) * prices.get("output", 0.0)) / 1e6


def parts_by(tasks: Sequence[Sequence[Outcome]], name: str) -> dict[str, Part]:
    """The accuracy by each value of the field `name` of the tasks' data, the lowest first; tasks without the
    field, or without a sample, are left out."""
    chosen: dict[str, list[Sequence[Outcome]]] = {}
    for task in tasks:
        if name in task[0].data and any(one.valid for one in task):
            chosen.setdefault(f"{task[0].data[name]!s:.80}", []).append(task)
    found = {}
    for value, those in chosen.items():
        correct, samples = _counts(those)
        accuracy = Accuracy(*accuracy_interval(correct, samples))
        found[value] = Part(len(those), sum(samples), accuracy, MeanReward(*mean_interval(_rewards(those))))
    return dict(sorted(found.items(), key=lambda item: (item[1].accuracy.value, item[0])))


def failures(what: str, groups: Sequence[Group]) -> str | None:
    """One line about failed samples: how many, and the most frequent error; None if no sample failed.

    Raises UserError with that line if all samples failed. what: names the step or evaluation.
    """
    lost = [f"{t.failure.boundary}: {t.failure.message}" for g in groups for t in g.failed if t.failure is not None]
    return _losses(what, lost, sum(len(group.trajectories) + len(group.failed) for group in groups))


def losses(what: str, outcomes: Sequence[Outcome]) -> str | None:
    """What `failures` returns, of outcomes. Raises UserError likewise."""
    return _losses(what, [one.failure for one in outcomes if one.failure is not None], len(outcomes))


def _losses(what: str, lost: Sequence[str], total: int) -> str | None:
    if not lost:
        return None
    error, count = Counter(lost).most_common(1)[0]
    line = f"{what}: {len(lost)} of {total} samples failed ({count} by {error})"
    if len(lost) == total:
        raise UserError(line)
    return line


def _counts(tasks: Sequence[Sequence[Outcome]]) -> tuple[list[int], list[int]]:
    """Of each task how many samples solved it, and how many are valid."""
    correct = [sum(bool(one.solved) for one in task if one.valid) for task in tasks]
    return correct, [sum(one.valid for one in task) for task in tasks]


def _rewards(tasks: Sequence[Sequence[Outcome]]) -> list[list[float]]:
    """Of each task the rewards of its valid samples."""
    return [[one.reward for one in task if one.valid] for task in tasks]


def _tools(calls: Sequence[Call]) -> dict[str, ToolFigures]:
    counts, wrong = Counter(call.tool for call in calls), Counter(call.tool for call in calls if call.wrong)
    return {name: ToolFigures(counts[name], wrong[name]) for name in sorted(counts)}


def _over_k(
    estimate: Callable[[int, int, int], float], correct: Sequence[int], samples: Sequence[int]
) -> dict[int, float]:
    """An estimate for k = 1, 2, 4, ... and k = samples per task; each k over the tasks with at least k
    samples."""
    most = max(samples, default=0)
    ks = sorted({1, most, *(2**i for i in range(most.bit_length()) if 2**i <= most)} - {0})
    return {k: _mean([estimate(c, s, k) for c, s in zip(correct, samples, strict=True) if s >= k]) for k in ks}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
