"""Health of a run: conditions on its rows of metrics, each a line with evidence, cause and remedy.

`CONDITIONS` is the one table: each condition with its check, the healthy ranges of the metrics that it watches (which
the page of a run shows, `RANGES`), what stands beside it as evidence, and the conditions of which it is a mere
consequence. `Health` holds the rows that a run has written, and says which conditions its newest row raised: once a
cause, and again where it has become twice as bad, or has come back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import takewhile
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from agentrl.learner.history import (
    STEPS,
    WINDOW,
    Break,
    History,
    Row,
    errors_apart,
    means,
    share,
    tool_broke,
    tools,
    update,
    values,
)
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import COMPARING
from agentrl.rollout.call_counts import UNCALLED, CallCounts, CallFault
from agentrl.trajectory import UNKNOWN

Range = tuple[float | None, float | None]
"""Healthy values of a metric: lowest and highest; None: no such bound."""
TIMES = 3
"""How often a condition is said of one cause at most: anew where it has become twice as bad, or has come back."""
ALWAYS = ("policy_broken", "reward_falls")
"""Conditions that are said though another one of their cause was: a mild sign of it tells nothing of the collapse."""


class Finding(NamedTuple):
    """A condition that a step raised."""

    name: str
    """Of the condition, in CONDITIONS."""
    line: str
    """What was found, its evidence, its likely cause, and what to do."""
    cause: str = ""
    """What is to be looked at first: a recipe key, `resume`, a tool, or the name of the condition."""
    size: float = 1.0
    """How bad it is, on a scale of the condition's own."""
    evidence: Mapping[str, tuple[float | None, float | None]] = {}
    """Metrics by name: before it began, and in the newest row; None: not measured."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found."""

    line: str
    """What is wrong, its likely cause, and what to do."""
    cause: str = ""
    """As in Finding; empty: the condition's own name."""
    size: float = 1.0
    """As in Finding."""
    since: int | None = None
    """The step in which it began; None: the newest one."""
    evidence: tuple[str, ...] = ()
    """Further metrics that are told with it, beside those of its condition."""


Key = tuple[str, str]
"""A condition and its cause."""
Check = Callable[[History], Found | Sequence[Found] | None]
"""Gives what is wrong, each cause by itself; None: nothing is."""


def after(steps: int) -> Callable[[Check], Check]:
    """A check of so many steps at least: it is not asked before there are as many."""

    def decorate(check: Check) -> Check:
        @wraps(check)
        def asked(history: History) -> Found | Sequence[Found] | None:
            return check(history) if len(history.rows) >= steps else None

        return asked

    return decorate


def _lasting(history: History, least: float, of: Callable[[Row], float]) -> float | None:
    """The mean share in the last STEPS steps, where it was `least` or more in each."""
    shares = [of(row) for row in history.rows[-STEPS:]]
    return fmean(shares) if min(shares) >= least else None


def _began(history: History, holds: Callable[[Row], bool]) -> int:
    """The first of the newest steps in all of which something holds."""
    began = history.step
    for row in reversed(history.rows):
        if not holds(row):
            break
        began = int(row["step"])
    return began


def _outside(history: History, keys: Sequence[str], steps: int = STEPS) -> tuple[str, float] | None:
    """The first of these metrics that lay outside of its range in each of the last steps, and its mean."""
    for key in keys:
        low, high = RANGES[key]
        found = history.latest(key, steps)
        if found and ((low is not None and max(found) < low) or (high is not None and min(found) > high)):
            return key, fmean(found)
    return None


def _just_before(history: History, step: int) -> str:
    """What changed just before a step, as the end of a line; empty where nothing is known."""
    found = history.changes(step)
    return f". Just before: {'; '.join(found)}" if found else ""


def policy_broken(history: History) -> Found | None:
    """From one step to the next the policy behaves otherwise and earns little: what changed between them did it."""
    if (broken := history.broken) is None:
        return None
    cause, why = _breaking(history, broken)
    earned = broken.before.get("reward/mean", 0.0)
    now = history.rows[-1].get("reward/mean", 0.0)
    return Found(
        f"step {broken.step}: the policy broke: reward {earned:.3g} -> {now:.3g}, {', '.join(broken.moved)}. Likely "
        f"cause: {why}",
        cause=cause,
        since=broken.step,
    )


def _breaking(history: History, broken: Break) -> tuple[str, str]:
    """What broke the policy, by what changed just before: the recipe's key, and a text."""
    recipe, step, former = history.recipe, broken.step, broken.update
    if history.resumed == step - 1:
        return "resume", (
            f"the run was resumed after step {history.resumed}: compare the recipe, the versions and the model that "
            "it went on with"
        )
    grew = broken.row.get("train/entropy", 0.0) > 2 * broken.before.get("train/entropy", 0.0) > 0
    if grew and recipe.algorithm.entropy_coef > 0:
        return "algorithm.entropy_coef", (
            f"algorithm.entropy_coef {recipe.algorithm.entropy_coef:g} pays for it: lower it tenfold, or set it to 0"
        )
    if not former.get("train/updates"):
        return "environment", (
            f"no update was made in step {former['step']}, so that it is not the weights: look at what tasks, tools "
            "and rewards gave in that step (agentrl show)"
        )
    synced = [key for key in ("mismatch/logprob_mean", "mismatch/kl") if _beyond(broken.row, key)]
    if synced and recipe.engine.name != "local":
        return "sync", (
            "the weights did not reach the engine as they are: engine and trainer differ from this step on (see "
            "weight_version in the trajectories)"
        )
    other = "" if recipe.engine.name == "local" else "; if not, the sync of the weights"
    return "train.lr", (
        f"train.lr: {update(former)} was all that lay between: go on from a checkpoint before it with a learning rate "
        f"ten times lower{other}"
    )


def _beyond(row: Row, key: str) -> bool:
    """Whether a metric of a row is above its range."""
    high = RANGES[key][1]
    return high is not None and row.get(key, high) > high


ASTRAY = 0.75
"""Calls a sample of tools that do not exist, from which on a model is not said to call none."""


UNLEARNED = 0.2
"""Share of calls that had a fault, up to which a model that makes it in most calls of the next step knew better."""


def tools_unknown(history: History) -> Found | None:
    """At least half of the calls of a step name tools that are not offered."""
    return _call_fault(history, "tools_unknown")


def calls_unreadable(history: History) -> Found | None:
    """At least half of the calls of a step cannot be read."""
    return _call_fault(history, "calls_unreadable")


def calls_cut(history: History) -> Found | None:
    """At least half of the calls of a step were cut off by the token limit of a turn."""
    return _call_fault(history, "calls_cut")


def _call_fault(history: History, name: str) -> Found | None:
    """A fault of most calls; where hardly any had it in the step before, by what changed just before."""
    found = next((fault for fault in _call_faults(history) if fault.name == name), None)
    if found is None:
        return None
    key = f"calls/{name.partition('_')[2]}"

    def wrong(row: Row) -> float:
        calls: float = sum(row.get(f"tool/{tool}/calls", 0) for tool in (*tools(row), UNKNOWN))
        return float(row.get(key, 0) / max(1, calls))

    began = _began(history, lambda row: wrong(row) >= 0.5)
    former = [row for row in history.rows if row["step"] < began][-WINDOW:]
    if not former or wrong(former[-1]) > UNLEARNED:
        return Found(f"step {history.step}: {found.line}. Likely cause: {found.remedy}")
    cause, why = _breaking(history, Break(began, history.row(began), means(former), former[-1], ()))
    before = f"{wrong(former[-1]):.0%} of them in step {former[-1]['step']}"
    return Found(f"step {history.step}: {found.line}; {before}. Likely cause: {why}", cause=cause, since=began)


def _call_faults(history: History) -> list[CallFault]:
    """What most calls of the newest step have wrong, or most of its samples."""
    row = history.rows[-1] if history.rows else {}
    offered = tools(row)
    counts = CallCounts(
        samples=row.get("rollout/trajectories", 0) if offered else 0,
        silent=row.get("calls/none", 0),
        calls=sum(row.get(f"tool/{name}/calls", 0) for name in (*offered, UNKNOWN)),
        unreadable=row.get("calls/unreadable", 0),
        cut=row.get("calls/cut", 0),
        unknown=row.get("calls/unknown", 0),
        offered=dict.fromkeys(offered),
    )
    return counts.faults(history.recipe.rollout.max_turn_tokens, history.unknown_names)


@after(STEPS)
def no_contrast(history: History) -> Found | None:
    """The samples of each task have equal rewards, STEPS steps in a row."""
    recipe, rows = history.recipe, history.rows[-STEPS:]
    if not all(_learns_nothing(recipe, row) for row in rows):
        return None
    cause, why = _no_contrast_cause(history, rows[-1])
    return Found(
        f"{history.span}: no two samples of a task differed in their reward, and "
        f"{recipe.algorithm.advantage.name} learned nothing. Likely cause: {why}",
        cause=cause,
        since=_began(history, lambda row: _learns_nothing(recipe, row)),
    )


def _learns_nothing(recipe: Recipe, row: Row) -> bool:
    if row.get("groups/varied", 1):
        return False
    waits = recipe.critic is not None and row["step"] <= recipe.critic.warmup_steps
    if row.get("distill/tokens") or row.get("imitate/tokens"):
        return False
    return recipe.algorithm.advantage.name in COMPARING or (row.get("train/samples") == 0 and not waits)


def _no_contrast_cause(history: History, row: Row) -> tuple[str, str]:
    """The likely cause by the metrics of a step, as a name and a text; the surest sign is checked first."""
    recipe = history.recipe
    played = row.get("rollout/trajectories", 0)
    if greedy := _greedy(recipe):
        return "sampling", greedy
    if faults := _call_faults(history):
        return faults[0].name, f"{faults[0].line}; {faults[0].remedy}"
    cut = sum(row.get(f"stop/{why}", 0) for why in ("length", "max_turns", "timeout"))
    if 2 * cut > played:
        return "limits", (
            f"{cut} of {played} samples were cut off (rollout.max_turn_tokens, max_tokens, max_turns or timeout) "
            "before they could earn anything"
        )
    varied = [values([one], "groups/varied") for one in history.rows[:-STEPS]]
    if any(one and one[0] for one in varied):
        step = _began(history, lambda one: _learns_nothing(recipe, one))
        return "reward", (
            f"the rewards of step {step} and later, which differed before while the samples went on as they did: look "
            f"at what computes them, and at trajectories/ (mean reward {row.get('reward/mean', 0):.3g})"
        )
    return "reward", (
        "a reward that is the same for all, or tasks far too hard or too easy for this model (mean reward "
        f"{row.get('reward/mean', 0):.3g}); look at trajectories/"
    )


def _greedy(recipe: Recipe) -> str:
    """Why sampling is deterministic under this recipe; empty if it is not."""
    if recipe.rollout.temperature == 0:
        return "rollout.temperature is 0"
    return "rollout.top_k is 1" if recipe.rollout.top_k == 1 else ""


FEW = 0.1
"""Share of the tasks that teach something, over WINDOW steps, up to which it is said."""
NEARLY = 0.9
"""Share of the largest reward of a sample from which on tasks are as good as solved."""


@after(WINDOW)
def few_teach(history: History) -> Found | None:
    """At most FEW of the tasks of WINDOW steps had samples with different rewards, and they are not solved."""
    rows = history.rows[-WINDOW:]
    varied, equal = (sum(row.get(f"groups/{kind}", 0) for row in rows) for kind in ("varied", "equal"))
    if not varied or varied > FEW * (varied + equal) or history.recipe.algorithm.advantage.name not in COMPARING:
        return None
    reward, most = fmean(values(rows, "reward/mean") or [0.0]), max(values(rows, "reward/max"), default=0.0)
    if reward >= NEARLY * most > 0:
        return None
    side = "too hard" if reward < 0.5 * most else "too easy or too hard"
    return Found(
        f"steps {rows[0]['step']} to {history.step}: {varied} of {varied + equal} tasks taught something; the samples "
        f"of all others earned the same (mean reward {reward:.3g}). Likely cause: tasks {side} for this model: "
        "easier ones, more samples a task (rollout.n), data.order: curriculum, or algorithm.dynamic_sampling",
        cause="tasks",
        since=int(rows[0]["step"]),
    )


CUT = 0.25
"""Share of a step's samples that ran out of tokens, or of time, from which on it is said."""
LONGER = 1.25
"""How many times longer than at first samples are where limits are not the cause that they are cut."""


@after(STEPS)
def cut_by_length(history: History) -> Found | None:
    """At least CUT of the samples ran out of tokens, STEPS steps in a row."""
    if (part := _lasting(history, CUT, lambda row: share(row, "stop/length"))) is None:
        return None
    r, since = history.recipe.rollout, _began(history, lambda row: share(row, "stop/length") >= CUT)
    tokens, start = history.latest("rollout/response_tokens_mean"), history.beginning("rollout/response_tokens_mean")
    rewards, earned = history.latest("reward/mean"), history.beginning("reward/mean")
    found = f"{history.span}: {part:.0%} of the samples ran out of tokens before they ended. Likely cause: "
    if tokens and start and rewards and earned and fmean(tokens) > LONGER * fmean(start):
        grew = f"samples grew from {fmean(start):.3g} to {fmean(tokens):.3g} tokens"
        if fmean(rewards) > fmean(earned):
            told = f"{grew}, and the reward with them: it pays for length: take it off the reward"
            return Found(found + told, cause="reward", size=part, since=since)
        told = f"{grew}, and earn no more: a model that does not stop{_just_before(history, since)}"
        return Found(found + told, cause="length", size=part, since=since)
    return Found(
        f"{found}limits too low (rollout.max_turn_tokens is {r.max_turn_tokens}, rollout.max_tokens {r.max_tokens}), "
        "or a model that does not stop: raise them, or take length off the reward",
        cause="limits",
        size=part,
        since=since,
    )


@after(STEPS)
def cut_by_time(history: History) -> Found | None:
    """At least CUT of the samples ran out of time, STEPS steps in a row."""
    if (part := _lasting(history, CUT, lambda row: share(row, "stop/timeout"))) is None:
        return None
    return Found(
        f"{history.span}: {part:.0%} of the samples ran out of time. Likely cause: a slow tool or environment "
        "(tool/<name>/seconds, time/sample_environment_s), or an engine with more conversations than it can serve: "
        "lower rollout.concurrency, or raise rollout.timeout",
        size=part,
        since=_began(history, lambda row: share(row, "stop/timeout") >= CUT),
    )


USED_UP = 0.7
"""Share of a step's samples that ran out of turns or of calls from which on it is said."""


@after(STEPS)
def turns_used_up(history: History) -> Found | None:
    """At least USED_UP of the samples ran out of turns, or of tool calls, STEPS steps in a row, and earn little."""
    rollout = history.recipe.rollout
    for kind, most in (("max_turns", rollout.max_turns), ("max_tool_calls", rollout.max_tool_calls)):
        part = _lasting(history, USED_UP, lambda row, kind=kind: share(row, f"stop/{kind}"))  # type: ignore[misc]
        if part is None or _solved(history.rows[-STEPS:]):
            continue
        since = _began(history, lambda row, kind=kind: share(row, f"stop/{kind}") >= USED_UP)  # type: ignore[misc]
        if since == history.rows[0]["step"]:
            why = f"rollout.{kind} {most} is too low for these tasks: raise it, or say in the prompt when to answer"
        else:
            why = f"a model that goes on instead of answering{_just_before(history, since)}"
        return Found(
            f"{history.span}: {part:.0%} of the samples ran out of {kind.removeprefix('max_').replace('_', ' ')} "
            f"before they ended. Likely cause: {why}",
            cause="limits",
            since=since,
        )
    return None


def _earns_more(history: History) -> bool:
    """Whether the reward of the last STEPS steps lies above that of the first, beyond its noise."""
    now, start = history.latest("reward/mean"), history.beginning("reward/mean")
    return bool(now and start) and errors_apart(start, now) > 2


def _solved(rows: Sequence[Row]) -> bool:
    """Whether the mean reward is nearly the largest of a sample."""
    most = max(values(rows, "reward/max"), default=0.0)
    return 0 < NEARLY * most <= fmean(values(rows, "reward/mean") or [0.0])


@after(STEPS)
def answers_unreceived(history: History) -> Found | None:
    """Nobody received at least CUT of the answers to an agent's calls, STEPS steps in a row."""

    def unreceived(row: Row) -> float:
        return float(row.get("gateway/unreceived", 0) / max(1, row.get("gateway/calls", 0)))

    if (part := _lasting(history, CUT, unreceived)) is None:
        return None
    return Found(
        f"{history.span}: nobody received {part:.0%} of the answers to the agent's calls, which are not "
        "trained. Likely cause: the time-out of the agent's client is shorter than an answer takes: raise it, or lower "
        "rollout.concurrency",
        size=part,
        since=_began(history, lambda row: unreceived(row) >= CUT),
    )


@after(STEPS)
def tools_not_called(history: History) -> Found | None:
    """No tool is called in the first steps, or what was called before is called no longer."""
    offered = tools(history.rows[-1])
    calls = {name: [share(row, f"tool/{name}/calls") for row in history.rows[-WINDOW:]] for name in offered}
    played = max(1.0, fmean(history.last("rollout/trajectories", WINDOW) or [1.0]))
    most = {name: max(map(fmean, history.before(f"tool/{name}/calls")), default=0.0) / played for name in offered}
    gone = [name for name in offered if most[name] >= 0.5 and fmean(calls[name]) < 0.05 * most[name]]
    if gone:
        return Found(
            f"step {history.step}: the model hardly calls {', '.join(gone)} any more. Likely cause: "
            "answers without a call earn as much, or calls cost reward: compare both in trajectories/",
            cause="reward",
            since=_began(history, lambda row: share(row, f"tool/{gone[0]}/calls") < 0.05 * most[gone[0]]),
        )
    rows = history.rows[-WINDOW:]
    astray = fmean(share(row, f"tool/{UNKNOWN}/calls") for row in rows or [{}])
    enough = len(rows) >= (WINDOW if any(history.last("reward/mean", WINDOW)) else STEPS)
    others = any(fault.name != "no_calls" for fault in _call_faults(history))
    if offered and enough and not any(map(any, calls.values())) and astray < ASTRAY and not others:
        count = sum(row.get("rollout/trajectories", 0) for row in rows)
        return Found(
            f"{count} of {count} samples of {len(rows)} steps called none of the tools that their tasks offer "
            f"({', '.join(offered)}). Likely cause: {UNCALLED}",
            since=int(rows[0]["step"]),
        )
    return None


FALLEN = 0.25
"""Share of the best reward that is lost before a fall is said."""


@after(WINDOW + STEPS)
def reward_falls(history: History) -> Found | None:
    """The reward of the last five steps lies far below its best WINDOW of before, beyond its noise."""
    rewards, recent = history.last("reward/mean"), 5
    earlier = rewards[:-recent]
    if len(earlier) < recent:
        return None
    size = min(WINDOW, len(earlier))
    windows = [earlier[start : start + size] for start in range(len(earlier) - size + 1)]
    windows += [one] if len(one := values(history.first, "reward/mean")) == WINDOW else []
    best, now = max(windows, key=fmean), rewards[-recent:]
    earned = fmean(best) - history.floor
    if earned <= 0 or fmean(best) - fmean(now) < FALLEN * earned or errors_apart(best, now) > -5:
        return None
    since = _began(history, lambda row: row.get("reward/mean", 0.0) < fmean(best) - 0.5 * FALLEN * earned)
    cause, why = _falling(history, since)
    return Found(
        f"step {history.step}: the reward falls: {fmean(best):.3g} in its best {size} steps, {fmean(now):.3g} in the "
        f"last {recent}. Likely cause: {why}{_just_before(history, since)}",
        cause=cause,
        size=(fmean(best) - fmean(now)) / earned,
        since=since,
    )


def _falling(history: History, since: int) -> tuple[str, str]:
    """Why the reward falls, by what else is out of its range, the surest sign first: its name, and a text."""
    row, before = history.rows[-1], means([one for one in history.rows if one["step"] < since] or history.first)
    if history.resumed == since - 1:
        return "resume", f"the run was resumed after step {history.resumed}: compare what its recipe changed"
    if broken := tool_broke(before, row):
        return f"tool/{broken[0]}", f"most calls of {broken[0]} end in an error now: look at the tool's server"
    key = "rollout/response_tokens_mean"
    if row.get(key, 0.0) > 1.5 * before.get(key, 9e9):
        return "length", (
            f"samples grew from {before[key]:.3g} to {row[key]:.3g} tokens and earn less: a length penalty "
            "(algorithm.overlong), another algorithm.aggregation, or a lower train.lr"
        )
    if _outside(history, ("rollout/staleness_mean",)):
        return "rollout.max_staleness", "samples are many updates old when they are trained on (see `stale`)"
    if _outside(history, MISMATCHES):
        return "mismatch", _mismatch_causes(history.recipe)
    if _outside(history, ("train/approx_kl", "train/clip_fraction")):
        return "train.lr", f"updates are too large: {_smaller(history)}"
    then, now = before.get("train/entropy", 0.0), row.get("train/entropy", 0.0)
    if then and now > 2 * then and history.recipe.algorithm.entropy_coef:
        return "algorithm.entropy_coef", "the entropy grows, and algorithm.entropy_coef pays for it: lower it"
    failed = [share(one, "rollout/failed") for one in (before, row)]
    if failed[1] > 0.1 > failed[0]:
        return "samples_failed", "many samples fail since then: agentrl show RUN --failed prints the errors"
    rate = row.get("train/lr", 0.0)
    return "train.lr", f"train.lr ({rate:.3g}) is too high for this model: lower it, and go on from the best checkpoint"


def _smaller(history: History) -> str:
    """How the updates of a step become smaller under this recipe."""
    train = history.recipe.train
    count = train.mini_batches * train.epochs
    many = (
        f", or fewer than {count} updates a step (train.mini_batches {train.mini_batches}, train.epochs {train.epochs})"
    )
    return f"lower train.lr ({history.rows[-1].get('train/lr', train.lr or 0.0):.3g}){many if count > 1 else ''}"


@after(WINDOW)
def entropy_collapse(history: History) -> Found | None:
    """The entropy fell below a tenth of what it was, and the reward did not rise, or fell from what it had been."""
    entropies, rewards = history.last("train/entropy", WINDOW), history.last("reward/mean", WINDOW)
    windows, earned = history.before("train/entropy"), history.before("reward/mean")
    if not windows or not earned or fmean(entropies) >= 0.1 * fmean(windows[0]) or _solved(history.rows[-WINDOW:]):
        return None
    moves = [errors_apart(before, rewards) for before in earned]
    if moves[0] > 2 and min(moves) > -4:
        return None
    return Found(
        f"step {history.step}: the policy became nearly deterministic without earning more: entropy "
        f"{fmean(windows[0]):.3g} -> {fmean(entropies):.3g} nats, reward {fmean(earned[0]):.3g} -> "
        f"{fmean(rewards):.3g}. Lower train.lr, raise algorithm.clip_high or algorithm.entropy_coef, or go on from an "
        "earlier checkpoint",
        cause="train.lr",
        since=_began(history, lambda row: row.get("train/entropy", 9e9) < 0.1 * fmean(windows[0])),
    )


GREW = 2.5
"""How many times its beginning an entropy or a length is where it grew too much."""


@after(STEPS + 2)
def entropy_grows(history: History) -> Found | None:
    """The entropy is GREW times that of the first steps, and at least 0.3 nats more, STEPS steps in a row."""
    now, start = history.latest("train/entropy"), history.beginning("train/entropy")
    if not now or not start or min(now) < max(GREW * fmean(start), fmean(start) + 0.3) or _earns_more(history):
        return None
    since = _began(history, lambda row: row.get("train/entropy", 0.0) > GREW * fmean(start))
    coefficient = history.recipe.algorithm.entropy_coef
    cause = "algorithm.entropy_coef" if coefficient else "train.lr"
    why = (
        f"algorithm.entropy_coef {coefficient:g} pays for it: lower it tenfold"
        if coefficient
        else f"updates push towards what was hardly sampled: {_smaller(history)}"
    )
    return Found(
        f"{history.span}: the entropy grows: {fmean(start):.3g} nats in the first steps, {fmean(now):.3g} now. Likely "
        f"cause: {why}{_just_before(history, since)}",
        cause=cause,
        size=fmean(now) / fmean(start),
        since=since,
    )


@after(STEPS + 2)
def length_grows(history: History) -> Found | None:
    """Samples are GREW times as long as in the first steps, STEPS steps in a row, and the reward did not rise."""
    return _length(history, grows=True)


@after(STEPS + 2)
def length_shrinks(history: History) -> Found | None:
    """Samples are GREW times as short as in the first steps, STEPS steps in a row, and the reward did not rise."""
    return _length(history, grows=False)


def _length(history: History, *, grows: bool) -> Found | None:
    key = "rollout/response_tokens_mean"
    now, start = history.latest(key), history.beginning(key)
    rewards, earned = history.latest("reward/mean"), history.beginning("reward/mean")
    if not now or not start or not rewards or not earned or min(*now, *start) <= 0:
        return None
    times = min(now) / fmean(start) if grows else fmean(start) / max(now)
    if times < GREW or _earns_more(history) or _solved(history.rows[-STEPS:]):
        return None

    def holds(row: Row) -> bool:
        return bool(row.get(key, 0.0) > GREW * fmean(start) if grows else row.get(key, 9e9) < fmean(start) / GREW)

    since = _began(history, holds)
    why = (
        "longer samples are seldom punished, or a token weighs less in them: a length penalty (algorithm.overlong, "
        "rewards), another algorithm.aggregation"
        if grows
        else "a reward that punishes length or turns more than it pays for solving: weigh it less (rewards.weights)"
    )
    return Found(
        f"{history.span}: samples became {'longer' if grows else 'shorter'} and earn no more: {fmean(start):.3g} -> "
        f"{fmean(now):.3g} tokens, reward {fmean(earned):.3g} -> {fmean(rewards):.3g}. Likely cause: {why}"
        f"{_just_before(history, since)}",
        cause="length",
        size=times,
        since=since,
    )


@after(STEPS)
def kl_high(history: History) -> Found | None:
    """The KL to the reference lies above its range, STEPS steps in a row."""
    if (found := _outside(history, ("train/kl",))) is None:
        return None
    coefficient = history.rows[-1].get("train/kl_coef", history.recipe.algorithm.kl_coef)
    return Found(
        f"{history.span}: the policy is {found[1]:.3g} nats a token away from the reference. Likely cause: "
        f"algorithm.kl_coef ({coefficient:.3g}) holds it back too little for this learning rate: raise it, or lower "
        f"train.lr ({history.rows[-1].get('train/lr', 0.0):.3g})",
        cause="algorithm.kl_coef",
        size=found[1],
        since=_began(history, lambda row: _beyond(row, "train/kl")),
    )


UPDATES = ("train/approx_kl", "train/clip_fraction", "train/ratio_mean", "train/clip_fraction_dual")


@after(STEPS)
def updates_too_large(history: History) -> Found | None:
    """The policy moves too far within a step: KL, clip fraction or ratio are out of range, STEPS steps in a row."""
    if (found := _outside(history, UPDATES)) is None:
        return None
    name, value = found
    return Found(
        f"{history.span}: the updates of a step move the policy too far: {name} {value:.3g} (healthy: {_range(name)}). "
        f"Likely cause: a learning rate too high for so many updates: {_smaller(history)}",
        cause="train.lr",
        size=abs(value),
        since=history.rows[-STEPS]["step"],
    )


def _range(name: str) -> str:
    """The healthy range of a metric as text."""
    low, high = RANGES[name]
    if low is None or high is None:
        return f"at least {low:g}" if low is not None else f"at most {high:g}"
    return f"{low:g} to {high:g}"


MISMATCHES = ("mismatch/logprob_mean", "mismatch/kl", "mismatch/ess", "mismatch/weight_cut", "mismatch/weight_mean")


def mismatch(history: History) -> Found | None:
    """Engine and trainer compute different log-probs: by the mean, or by the effective sample size; by another
    measure STEPS steps in a row."""
    row = history.rows[-1] if history.rows else {}
    mean, ess = row.get("mismatch/logprob_mean", 0.0), row.get("mismatch/ess", 1.0)
    at_once = mean > (RANGES["mismatch/logprob_mean"][1] or 0) or ess < (RANGES["mismatch/ess"][0] or 0)
    lasting = None if at_once or len(history.rows) < STEPS else _outside(history, MISMATCHES)
    if not at_once and lasting is None:
        return None
    beside = "" if lasting is None else f", {lasting[0]} {lasting[1]:.3g} (healthy: {_range(lasting[0])})"
    since = _began(history, lambda one: any(_beyond(one, key) for key in MISMATCHES[:2]))
    return Found(
        f"step {row['step']}: engine and trainer give sampled tokens other probabilities: {mean:.3f} nats in the mean, "
        f"at most {row.get('mismatch/logprob_max', mean):.2f}, effective sample size {ess:.0%}{beside}. "
        f"Likely causes: {_mismatch_causes(history.recipe)}{_just_before(history, since)}",
        size=max(mean, 1e-3),
        since=since,
    )


@after(WINDOW)
def mismatch_growing(history: History) -> Found | None:
    """The mismatch is within its bound, and five times what it was in the beginning."""
    now, windows = history.last("mismatch/logprob_mean", WINDOW), history.before("mismatch/logprob_mean")
    if not windows or len(now) < WINDOW or fmean(now) < 5 * fmean(windows[0]) or fmean(now) < 0.01:
        return None
    return Found(
        f"step {history.step}: engine and trainer drift apart: {fmean(windows[0]):.2g} -> {fmean(now):.2g} "
        f"nats a token. Likely causes: {_mismatch_causes(history.recipe)}",
        cause="mismatch",
        size=now[-1],
        since=int(history.rows[-WINDOW]["step"]),
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
def gradient_spike(history: History) -> Found | None:
    """The gradient is ten times the median of the steps before, and is clipped."""
    norms, limit = [norm for norm in history.last("train/grad_norm") if norm > 0], history.recipe.train.max_grad_norm
    if len(norms) <= WINDOW or norms[-1] != history.rows[-1].get("train/grad_norm"):
        return None
    usual = median(norms[:-1])
    if norms[-1] < 10 * usual or norms[-1] <= limit:
        return None
    return Found(
        f"step {history.step}: the gradient's norm is {norms[-1]:.3g}, {norms[-1] / usual:.0f} times what "
        f"it was ({usual:.3g}); it was clipped to {limit:g}. Once may be chance; else lower train.lr, or look "
        "for samples of another kind in this step's trajectories (agentrl show)",
        cause="gradient",
        size=norms[-1] / usual,
    )


MANY = 5
"""Steps after which a gradient of 0, or one that is always clipped, is said."""
CLIPPED = 10.0
"""How many times `train.max_grad_norm` a gradient is that is huge."""


@after(MANY)
def gradient_zero(history: History) -> Found | None:
    """The gradient is 0, MANY steps in a row, although samples were trained on; or the learning rate is."""
    rows = history.rows[-MANY:]
    if all(row.get("train/lr") == 0 and row.get("train/updates") for row in rows):
        why, cause = "train.lr is 0, so that updates change nothing", "train.lr"
    elif all(row.get("train/samples") and 0 <= row.get("train/grad_norm", 1.0) < 1e-9 for row in rows):
        why, cause = (
            (
                "nothing that is trained depends on the loss: frozen parameters (model.freeze, model.lora), a mask or "
                "a filter that leaves no token (algorithm.off_policy_mask, algorithm.reject), an own loss without a "
                "gradient"
            ),
            "gradient",
        )
    else:
        return None
    return Found(
        f"steps {rows[0]['step']} to {history.step}: samples are trained on, and the weights do not move: gradient "
        f"{rows[-1].get('train/grad_norm', 0.0):.3g}. Likely cause: {why}",
        cause=cause,
        since=int(rows[0]["step"]),
    )


@after(MANY)
def gradient_large(history: History) -> Found | None:
    """The gradient is CLIPPED times its limit, MANY steps in a row: each update is clipped to a fraction."""
    norms, limit = history.latest("train/grad_norm", MANY), history.recipe.train.max_grad_norm
    if not norms or not limit or min(norms) < CLIPPED * limit:
        return None
    return Found(
        f"steps {history.rows[-MANY]['step']} to {history.step}: the gradient's norm is {median(norms):.3g}, and every "
        f"update is clipped to {limit:g}: its direction is that of the largest samples. Likely cause: a loss summed "
        "and not averaged (algorithm.aggregation), rewards of a large scale (rewards.weights), or a policy that "
        f"diverges: {_smaller(history)}",
        cause="gradient",
        size=median(norms),
        since=int(history.rows[-MANY]["step"]),
    )


def update_discarded(history: History) -> Found | None:
    """A gradient was not finite."""
    row = history.rows[-1] if history.rows else {}
    if not (lost := row.get("train/updates_not_finite", 0)):
        return None
    return Found(
        f"step {row['step']}: the gradient of {lost} updates was not finite, and they were not made. Likely cause: a "
        "learning rate too high, numbers beyond bfloat16, or an own loss: lower train.lr, or set model.compute: "
        "float32",
        cause="train.lr",
        size=float(lost),
    )


CRITIC = ("critic/explained_variance", "critic/clip_fraction")


@after(WINDOW)
def critic_poor(history: History) -> Found | None:
    """After its warm-up the critic predicts worse than the mean return, or is always clipped, MANY steps in a row."""
    critic = history.recipe.critic
    if critic is None or history.step <= critic.warmup_steps + MANY:
        return None
    if (found := _outside(history, CRITIC, MANY)) is None:
        return None
    name, value = found
    lr = history.rows[-1].get("critic/lr", critic.lr)
    wild = value < -1 or name == "critic/clip_fraction"
    why = (
        f"critic.lr ({lr:.3g}) is too high: lower it"
        if wild
        else f"critic.warmup_steps ({critic.warmup_steps}) too few, or critic.lr ({lr:.3g}) too low or too high"
    )
    return Found(
        f"steps {history.rows[-MANY]['step']} to {history.step}: the critic misleads the policy: {name} {value:.3g} "
        f"(healthy: {_range(name)}). Likely cause: {why}",
        cause="critic.lr",
        size=abs(value),
        since=int(history.rows[-MANY]["step"]),
    )


def accuracy_falls(history: History) -> Found | None:
    """The reward rose while the accuracy on held-out tasks fell from its best, beyond the intervals of both, which are
    wider the more evaluations the best is chosen from (Bonferroni)."""
    for split in history.evaluated:
        *earlier, now = history.evaluations[split]
        best = max(earlier, key=lambda one: one.accuracy[1], default=None)
        if best is None or now.reward is None:
            continue
        (most, low, _), (value, _, high) = best.accuracy, now.accuracy
        wider = NormalDist().inv_cdf(1 - 0.025 / len(earlier)) / NormalDist().inv_cdf(0.975)
        if most - value <= wider * (most - low + high - value):
            continue
        then = fmean(values(history.first, "reward/mean")) if best.reward is None else best.reward
        if now.reward > then:
            return Found(
                f"step {now.step}: the reward rose ({then:.3g} -> {now.reward:.3g}) while the accuracy on {split} fell "
                f"({most:.1%} after step {best.step} -> {value:.1%}). Likely cause: training "
                "tasks learned by heart, or a reward that is earned in another way than by solving: stop here, "
                "more tasks, compare reward/<part>, and read trajectories/",
                cause="reward",
                size=most - value,
                since=best.step,
            )
    return None


@after(WINDOW)
def part_gamed(history: History) -> Found | None:
    """One reward part rose while another fell by a fifth or more, both far beyond their noise."""
    weights = history.recipe.rewards.weights
    keys = [key for row in history.rows[-1:] for key in row if _is_part(key) and weights.get(key[7:], 1.0) > 0]
    for index in range(len(history.before("reward/mean"))):
        moves = {}
        for key in keys:
            windows, now = history.before(key), history.last(key, WINDOW)
            if index < len(windows) and len(now) == WINDOW:
                moves[key] = (errors_apart(windows[index], now), fmean(windows[index]), fmean(now))
        rose = max(moves, key=lambda key: moves[key][0], default=None)
        fell = min(moves, key=lambda key: moves[key][0], default=None)
        if rose is None or fell is None or moves[rose][0] < 5 or moves[fell][0] > -5:
            continue
        if moves[fell][1] - moves[fell][2] >= 0.2 * abs(moves[fell][1]):
            up, down = (f"{key[7:]!r} {{}} ({moves[key][1]:.3g} -> {moves[key][2]:.3g})" for key in (rose, fell))
            return Found(
                f"step {history.step}: reward part {up.format('rose')} while {down.format('fell')}. Likely "
                f"cause: {rose[7:]!r} is easier to earn: lower rewards.weights.{rose[7:]}, or give it only to samples "
                f"that earn {fell[7:]!r}",
                cause="reward",
                since=int(history.rows[-WINDOW]["step"]),
            )
    return None


def _is_part(key: str) -> bool:
    kind, _, part = key.partition("/")
    return kind == "reward" and "/" not in part and part not in ("mean", "std", "min", "max", "kl_penalty")


@after(STEPS)
def stale(history: History) -> Found | None:
    """Samples were older than the healthy range in the mean, STEPS steps in a row."""
    if (found := _outside(history, ("rollout/staleness_mean",))) is None:
        return None
    return Found(
        f"{history.span}: samples are {found[1]:.1f} updates old in the mean when they are trained on. Lower "
        f"rollout.max_staleness ({history.recipe.rollout.max_staleness}), or speed sampling up: more servers, shorter "
        "samples, a faster tool",
        cause="rollout.max_staleness",
        size=found[1],
        since=int(history.rows[-STEPS]["step"]),
    )


@after(STEPS)
def samples_failed(history: History) -> Found | None:
    """A tenth of the samples or more failed, STEPS steps in a row; or some in most of WINDOW steps."""
    part = _lasting(history, 0.1, lambda row: share(row, "rollout/failed"))
    rows = history.rows[-WINDOW:]
    failing = [row for row in rows if _fails(row)]
    if part is None and (len(rows) < WINDOW or 2 * len(failing) <= len(rows)):
        return None
    counts = {key.rpartition("/")[2]: row[key] for row in failing for key in row if key.startswith("rollout/failed/")}
    owner = max(counts, key=lambda one: counts[one], default="?")
    since = _began(history, _fails)
    changed = _just_before(history, since) if since != history.rows[0]["step"] else ""
    told = (
        f"{history.span}: {part:.0%} of the samples failed, most by {owner}, and were not trained on"
        if part is not None
        else f"in {len(failing)} of the last {len(rows)} steps samples failed or were played again, most by {owner}"
    )
    return Found(
        f"{told}. agentrl show RUN --failed prints the errors{changed}",
        cause=f"{owner} fails",
        size=part or 0.05,
        since=since,
    )


def _fails(row: Row) -> bool:
    return any(_beyond(row, key) for key in ("rollout/failed", "rollout/retried", "stop/error", "groups/few"))


@after(STEPS)
def release_errors(history: History) -> Found | None:
    """Calls of `release` raised, STEPS steps in a row."""
    if (found := _outside(history, ("rollout/release_errors",))) is None:
        return None
    return Found(
        f"{history.span}: {found[1]:.0f} calls of release raised in a step. Likely cause: a tool or environment that "
        "cannot give back what it opened: its sessions leak until the run ends; mend its release",
        size=found[1],
        since=_began(history, lambda row: _beyond(row, "rollout/release_errors")),
    )


@after(STEPS)
def tool_fails(history: History) -> list[Found]:
    """More than half of the calls of a tool end in an error: no fewer than before, over two WINDOWs; or, where few did,
    nearly all since STEPS steps."""
    return [found for name in tools(history.rows[-1]) if (found := _tool_fails(history, name)) is not None]


def _tool_fails(history: History, name: str) -> Found | None:
    keys = f"tool/{name}/calls", f"tool/{name}/errors"
    calls, errors = (history.last(key, 2 * WINDOW) for key in keys)
    before = means(history.rows[-STEPS - WINDOW : -STEPS])
    if before and all(name in tool_broke(before, row) for row in history.rows[-STEPS:]):
        since = _began(history, lambda row: name in tool_broke(before, row))
        return Found(
            f"{history.span}: {sum(errors[-STEPS:]) / sum(calls[-STEPS:]):.0%} of the calls of {name} end in an "
            f"error, and hardly any did before step {since}. Likely cause: the tool is down, or answers otherwise: "
            "agentrl why RUN --split train groups the errors",
            cause=f"tool/{name}",
            since=since,
            evidence=keys,
        )
    if len(calls) < 2 * WINDOW or sum(calls[WINDOW:]) < 10 * WINDOW:
        return None
    then, now = (sum(errors[half]) / max(1, sum(calls[half])) for half in (slice(WINDOW), slice(WINDOW, None)))
    if now <= 0.5 or now <= 0.9 * then:
        return None
    return Found(
        f"step {history.step}: {now:.0%} of the calls of {name} end in an error, and it does not "
        "get better. Likely cause: the tool is down, or its schema and description mislead the model: "
        "agentrl why RUN --split train groups the errors",
        cause=f"tool/{name}",
        since=int(history.rows[-WINDOW]["step"]),
        evidence=keys,
    )


@after(STEPS)
def tool_slow(history: History) -> list[Found]:
    """A tool's calls take half of their time limit, or five times and a second longer than in the beginning."""
    return [found for name in tools(history.rows[-1]) if (found := _tool_slow(history, name)) is not None]


def _tool_slow(history: History, name: str) -> Found | None:
    key, limit = f"tool/{name}/seconds", history.recipe.rollout.tool_timeout
    now, windows = history.last(key, STEPS), history.before(key)
    if len(now) < STEPS:
        return None
    usual = fmean(windows[0]) if windows else None
    slower = usual is not None and min(now) > 5 * usual and min(now) > usual + 1
    if min(now) <= 0.5 * limit and not slower:
        return None
    was = f", {usual:.2g} s in the beginning" if slower else ""
    return Found(
        f"{history.span}: a call of {name} takes {fmean(now):.2g} s{was} (rollout.tool_timeout is {limit:g} "
        "s). Look at the tool's server; rollout.overlap lets training go on while tools wait",
        cause=key,
        size=fmean(now),
        since=int(history.rows[-STEPS]["step"]),
        evidence=(key, f"tool/{name}/calls"),
    )


@after(STEPS)
def environment_slow(history: History) -> Found | None:
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
    return Found(
        f"{history.span}: samples spend {own:.2g} s, half of their time or more, in the environment and its hooks, and "
        "training waits for them. Set rollout.overlap, or more conversations at once (rollout.concurrency)",
        cause="environment/seconds",
        size=own,
        since=int(rows[0]["step"]),
    )


SLOWER = 3.0
"""How many times longer than at first steps take that get slower."""
_PARTS = {
    "time/rollout_s": "sampling", "time/train_s": "training", "time/sync_s": "the sync of weights",
}  # fmt: skip


@after(2 * WINDOW)
def steps_slow(history: History) -> Found | None:
    """Steps take SLOWER times as long as the first WINDOW, and a second longer, in each of the last MANY."""
    now, start = history.latest("time/step_s", MANY), values(history.first[1:], "time/step_s")
    if not now or not start or min(now) < max(SLOWER * median(start), median(start) + 1):
        return None
    rows = history.rows[-MANY:]
    grew = {key: median(values(rows, key) or [0.0]) - median(values(history.first[1:], key) or [0.0]) for key in _PARTS}
    part = max(grew, key=lambda key: grew[key])
    tokens = [median(values(some, "rollout/tokens") or [0.0]) for some in (history.first[1:], rows)]
    more = tokens[1] / tokens[0] if tokens[0] else 1.0
    why = (
        f"{more:.1f} times as many tokens are sampled: see rollout/response_tokens_mean"
        if more > 0.5 * SLOWER
        else "no more tokens are sampled, so that it is the machine or what is around it: another program on it, "
        "memory that grows (memory/), a tool, a server or a disk that became slow"
    )
    return Found(
        f"steps {rows[0]['step']} to {history.step}: a step takes {median(now):.3g} s, {median(start):.3g} s at first; "
        f"most of it is {_PARTS[part]} ({grew[part]:+.3g} s). Likely cause: {why}",
        cause="length" if more > 0.5 * SLOWER else "time",
        size=median(now) / median(start),
        since=_began(history, lambda row: row.get("time/step_s", 0.0) > SLOWER * median(start)),
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


def start_not_taken(history: History) -> Found | None:
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
        measured = tuple(f"{kind}/{split}/accuracy" for split in after for kind in ("start", "eval"))
        return Found(f"the start did not take: {line}{seen}", cause="start", evidence=measured)
    for split in after:
        keys = tuple(f"eval/{split}/tool_{what}" for what in ("calls", "errors"))
        calls, errors = (row.get(key, 0.0) for key in keys)
        if calls >= 0.5 and errors > 0.5 and after[split] < SOLVED:
            return Found(
                f"the start did not take: on {split} {errors:.0%} of the calls end in an error. Likely cause: "
                "demonstrations whose calls the tools refuse, or too few steps (sft.stages): agentrl show RUN --split "
                f"{split} --step 0 prints what the model says",
                cause="start",
                evidence=(*keys, f"eval/{split}/accuracy"),
            )
    return None


def _accuracies(row: Row, kind: str) -> dict[str, float]:
    """The accuracies <kind>/<split>/accuracy of a row, by split."""
    ends = (key.split("/", 1) for key in row if key.startswith(f"{kind}/") and key.endswith("/accuracy"))
    return {rest.removesuffix("/accuracy"): row[f"{kind}/{rest}"] for _, rest in ends}


@dataclass(frozen=True, slots=True)
class Condition:
    """A row of the table: what is looked for, and what it stands on."""

    check: Check
    """Finds it."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """Metrics that it watches, each with its healthy values; the page of a run shows them."""
    evidence: tuple[str, ...] = ()
    """Further metrics that are told with it, before and now."""
    follows: tuple[str, ...] = ()
    """Conditions of which it is a consequence: while one of them holds that was said, this one is not."""


_CALLS = ("tools_unknown", "calls_unreadable", "calls_cut")
_EARNED = ("reward/mean", "rollout/response_tokens_mean")
_BROKEN = ("policy_broken",)

CONDITIONS: Mapping[str, Condition] = {
    "start_not_taken": Condition(start_not_taken, evidence=("start/steps", "start/loss_first", "start/loss_last")),
    "policy_broken": Condition(
        policy_broken,
        evidence=(*_EARNED, "train/entropy", "stop/length", "calls/cut", "calls/unreadable", "calls/none"),
    ),
    "tools_unknown": Condition(tools_unknown, evidence=("calls/unknown",), follows=_BROKEN),
    "calls_unreadable": Condition(calls_unreadable, evidence=("calls/unreadable",), follows=_BROKEN),
    "calls_cut": Condition(calls_cut, evidence=("calls/cut",), follows=_BROKEN),
    "turns_used_up": Condition(
        turns_used_up, evidence=("stop/max_turns", "stop/max_tool_calls", "rollout/turns_mean"), follows=_BROKEN
    ),
    "tool_fails": Condition(tool_fails),
    "samples_failed": Condition(
        samples_failed,
        {
            "rollout/failed": (None, 0.0),
            "rollout/retried": (None, 0.0),
            "stop/error": (None, 0.0),
            "groups/few": (None, 0.0),
        },
    ),
    "entropy_grows": Condition(entropy_grows, evidence=("train/entropy", "reward/mean"), follows=_BROKEN),
    "no_contrast": Condition(
        no_contrast,
        evidence=("groups/varied", "reward/mean"),
        follows=(*_CALLS, *_BROKEN, "turns_used_up", "samples_failed", "tool_fails", "entropy_grows"),
    ),
    "few_teach": Condition(few_teach, evidence=("groups/varied", "reward/mean"), follows=(*_CALLS, *_BROKEN)),
    "cut_by_length": Condition(
        cut_by_length,
        evidence=("stop/length", "rollout/response_tokens_mean"),
        follows=(*_BROKEN, "calls_cut", "entropy_grows", "length_grows"),
    ),
    "cut_by_time": Condition(cut_by_time, evidence=("stop/timeout", "time/rollout_s"), follows=("tool_slow",)),
    "answers_unreceived": Condition(answers_unreceived, evidence=("gateway/unreceived", "gateway/calls")),
    "tools_not_called": Condition(
        tools_not_called, evidence=("calls/none", "reward/mean"), follows=(*_BROKEN, *_CALLS, "entropy_grows")
    ),
    "mismatch": Condition(
        mismatch,
        {
            "mismatch/logprob_mean": (None, 0.05),
            "mismatch/kl": (None, 0.01),
            "mismatch/ess": (0.9, None),
            "mismatch/weight_cut": (None, 0.05),
            "mismatch/weight_mean": (0.9, 1.1),
        },
        follows=_BROKEN,
    ),
    "mismatch_growing": Condition(
        mismatch_growing, evidence=("mismatch/logprob_mean",), follows=("mismatch", *_BROKEN)
    ),
    "stale": Condition(stale, {"rollout/staleness_mean": (None, 2.0)}),
    "update_discarded": Condition(
        update_discarded, {"train/updates_not_finite": (None, 0.0)}, evidence=("train/lr", "train/grad_norm")
    ),
    "updates_too_large": Condition(
        updates_too_large,
        {
            "train/approx_kl": (None, 0.02),
            "train/clip_fraction": (None, 0.2),
            "train/ratio_mean": (0.95, 1.05),
            "train/clip_fraction_dual": (None, 0.01),
        },
        evidence=("train/lr", "train/updates"),
        follows=_BROKEN,
    ),
    "kl_high": Condition(kl_high, {"train/kl": (None, 0.1)}, evidence=("train/kl_coef", "train/lr"), follows=_BROKEN),
    "reward_falls": Condition(reward_falls, evidence=(*_EARNED, "train/entropy", "train/grad_norm"), follows=_BROKEN),
    "entropy_collapse": Condition(
        entropy_collapse, evidence=("train/entropy", "reward/mean"), follows=(*_BROKEN, "reward_falls")
    ),
    "length_grows": Condition(length_grows, evidence=_EARNED, follows=(*_BROKEN, "cut_by_length", "entropy_grows")),
    "length_shrinks": Condition(length_shrinks, evidence=_EARNED, follows=(*_BROKEN, "entropy_grows")),
    "gradient_spike": Condition(gradient_spike, evidence=("train/grad_norm",)),
    "gradient_zero": Condition(gradient_zero, evidence=("train/grad_norm", "train/samples"), follows=_BROKEN),
    "gradient_large": Condition(gradient_large, evidence=("train/grad_norm",)),
    "critic_poor": Condition(
        critic_poor,
        {"critic/explained_variance": (0.0, None), "critic/clip_fraction": (None, 0.2)},
        evidence=("critic/lr", "critic/loss"),
        follows=_BROKEN,
    ),
    "accuracy_falls": Condition(accuracy_falls, evidence=("reward/mean",), follows=_BROKEN),
    "part_gamed": Condition(part_gamed, evidence=("reward/mean",), follows=_BROKEN),
    "release_errors": Condition(release_errors, {"rollout/release_errors": (None, 0.0)}),
    "tool_slow": Condition(tool_slow),
    "environment_slow": Condition(environment_slow, evidence=("time/rollout_s", "time/step_s")),
    "steps_slow": Condition(
        steps_slow,
        evidence=("time/step_s", "time/rollout_s", "time/train_s", "rollout/tokens"),
        follows=(*_BROKEN, "tool_slow", "environment_slow", "length_grows", "cut_by_length", "entropy_grows"),
    ),
}
"""Every condition by its name, which stands in `metrics.jsonl`; of those that hold, the first is the likelier cause."""

RANGES: Mapping[str, Range] = {
    key: found for condition in CONDITIONS.values() for key, found in condition.ranges.items()
}
"""Healthy values of metrics, as the conditions use them: name -> lowest and highest; None: no such bound."""
WATCHED: Mapping[str, tuple[str, ...]] = {
    key: tuple(name for name, one in CONDITIONS.items() if key in one.ranges or key in one.evidence)
    for key in sorted({key for one in CONDITIONS.values() for key in (*one.ranges, *one.evidence)})
}
"""Metric -> the conditions that watch it, or that show it as evidence."""


class Health:
    """Says which conditions a run's rows raise: each once a cause, again where it became twice as bad or came back
    after WINDOW steps, at most TIMES.

    A condition is not said while one of which it follows is, nor, unless it is one of ALWAYS, while one of its cause is
    that stands before it in CONDITIONS.

    rows: those that the run has written before, of a run that is resumed; what they found is not said again.
    """

    def __init__(self, recipe: Recipe, rows: Sequence[Row] = ()) -> None:
        self._history = History(recipe)
        self._said: dict[Key, list[Finding]] = {}
        self._held: dict[Key, int] = {}  # the newest step in which it held
        self._back: set[Key] = set()  # what holds again in the newest step, after WINDOW steps without it
        for left, row in zip(range(len(rows), 0, -1), rows, strict=True):
            self._history.add(row)
            for found in row.get("health", ()):
                if isinstance(found, dict):
                    self._remember(_restored(found))
            if left > WINDOW:  # who looks back looks back no further
                self._held |= dict.fromkeys(self._said, self._history.step)
            else:
                self._holding()
        self._history.resumed = self._history.step if self._history.rows else None

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
                    "sampling",
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
                    "updates",
                )
            )
        return found

    def step(self, row: Row) -> list[Finding]:
        """What the row of the next step (or of step 0) raises, and was not said yet."""
        self._history.add(row)
        said = []
        for name, found in self._holding():
            if not self._explained(name, found):
                said += self._new(self._finding(name, found))
        return said

    def remaining(self) -> list[Finding]:
        """What was said and is still so in the newest row, with the numbers of today; a cause stands for what it
        causes."""
        holding = self._holding()
        names = {name for name, _ in holding}
        return [
            self._finding(name, found)
            for name, found in holding
            if _key(name, found) in self._said and names.isdisjoint(CONDITIONS[name].follows)
        ]

    def _holding(self) -> list[tuple[str, Found]]:
        """What holds in the newest step, in the order of CONDITIONS."""
        step, checked = self._history.step, {name: one.check(self._history) for name, one in CONDITIONS.items()}
        holding = [
            (name, found)
            for name, some in checked.items()
            for found in ([some] if isinstance(some, Found) else some or ())
        ]
        keys = [_key(name, found) for name, found in holding]
        self._back = {key for key in keys if self._held.get(key, step) <= step - WINDOW}
        self._held |= dict.fromkeys(keys, step)
        return holding

    def _explained(self, name: str, found: Found) -> bool:
        """Whether a condition follows from one that was said and held within WINDOW steps, or has the cause of one that
        tells more."""
        lately = [key for key in self._said if self._held.get(key, -WINDOW) > self._history.step - WINDOW]
        if any(one in CONDITIONS[name].follows for one, _ in lately):
            return True
        telling = set(takewhile(lambda one: one != name, CONDITIONS))
        return name not in ALWAYS and any(one in telling and cause == (found.cause or name) for one, cause in lately)

    def _finding(self, name: str, found: Found) -> Finding:
        """A condition with its evidence: metrics before it began, and in the newest row."""
        condition, rows, start = CONDITIONS[name], self._history.rows, self._history.start
        since = self._history.step if found.since is None else found.since
        before = means([row for row in rows if row["step"] < since][-WINDOW:])
        now = start or (rows[-1] if rows else {})
        told_with = (*condition.ranges, *condition.evidence, *found.evidence)
        keys = [key for key in told_with if key in now or key in before]
        evidence = {key: (before.get(key), now.get(key)) for key in keys}
        told = "; ".join(f"{key} {_told(evidence[key])}" for key in keys if evidence[key][0] != evidence[key][1])
        line = f"{found.line} [{told}]" if told and before else found.line
        return Finding(name, line, found.cause or name, found.size, evidence)

    def _new(self, finding: Finding) -> list[Finding]:
        """The finding, where it was not said yet, is twice as bad as it was said last, or has come back."""
        key = finding.name, finding.cause
        said, back = self._said.get(key, []), key in self._back
        worse = bool(said) and finding.size >= 2 * said[-1].size
        if said and (len(said) >= TIMES or not (worse or back)):
            return []
        if said:
            finding = finding._replace(line=f"{'again' if back else 'worse than before'}: {finding.line}")
        self._remember(finding)
        return [finding]

    def _remember(self, finding: Finding) -> None:
        self._said.setdefault((finding.name, finding.cause), []).append(finding)


def _key(name: str, found: Found) -> Key:
    return name, found.cause or name


def _told(pair: tuple[float | None, float | None]) -> str:
    return " -> ".join("none" if value is None else f"{value:.3g}" for value in pair)


def _restored(found: Mapping[str, Json]) -> Finding:
    """A finding as a run's row holds it; what older versions did not write has its default."""
    size = found.get("size")
    name = str(found.get("name", ""))
    return Finding(name, "", str(found.get("cause") or name), size if isinstance(size, int | float) else float("inf"))
