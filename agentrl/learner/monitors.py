"""Health of a run: conditions on its rows of metrics, each a line with cause and remedy that is said once.

`CONDITIONS` is the table of them, `RANGES` that of healthy values. `Health` holds the rows that a run has written, and
says which conditions its newest row raised.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import isfinite, sqrt
from statistics import fmean, median, variance
from typing import NamedTuple

from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import COMPARING
from agentrl.rollout.call_counts import UNCALLED, CallCounts, CallFault
from agentrl.trajectory import UNKNOWN

Row = Mapping[str, Json]
"""A row of `metrics.jsonl`."""

RANGES: Mapping[str, tuple[float | None, float | None]] = {
    "critic/clip_fraction": (None, 0.2),
    "critic/explained_variance": (0.0, None),
    "groups/few": (None, 0.0),
    "mismatch/ess": (0.9, None),
    "mismatch/kl": (None, 0.01),
    "mismatch/logprob_mean": (None, 0.05),
    "mismatch/weight_cut": (None, 0.05),
    "mismatch/weight_mean": (0.9, 1.1),
    "rollout/failed": (None, 0.0),
    "rollout/release_errors": (None, 0.0),
    "rollout/retried": (None, 0.0),
    "rollout/staleness_mean": (None, 2.0),
    "stop/error": (None, 0.0),
    "stop/timeout": (None, 0.0),
    "train/approx_kl": (None, 0.02),
    "train/clip_fraction": (None, 0.2),
    "train/clip_fraction_dual": (None, 0.01),
    "train/kl": (None, 0.1),
    "train/ratio_mean": (0.95, 1.05),
    "train/updates_not_finite": (None, 0.0),
}
"""Healthy values of metrics: name -> lowest and highest; None: no such bound."""

UNKNOWN_NAMES = "tool/unknown/names"
"""The key of a row under which stands, as text, which tools were called that there are not."""
WINDOW = 10
"""Steps that are taken together, at the beginning of a run and at its end, where a change is looked for."""
STEPS = 3
"""Consecutive steps in which a condition has to hold where one step may be an accident."""
KEPT = 60
"""Latest rows that are kept, beside the first WINDOW."""


class Finding(NamedTuple):
    """A condition that a step raised."""

    name: str
    """Of the condition, in CONDITIONS."""
    line: str
    """What was found, its likely cause, and what to do."""


@dataclass(slots=True)
class Evaluated:
    """A held-out accuracy that was measured."""

    step: int
    """The step after which."""
    accuracy: tuple[float, float, float]
    """The accuracy, and the bounds of its interval, 0..1."""
    reward: float | None
    """Mean reward of the steps before, at most WINDOW; None before the first."""


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

    def add(self, row: Row) -> None:
        """Add the next row; what is no finite number in it is left out, but for `UNKNOWN_NAMES`."""
        self.unknown_names = str(row.get(UNKNOWN_NAMES, ""))
        row = {key: value for key, value in row.items() if isinstance(value, int | float) and isfinite(value)}
        self.start = row if row["step"] == 0 else {}
        if row["step"] > 0:
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
        return _values(self.rows, key)[-count:]

    def before(self, key: str) -> list[list[float]]:
        """A metric in the windows that its last WINDOW steps are compared with: the first of the run, and that
        which lies WINDOW steps before them; none while they overlap."""
        if not self.rows or self.rows[-1]["step"] < self.first[0]["step"] + 2 * WINDOW:
            return []
        windows = [_values(self.first, key), _values(self.rows[-3 * WINDOW : -2 * WINDOW], key)]
        return [window for window in windows if len(window) == WINDOW]

    @property
    def span(self) -> str:
        """The last STEPS steps, as text."""
        return f"steps {self.rows[-STEPS]['step']} to {self.rows[-1]['step']}"


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


def _share(row: Row, key: str) -> float:
    """A count of samples as a share of all samples of the step."""
    return float(row.get(key, 0) / max(1, row.get("rollout/trajectories", 0) + row.get("rollout/failed", 0)))


def _moved(before: Sequence[float], now: Sequence[float]) -> float:
    """By how many standard errors a mean moved, upwards positive (Welch)."""
    error = sqrt((variance(before) + variance(now)) / WINDOW)
    return (fmean(now) - fmean(before)) / max(error, 1e-9)


def _lasting(history: History, least: float, share: Callable[[Row], float]) -> float | None:
    """The mean share in the last STEPS steps, where it was `least` or more in each."""
    shares = [share(row) for row in history.rows[-STEPS:]]
    return fmean(shares) if min(shares) >= least else None


Condition = Callable[[History], str | None]
"""Gives the line of what is wrong; None: nothing is."""


def after(steps: int) -> Callable[[Condition], Condition]:
    """A condition of so many steps at least: it is not asked before there are as many."""

    def decorate(condition: Condition) -> Condition:
        @wraps(condition)
        def asked(history: History) -> str | None:
            return condition(history) if len(history.rows) >= steps else None

        return asked

    return decorate


ASTRAY = 0.75
"""Calls a sample of tools that do not exist, from which on a model is not said to call none."""


def tools_unknown(history: History) -> str | None:
    """At least half of the calls of a step name tools that are not offered."""
    return _call_fault(history, "tools_unknown")


def calls_unreadable(history: History) -> str | None:
    """At least half of the calls of a step cannot be read."""
    return _call_fault(history, "calls_unreadable")


def calls_cut(history: History) -> str | None:
    """At least half of the calls of a step were cut off by the token limit of a turn."""
    return _call_fault(history, "calls_cut")


def _call_fault(history: History, name: str) -> str | None:
    found = next((fault for fault in _call_faults(history) if fault.name == name), None)
    return None if found is None else f"step {history.rows[-1]['step']}: {found.line}. Likely cause: {found.remedy}"


def _call_faults(history: History) -> list[CallFault]:
    """What most calls of the newest step have wrong, or most of its samples."""
    row = history.rows[-1] if history.rows else {}
    tools = _tools(history)
    counts = CallCounts(
        samples=row.get("rollout/trajectories", 0) if tools else 0,
        silent=row.get("calls/none", 0),
        calls=sum(row.get(f"tool/{name}/calls", 0) for name in (*tools, UNKNOWN)),
        unreadable=row.get("calls/unreadable", 0),
        cut=row.get("calls/cut", 0),
        unknown=row.get("calls/unknown", 0),
        offered=dict.fromkeys(tools),
    )
    return counts.faults(history.recipe.rollout.max_turn_tokens, history.unknown_names)


@after(STEPS)
def no_contrast(history: History) -> str | None:
    """The samples of each task have equal rewards, STEPS steps in a row."""
    recipe, rows = history.recipe, history.rows[-STEPS:]
    if not all(_learns_nothing(recipe, row) for row in rows):
        return None
    return (
        f"{history.span}: no two samples of a task differed in their reward, and "
        f"{recipe.algorithm.advantage.name} learned nothing. Likely cause: {_no_contrast_cause(history, rows[-1])}"
    )


def _learns_nothing(recipe: Recipe, row: Row) -> bool:
    if row.get("groups/varied", 1):
        return False
    waits = recipe.critic is not None and row["step"] <= recipe.critic.warmup_steps
    if row.get("distill/tokens") or row.get("imitate/tokens"):
        return False
    return recipe.algorithm.advantage.name in COMPARING or (row.get("train/samples") == 0 and not waits)


def _no_contrast_cause(history: History, row: Row) -> str:
    """The likely cause by the metrics of a step; the surest sign is checked first."""
    recipe = history.recipe
    played, failed = row.get("rollout/trajectories", 0), row.get("rollout/failed", 0)
    if row.get("groups/few", 0) > row.get("groups/equal", 0):
        return f"{failed} samples of the step failed, which left fewer than two of most tasks"
    if greedy := _greedy(recipe):
        return greedy
    if faults := _call_faults(history):
        return f"{faults[0].line}; {faults[0].remedy}"
    cut = sum(row.get(f"stop/{why}", 0) for why in ("length", "max_turns", "timeout"))
    if 2 * cut > played:
        return (
            f"{cut} of {played} samples were cut off (rollout.max_turn_tokens, max_tokens, max_turns or timeout) "
            "before they could earn anything"
        )
    return (
        "a reward that is the same for all, or tasks far too hard or too easy for this model (mean reward "
        f"{row.get('reward/mean', 0):.3g}); look at trajectories/"
    )


def _greedy(recipe: Recipe) -> str:
    """Why sampling is deterministic under this recipe; empty if it is not."""
    if recipe.rollout.temperature == 0:
        return "rollout.temperature is 0"
    return "rollout.top_k is 1" if recipe.rollout.top_k == 1 else ""


CUT = 0.25
"""Share of a step's samples that ran out of tokens, or of time, from which on it is said."""


@after(STEPS)
def cut_by_length(history: History) -> str | None:
    """At least CUT of the samples ran out of tokens, STEPS steps in a row."""
    if (share := _lasting(history, CUT, lambda row: _share(row, "stop/length"))) is None:
        return None
    r = history.recipe.rollout
    return (
        f"{history.span}: {share:.0%} of the samples ran out of tokens before they ended. Likely cause: limits too "
        f"low (rollout.max_turn_tokens is {r.max_turn_tokens}, rollout.max_tokens {r.max_tokens}), or a model that "
        "does not stop: raise them, or take length off the reward"
    )


@after(STEPS)
def cut_by_time(history: History) -> str | None:
    """At least CUT of the samples ran out of time, STEPS steps in a row."""
    if (share := _lasting(history, CUT, lambda row: _share(row, "stop/timeout"))) is None:
        return None
    return (
        f"{history.span}: {share:.0%} of the samples ran out of time. Likely cause: a slow tool or environment "
        "(tool/<name>/seconds, time/sample_environment_s), or an engine with more conversations than it can serve: "
        "lower rollout.concurrency, or raise rollout.timeout"
    )


@after(STEPS)
def answers_unreceived(history: History) -> str | None:
    """Nobody received at least CUT of the answers to an agent's calls, STEPS steps in a row."""

    def unreceived(row: Row) -> float:
        return float(row.get("gateway/unreceived", 0) / max(1, row.get("gateway/calls", 0)))

    if (share := _lasting(history, CUT, unreceived)) is None:
        return None
    return (
        f"{history.span}: nobody received {share:.0%} of the answers to the agent's calls, which are not "
        "trained. Likely cause: the time-out of the agent's client is shorter than an answer takes: raise it, or lower "
        "rollout.concurrency"
    )


@after(STEPS)
def tools_not_called(history: History) -> str | None:
    """No tool is called in the first steps, or what was called before is called no longer."""
    tools = _tools(history)
    calls = {name: [_share(row, f"tool/{name}/calls") for row in history.rows[-WINDOW:]] for name in tools}
    played = max(1.0, fmean(history.last("rollout/trajectories", WINDOW) or [1.0]))
    most = {name: max(map(fmean, history.before(f"tool/{name}/calls")), default=0.0) / played for name in tools}
    gone = [name for name in tools if most[name] >= 0.5 and fmean(calls[name]) < 0.05 * most[name]]
    if gone:
        return (
            f"step {history.rows[-1]['step']}: the model hardly calls {', '.join(gone)} any more. Likely cause: "
            "answers without a call earn as much, or calls cost reward: compare both in trajectories/"
        )
    rows = history.rows[-WINDOW:]
    astray = fmean(_share(row, f"tool/{UNKNOWN}/calls") for row in rows or [{}])
    enough = len(rows) >= (WINDOW if any(history.last("reward/mean", WINDOW)) else STEPS)
    others = any(fault.name != "no_calls" for fault in _call_faults(history))
    if tools and enough and not any(map(any, calls.values())) and astray < ASTRAY and not others:
        count = sum(row.get("rollout/trajectories", 0) for row in rows)
        return (
            f"{count} of {count} samples of {len(rows)} steps called none of the tools that their tasks offer "
            f"({', '.join(tools)}). Likely cause: {UNCALLED}"
        )
    return None


@after(WINDOW)
def entropy_collapse(history: History) -> str | None:
    """The entropy fell below a tenth of what it was, and the reward did not rise, or fell from what it had been."""
    entropies, rewards = history.last("train/entropy", WINDOW), history.last("reward/mean", WINDOW)
    windows, earned = history.before("train/entropy"), history.before("reward/mean")
    if not windows or not earned or fmean(entropies) >= 0.1 * fmean(windows[0]):
        return None
    moves = [_moved(before, rewards) for before in earned]
    if moves[0] > 2 and min(moves) > -4:
        return None
    return (
        f"step {history.rows[-1]['step']}: the policy became nearly deterministic without earning more: entropy "
        f"{fmean(windows[0]):.3g} -> {fmean(entropies):.3g} nats, reward {fmean(earned[0]):.3g} -> "
        f"{fmean(rewards):.3g}. Lower train.lr, raise algorithm.clip_high or algorithm.entropy_coef, or go on from an "
        "earlier checkpoint"
    )


def mismatch(history: History) -> str | None:
    """Engine and trainer compute different log-probs: by the mean, or by the effective sample size."""
    row = history.rows[-1] if history.rows else {}
    mean, ess = row.get("mismatch/logprob_mean", 0.0), row.get("mismatch/ess", 1.0)
    if mean <= RANGES["mismatch/logprob_mean"][1] and ess >= RANGES["mismatch/ess"][0]:
        return None
    return (
        f"step {row['step']}: engine and trainer give sampled tokens other probabilities: {mean:.3f} nats in the mean, "
        f"at most {row.get('mismatch/logprob_max', mean):.2f}, effective sample size {ess:.0%}. "
        f"Likely causes: {_mismatch_causes(history.recipe)}"
    )


@after(WINDOW)
def mismatch_growing(history: History) -> str | None:
    """The mismatch is within its bound, and five times what it was in the beginning."""
    now, windows = history.last("mismatch/logprob_mean", WINDOW), history.before("mismatch/logprob_mean")
    if not windows or len(now) < WINDOW or fmean(now) < 5 * fmean(windows[0]) or fmean(now) < 0.01:
        return None
    return (
        f"step {history.rows[-1]['step']}: engine and trainer drift apart: {fmean(windows[0]):.2g} -> {fmean(now):.2g} "
        f"nats a token. Likely causes: {_mismatch_causes(history.recipe)}"
    )


def _mismatch_causes(recipe: Recipe) -> str:
    """What may cause a mismatch under this recipe, the likeliest first."""
    causes = []
    if recipe.rollout.overlap != "none":
        causes.append(f"rollouts older than the weights (rollout.max_staleness {recipe.rollout.max_staleness})")
    if recipe.engine.name != "local":
        causes.append("weights that did not reach the engine (see weight_version in the trajectories)")
        causes.append(f"another number format there than {_number_format(recipe)}, or other kernels")
    causes.append("a learning rate so high that mini-batches of a step differ much")
    if recipe.engine.name == "local" and recipe.model.mixed:
        causes.append(
            f"weights of {recipe.model.dtype} that the engine samples with and the trainer rounds to bfloat16"
        )
    if recipe.engine.name == "local":
        causes.append("an architecture that the engine computes otherwise (dropout, routing)")
    return "; ".join(causes)


def _number_format(recipe: Recipe) -> str:
    """The recipe key of the trainer's number format, with its value."""
    model = recipe.model
    return f"model.compute {model.compute}" if model.mixed else f"model.dtype {model.dtype}"


@after(WINDOW)
def gradient_spike(history: History) -> str | None:
    """The gradient is ten times the median of the steps before, and is clipped."""
    norms, limit = [norm for norm in history.last("train/grad_norm") if norm > 0], history.recipe.train.max_grad_norm
    if len(norms) <= WINDOW or norms[-1] != history.rows[-1].get("train/grad_norm"):
        return None
    usual = median(norms[:-1])
    if norms[-1] < 10 * usual or norms[-1] <= limit:
        return None
    return (
        f"step {history.rows[-1]['step']}: the gradient's norm is {norms[-1]:.3g}, {norms[-1] / usual:.0f} times what "
        f"it was ({usual:.3g}); it was clipped to {limit:g}. Once may be chance; else lower train.lr, or look "
        "for samples of another kind in this step's trajectories (agentrl show)"
    )


def update_discarded(history: History) -> str | None:
    """A gradient was not finite."""
    row = history.rows[-1] if history.rows else {}
    if not (lost := row.get("train/updates_not_finite", 0)):
        return None
    return (
        f"step {row['step']}: the gradient of {lost} updates was not finite, and they were not made. Likely cause: a "
        "learning rate too high, numbers beyond bfloat16, or an own loss: lower train.lr, or set model.compute: float32"
    )


def accuracy_falls(history: History) -> str | None:
    """The reward rose while the accuracy on held-out tasks fell below the interval of its best."""
    for split in history.evaluated:
        *earlier, now = history.evaluations[split]
        best = max(earlier, key=lambda one: one.accuracy[1], default=None)
        if best is None or now.accuracy[2] >= best.accuracy[1] or now.reward is None:
            continue
        then = fmean(_values(history.first, "reward/mean")) if best.reward is None else best.reward
        if now.reward > then:
            return (
                f"step {now.step}: the reward rose ({then:.3g} -> {now.reward:.3g}) while the accuracy on {split} fell "
                f"({best.accuracy[0]:.1%} after step {best.step} -> {now.accuracy[0]:.1%}). Likely cause: training "
                "tasks learned by heart, or a reward that is earned in another way than by solving: stop here, "
                "more tasks, compare reward/<part>, and read trajectories/"
            )
    return None


@after(WINDOW)
def part_gamed(history: History) -> str | None:
    """One reward part rose while another fell by a fifth or more, both far beyond their noise."""
    weights = history.recipe.rewards.weights
    keys = [key for row in history.rows[-1:] for key in row if _is_part(key) and weights.get(key[7:], 1.0) > 0]
    for index in range(len(history.before("reward/mean"))):
        moves = {}
        for key in keys:
            windows, now = history.before(key), history.last(key, WINDOW)
            if index < len(windows) and len(now) == WINDOW:
                moves[key] = (_moved(windows[index], now), fmean(windows[index]), fmean(now))
        rose = max(moves, key=lambda key: moves[key][0], default=None)
        fell = min(moves, key=lambda key: moves[key][0], default=None)
        if rose is None or fell is None or moves[rose][0] < 5 or moves[fell][0] > -5:
            continue
        if moves[fell][1] - moves[fell][2] >= 0.2 * abs(moves[fell][1]):
            up, down = (f"{key[7:]!r} {{}} ({moves[key][1]:.3g} -> {moves[key][2]:.3g})" for key in (rose, fell))
            return (
                f"step {history.rows[-1]['step']}: reward part {up.format('rose')} while {down.format('fell')}. Likely "
                f"cause: {rose[7:]!r} is easier to earn: lower rewards.weights.{rose[7:]}, or give it only to samples "
                f"that earn {fell[7:]!r}"
            )
    return None


def _is_part(key: str) -> bool:
    kind, _, part = key.partition("/")
    return kind == "reward" and "/" not in part and part not in ("mean", "std", "min", "max", "kl_penalty")


@after(STEPS)
def stale(history: History) -> str | None:
    """Samples were older than the healthy range in the mean, STEPS steps in a row."""
    ages, most = history.last("rollout/staleness_mean", STEPS), RANGES["rollout/staleness_mean"][1]
    if len(ages) < STEPS or most is None or min(ages) <= most:
        return None
    return (
        f"{history.span}: samples are {fmean(ages):.1f} updates old in the mean when they are trained on. Lower "
        f"rollout.max_staleness ({history.recipe.rollout.max_staleness}), or speed sampling up: more servers, shorter "
        "samples, a faster tool"
    )


@after(STEPS)
def samples_failed(history: History) -> str | None:
    """A tenth of the samples or more failed, STEPS steps in a row."""
    if (share := _lasting(history, 0.1, lambda row: _share(row, "rollout/failed"))) is None:
        return None
    row = history.rows[-1]
    counts = {key.rpartition("/")[2]: row[key] for key in row if key.startswith("rollout/failed/")}
    owner = max(counts, key=lambda one: counts[one], default="?")
    return (
        f"{history.span}: {share:.0%} of the samples failed, most by {owner}, and were not trained on. "
        "agentrl show RUN --failed prints the errors"
    )


@after(WINDOW)
def tool_fails(history: History) -> str | None:
    """More than half of the calls of a tool end in an error, and no fewer than before."""
    for name in _tools(history):
        calls, errors = (history.last(f"tool/{name}/{what}", 2 * WINDOW) for what in ("calls", "errors"))
        if len(calls) < 2 * WINDOW or sum(calls[WINDOW:]) < 10 * WINDOW:
            continue
        then, now = (sum(errors[half]) / max(1, sum(calls[half])) for half in (slice(WINDOW), slice(WINDOW, None)))
        if now > 0.5 and now > 0.9 * then:
            return (
                f"step {history.rows[-1]['step']}: {now:.0%} of the calls of {name} end in an error, and it does not "
                "get better. Likely cause: the tool is down, or its schema and description mislead the model: "
                "agentrl why RUN --split train groups the errors"
            )
    return None


@after(STEPS)
def tool_slow(history: History) -> str | None:
    """A tool's calls take half of their time limit, or five times and a second longer than in the beginning."""
    limit = history.recipe.rollout.tool_timeout
    for name in _tools(history):
        now, windows = history.last(f"tool/{name}/seconds", STEPS), history.before(f"tool/{name}/seconds")
        if len(now) < STEPS:
            continue
        usual = fmean(windows[0]) if windows else None
        slower = usual is not None and min(now) > 5 * usual and min(now) > usual + 1
        if min(now) > 0.5 * limit or slower:
            was = f", {usual:.2g} s in the beginning" if slower else ""
            return (
                f"{history.span}: a call of {name} takes {fmean(now):.2g} s{was} (rollout.tool_timeout is {limit:g} "
                "s). Look at the tool's server; rollout.overlap lets training go on while tools wait"
            )
    return None


def _tools(history: History) -> list[str]:
    keys = [key.split("/") for row in history.rows[-1:] for key in row if key.startswith("tool/")]
    return [name for name in dict.fromkeys(key[1] for key in keys if len(key) == 3) if name != UNKNOWN]


@after(STEPS)
def environment_slow(history: History) -> str | None:
    """Samples spend most of their time in the environment, and steps most of theirs in sampling."""
    rows = history.rows[-STEPS:]
    parts = ("time/sample_engine_s", "time/sample_tools_s", "time/sample_environment_s", "time/sample_hooks_s")
    if history.recipe.rollout.overlap != "none":
        return None
    for row in rows:
        spent = {key: row.get(key, 0.0) for key in parts}
        rest = row.get("time/step_s", 0.0) - row.get("time/rollout_s", 0.0)
        own = spent["time/sample_environment_s"] + spent["time/sample_hooks_s"]
        if own < 0.5 * sum(spent.values()) or own < 1.0 or row.get("time/rollout_s", 0.0) < 2 * rest:
            return None
    return (
        f"{history.span}: samples spend {own:.2g} s, half of their time or more, in the environment and its hooks, and "
        "training waits for them. Set rollout.overlap, or more conversations at once (rollout.concurrency)"
    )


FELL = 0.9
"""Share of its beginning to which a loss has fallen that fell at all."""
LEARNED = 0.1
"""Cross entropy, in nats a token, below which nothing is left to learn."""
SOLVED = 0.9
"""Held-out accuracy from which on teaching need not raise it."""


def not_taken(
    steps: int, loss: tuple[float, float], before: Mapping[str, float], after: Mapping[str, float]
) -> str | None:
    """Why so many steps of teaching did not take, and what to change. loss: of the first and of the last steps. before,
    after: held-out accuracy by split, where it was measured."""
    why = []
    if loss[1] > max(LEARNED, FELL * loss[0]):
        why.append(f"the loss hardly fell ({loss[0]:.3g} -> {loss[1]:.3g} nats a token)")
    both = [split for split in before if split in after]
    if both and all(after[split] <= before[split] + 0.01 and after[split] < SOLVED for split in both):
        moves = ", ".join(f"{split} {before[split]:.1%} -> {after[split]:.1%}" for split in both)
        why.append(f"held-out accuracy did not rise ({moves})")
    if not why:
        return None
    if len(why) == 1 and both:
        why.append(f"the loss fell from {loss[0]:.3g} to {loss[1]:.3g} nats a token")
    slow = loss[1] > LEARNED
    remedy = (
        f"more steps (sft.stages; there were {steps}), another lr there, or plainer conversations: a small model "
        "learns a few names by heart long before it copies any from its prompt"
        if slow
        else "other conversations: what is said there is learned, and it does not solve the tasks"
    )
    return f"{', and '.join(why)}. Likely remedy: {remedy}"


def start_not_taken(history: History) -> str | None:
    """What the recipe's `start` taught did not take: by its loss, by held-out accuracy, by unreadable calls."""
    row = history.start
    ends = row.get("start/loss_first"), row.get("start/loss_last")
    if ends[0] is None or ends[1] is None:
        return None
    before, after = _accuracies(row, "start"), _accuracies(row, "eval")
    line = not_taken(int(row.get("start/steps", 0)), (ends[0], ends[1]), before, after)
    if line is not None:
        seen = "".join(
            f"; agentrl show RUN --split {split} --step 0 prints what it says now" for split in list(after)[:1]
        )
        return f"the start did not take: {line}{seen}"
    for split in after:
        calls, errors = (row.get(f"eval/{split}/tool_{what}", 0.0) for what in ("calls", "errors"))
        if calls >= 0.5 and errors > 0.5 * calls and after[split] < SOLVED:
            return (
                f"the start did not take: on {split} {errors / calls:.0%} of the calls end in an error. Likely cause: "
                "demonstrations whose calls the tools refuse, or too few steps (sft.stages): agentrl show RUN --split "
                f"{split} --step 0 prints what the model says"
            )
    return None


def _accuracies(row: Row, kind: str) -> dict[str, float]:
    """The accuracies <kind>/<split>/accuracy of a row, by split."""
    ends = (key.split("/", 1) for key in row if key.startswith(f"{kind}/") and key.endswith("/accuracy"))
    return {rest.removesuffix("/accuracy"): row[f"{kind}/{rest}"] for _, rest in ends}


CONDITIONS: Mapping[str, Condition] = {
    "start_not_taken": start_not_taken,
    "tools_unknown": tools_unknown,
    "calls_unreadable": calls_unreadable,
    "calls_cut": calls_cut,
    "no_contrast": no_contrast,
    "cut_by_length": cut_by_length,
    "cut_by_time": cut_by_time,
    "answers_unreceived": answers_unreceived,
    "tools_not_called": tools_not_called,
    "entropy_collapse": entropy_collapse,
    "mismatch": mismatch,
    "mismatch_growing": mismatch_growing,
    "gradient_spike": gradient_spike,
    "update_discarded": update_discarded,
    "accuracy_falls": accuracy_falls,
    "part_gamed": part_gamed,
    "stale": stale,
    "samples_failed": samples_failed,
    "tool_fails": tool_fails,
    "tool_slow": tool_slow,
    "environment_slow": environment_slow,
}
"""Every condition by its name, which stands in `metrics.jsonl`."""


class Health:
    """Says which conditions a run's rows raise, each once a run.

    rows: those that the run has written before, of a run that is resumed; what they found is not said again.
    """

    def __init__(self, recipe: Recipe, rows: Sequence[Row] = ()) -> None:
        self._history = History(recipe)
        self._said: set[str] = set()
        for row in rows:
            self._history.add(row)
            self._said |= {found.get("name", "") for found in row.get("health", ()) if isinstance(found, dict)}

    def before_start(self) -> list[Finding]:
        """What can be said before the first step."""
        from agentrl.algo import losses  # the page of runs reads RANGES without torch

        recipe = self._history.recipe
        if not recipe.train.steps:
            return []
        found = []
        if (greedy := _greedy(recipe)) and recipe.algorithm.advantage.name in COMPARING:
            found += self._new(
                Finding(
                    "no_contrast",
                    f"{greedy}, so the samples of a task are one and the same unless its tools draw lots, and "
                    f"{recipe.algorithm.advantage.name}, which compares them, has nothing to learn from: sample at "
                    "rollout.temperature=1",
                )
            )
        loss, policy = losses.get(recipe.algorithm.loss.name), recipe.algorithm.streams.policy
        if loss.needs_updates and policy and recipe.train.mini_batches * recipe.train.epochs == 1:
            found += self._new(
                Finding(
                    "one_update",
                    f"algorithm.loss {recipe.algorithm.loss.name!r} pulls tokens back to the policy of the step's "
                    "beginning, and with one update a step nothing has moved yet, so that this has no gradient: set "
                    "train.mini_batches=4, or name another loss",
                )
            )
        return found

    def step(self, row: Row) -> list[Finding]:
        """What the row of the next step (or of step 0) raises, and was not said yet."""
        self._history.add(row)
        found = []
        for name, condition in CONDITIONS.items():
            if name not in self._said and (line := condition(self._history)) is not None:
                found += self._new(Finding(name, line))
        return found

    def remaining(self) -> list[Finding]:
        """What was said and is still so in the newest row, with the numbers of today; a cause stands for what it
        causes."""
        found = {name: condition(self._history) for name, condition in CONDITIONS.items() if name in self._said}
        if any(found.get(name) for name in ("tools_unknown", "calls_unreadable", "calls_cut")):
            found.pop("no_contrast", None)
        return [Finding(name, line) for name, line in found.items() if line is not None]

    def _new(self, finding: Finding) -> list[Finding]:
        new = finding.name not in self._said
        self._said.add(finding.name)
        return [finding] if new else []
