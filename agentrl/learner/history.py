"""`History`: what a run's rows of metrics said so far, in windows, with the step at which the policy broke.

The conditions of `monitors.py` read it. What changed just before a step (`changes`) is listed in order of evidence: a
resumed run, another learning rate, the end of the critic's warm-up, a pass over the tasks that began, an evaluation,
then the update itself and its sync.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from statistics import fmean, variance

from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe

Row = Mapping[str, Json]
"""A row of `metrics.jsonl`."""

UNKNOWN_NAMES = "tool/unknown/names"
"""The key of a row under which stands, as text, which tools were called that there are not."""
WINDOW = 10
"""Steps that are taken together, at the beginning of a run and at its end, where a change is looked for."""
STEPS = 3
"""Consecutive steps in which a condition has to hold where one step may be an accident."""
KEPT = 60
"""Latest rows that are kept, beside the first WINDOW."""
_FALL = 0.75  # share of what had been earned that a broken policy lost at once
_RECOVERED = 0.5  # share of what had been earned from which on a policy is not broken any more
_TIMES = (1.6, 3.0)  # by which a length or an entropy differs at once, where the reward fell too and where it did not
_SHARES = (0.35, 0.75)  # of samples or calls: at most, before; at least, from then on
_TOOL = 0.9  # share of a tool's calls that end in an error from which on it is broken
_LEAST = 0.02  # reward above its floor below which nothing can be said to have been lost


@dataclass(slots=True)
class Evaluated:
    """A held-out accuracy that was measured."""

    step: int
    """The step after which."""
    accuracy: tuple[float, float, float]
    """The accuracy, and the bounds of its interval, 0..1."""
    reward: float | None
    """Mean reward of the steps before, at most WINDOW; None before the first."""


@dataclass(frozen=True, slots=True)
class Break:
    """A step from which on the policy behaves otherwise than in all steps before, and earns little."""

    step: int
    """The first step of which this is so."""
    row: Row
    """That step's row."""
    before: Row
    """Means of the steps before."""
    update: Row
    """The row of the step before, whose update the broken step sampled with."""
    moved: tuple[str, ...]
    """What jumped, as texts."""


@dataclass(slots=True)
class History:
    """What a run's rows said, as far as conditions ask."""

    recipe: Recipe
    """The run's recipe."""
    first: list[Row] = field(default_factory=list)
    """The first WINDOW steps."""
    rows: list[Row] = field(default_factory=list)
    """The last KEPT steps, the newest last; those of `first` too, while they are among these."""
    evaluations: dict[str, list[Evaluated]] = field(default_factory=dict)
    """Split -> its evaluations in order."""
    evaluated: list[str] = field(default_factory=list)
    """The splits that the newest row evaluated."""
    start: Row = field(default_factory=dict)
    """The row of step 0, once, as it is the newest."""
    unknown_names: str = ""
    """The tools that the newest row's samples called and that there are not, each with its count."""
    resumed: int | None = None
    """The step after which the run was last resumed; None: it was not."""
    broken: Break | None = None
    """Where the policy broke, as long as it has not recovered."""
    floor: float = 0.0
    """The lowest reward of a sample so far; at most 0."""

    def add(self, row: Row) -> None:
        """Add the next row; what is no finite number in it is left out, but for `UNKNOWN_NAMES`."""
        self.unknown_names = str(row.get(UNKNOWN_NAMES, ""))
        row = {key: value for key, value in row.items() if isinstance(value, int | float) and isfinite(value)}
        self.start = row if row["step"] == 0 else {}
        if row["step"] > 0:
            self.floor = min(self.floor, row.get("reward/min", 0.0))
            self._look_for_break(row)
            self.rows = [*self.rows[-KEPT + 1 :], row]
            self.first += [row] if len(self.first) < WINDOW else []
        rewards = self.last("reward/mean", WINDOW)
        self.evaluated = []
        for key, value in row.items():
            kind, _, rest = key.partition("/")
            split, _, what = rest.rpartition("/")
            if kind == "eval" and what == "accuracy":
                measured = (value, row.get(f"{key}_low", 0.0), row.get(f"{key}_high", 1.0))
                found = Evaluated(row["step"], measured, fmean(rewards) if rewards else None)
                self.evaluations.setdefault(split, []).append(found)
                self.evaluated.append(split)

    def last(self, key: str, count: int = KEPT) -> list[float]:
        """A metric in the last `count` steps that have it."""
        return values(self.rows, key)[-count:]

    def latest(self, key: str, count: int = STEPS) -> list[float]:
        """A metric in the last `count` steps; empty unless each has it."""
        found = values(self.rows[-count:], key)
        return found if len(found) == count else []

    def before(self, key: str) -> list[list[float]]:
        """A metric in the windows that its last WINDOW steps are compared with: the first of the run, and that
        which lies WINDOW steps before them; none while they overlap."""
        if not self.rows or self.rows[-1]["step"] < self.first[0]["step"] + 2 * WINDOW:
            return []
        windows = [values(self.first, key), values(self.rows[-3 * WINDOW : -2 * WINDOW], key)]
        return [window for window in windows if len(window) == WINDOW]

    def beginning(self, key: str) -> list[float]:
        """A metric in the first steps of the run, at most WINDOW, without the last STEPS; empty: fewer than two."""
        end = self.rows[-STEPS]["step"] if len(self.rows) >= STEPS else 0
        found = values([row for row in self.first if row["step"] < end], key)
        return found if len(found) > 1 else []

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def span(self) -> str:
        """The last STEPS steps, as text."""
        return f"steps {self.rows[-STEPS]['step']} to {self.rows[-1]['step']}"

    def row(self, step: int) -> Row:
        """The row of a step; empty where it is not kept."""
        return next((row for row in self.rows if row["step"] == step), {})

    def changes(self, step: int) -> list[str]:
        """What changed just before a step, what is most evident first."""
        now, then = self.row(step - 1), self.row(step - 2)
        found = []
        if self.resumed is not None and self.resumed == step - 1:
            found.append(f"the run was resumed after step {self.resumed}: compare what the resumed recipe changed")
        rates = now.get("train/lr"), then.get("train/lr")
        if rates[0] and rates[1] and not 0.5 < rates[0] / rates[1] < 1.5:
            found.append(f"the learning rate went from {rates[1]:.3g} to {rates[0]:.3g} in step {step - 1}")
        warmup = self.recipe.critic.warmup_steps if self.recipe.critic is not None else 0
        if 0 < warmup < step - 1 <= warmup + STEPS:
            found.append(f"the critic's warm-up ended with step {warmup}, and the policy is updated since")
        passes = int(self.row(step).get("data/epoch", 0)), int(now.get("data/epoch", 0))
        if passes[0] > passes[1]:
            found.append(f"pass {passes[0] + 1} over the tasks began in step {step}")
        evaluated = {one.step for some in self.evaluations.values() for one in some}
        if step - 1 in evaluated and step - 2 not in evaluated:
            found.append(f"an evaluation after step {step - 1}")
        if now.get("train/updates"):
            found.append(update(now))
            if self.recipe.engine.name != "local" and "time/sync_s" in now:
                found.append(f"the sync of its weights ({now['time/sync_s']:.2g} s)")
        return found

    def _look_for_break(self, row: Row) -> None:
        """Set `broken` where this row breaks with the rows before, and take it away where the policy has recovered."""
        if self.broken is not None:
            earned = self.broken.before.get("reward/mean", 0.0) - self.floor
            back = row.get("reward/mean", 0.0) - self.floor >= _RECOVERED * earned > 0
            self.broken = None if back or not jumps(self.broken.before, row) else self.broken
            return
        if not self.rows:
            return
        before = means(self.rows[-WINDOW:])
        earned, now = (one.get("reward/mean", self.floor) - self.floor for one in (before, row))
        fell = earned > _LEAST and now <= (1 - _FALL) * earned
        times = _TIMES[0] if fell else _TIMES[1]
        moved = jumps(before, row, times) if jumps(means(self.rows[-STEPS:]), row, times) else []  # else it is a trend
        if moved and (fell or len(moved) > 1) and now <= earned and not (len(moved) == 1 and tool_broke(before, row)):
            self.broken = Break(int(row["step"]), row, before, self.rows[-1], tuple(moved))


def update(row: Row) -> str:
    """A step's update as text: its learning rate and how large it was."""
    norm, ratio, kl = row.get("train/grad_norm", 0.0), row.get("train/ratio_mean", 1.0), row.get("train/approx_kl", 0.0)
    size = f", ratio {ratio:.3g}, approx_kl {kl:.3g}" if kl or ratio != 1 else ""
    count = row.get("train/updates", 0)
    what = "the update" if count == 1 else f"the {count:g} updates"
    return f"{what} of step {row['step']} (train.lr {row.get('train/lr', 0.0):.3g}, gradient {norm:.3g}{size})"


def jumps(before: Row, row: Row, times: float = _TIMES[0]) -> list[str]:
    """What the policy does quite otherwise than before, as texts. before: means of rows. times: by which lengths and
    entropies differ at least."""
    found = []
    shares: Mapping[str, Callable[[Row], float | None]] = {
        "samples that ran out of tokens": lambda one: share(one, "stop/length"),
        "calls that cannot be served": faulty,
        "samples that call nothing": lambda one: share(one, "calls/none"),
    }
    for name, of in shares.items():
        then, now = of(before), of(row)
        if then is not None and now is not None and then <= _SHARES[0] and now >= _SHARES[1]:
            found.append(f"{name} {then:.0%} -> {now:.0%}")
    for key, name, least in (
        ("rollout/response_tokens_mean", "tokens a sample", 1.0),
        ("train/entropy", "entropy", 2.5),
    ):
        then, now, ratio = before.get(key), row.get(key), max(times, least)  # entropies near 0 are noisy
        if then and now and not then / ratio < now < then * ratio:
            found.append(f"{name} {then:.3g} -> {now:.3g}")
    return found


def tool_broke(before: Row, row: Row) -> list[str]:
    """The tools most of whose calls end in an error now, and few did before."""
    found = []
    for name in tools(row):
        calls, errors = f"tool/{name}/calls", f"tool/{name}/errors"
        then, now = (one.get(errors, 0) / max(1, one.get(calls, 0)) for one in (before, row))
        if then <= _SHARES[0] and now >= _TOOL and row.get(calls, 0) >= 8:
            found.append(name)
    return found


def tools(row: Row) -> list[str]:
    """The names of a row's tools, without the unknown one."""
    keys = [key.split("/") for key in row if key.startswith("tool/")]
    return [name for name in dict.fromkeys(key[1] for key in keys if len(key) == 3) if name != "unknown"]


def faulty(row: Row) -> float | None:
    """The share of a row's calls that name no tool, cannot be read or were cut; None: there are hardly any."""
    calls = sum(row.get(f"tool/{name}/calls", 0) for name in (*tools(row), "unknown"))
    wrong = sum(row.get(f"calls/{kind}", 0) for kind in ("unknown", "unreadable", "cut"))
    return wrong / calls if calls >= 8 else None


def means(rows: Sequence[Row]) -> Row:
    """The mean of every metric over the rows that have it."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: fmean(values(rows, key)) for key in keys}


def values(rows: Sequence[Row], key: str) -> list[float]:
    """A metric in the rows that have it."""
    return [row[key] for row in rows if key in row]


def share(row: Row, key: str) -> float:
    """A count of samples as a share of all samples of the step."""
    return float(row.get(key, 0) / max(1, row.get("rollout/trajectories", 0) + row.get("rollout/failed", 0)))


def errors_apart(before: Sequence[float], now: Sequence[float]) -> float:
    """By how many standard errors a mean moved, upwards positive (Welch)."""
    error = sqrt(sum(variance(one) / len(one) if len(one) > 1 else 0.0 for one in (before, now)))
    return (fmean(now) - fmean(before)) / max(error, 1e-9)
