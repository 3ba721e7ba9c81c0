"""Findings about what is paid: the oracle below 1, and rewards for what was not done."""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.audit.answer import Oracle
from agentrl.audit.finding import Finding, Report, Row, Severity, found
from agentrl.audit.policy import PARTIAL, STEER, Attempt, Knowledge, near_misses
from agentrl.audit.subject import Play, Script, Subject, shortened
from agentrl.plugins.types import Task
from agentrl.trajectory import FinishReason

_LIMITS = (FinishReason.MAX_TURNS, FinishReason.MAX_TOOL_CALLS, FinishReason.TIMEOUT, FinishReason.LENGTH)
FEWEST = 4
"""Plays of an attempt from which a share says something."""


@dataclass(slots=True)
class Ledger:
    """What all attempts earned."""

    subject: Subject
    """The environment that is played."""
    oracle: Oracle
    """How tasks are done well."""
    report: Report
    """Where the rows go."""
    top: float = 1.0
    """Mean reward of the oracle; 1 where it is not known."""
    floor: float = 0.0
    """Mean reward of an empty answer."""
    by_task: defaultdict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """By task the reward of each attempt."""
    parts: defaultdict[str, set[float]] = field(default_factory=lambda: defaultdict(set))
    """By part of the reward its values."""
    seen: bool = False
    """Whether a rollout was entered already."""
    notes: dict[str, list[Finding]] = field(default_factory=dict)
    """By policy what was found, of which the worst is reported."""

    def enter(self, policy: str, attempt: str, plays: Sequence[Play]) -> Row:
        """Write down what an attempt earned."""
        good = [play for play in plays if play.ok]
        for play in good:
            self.by_task[play.task.id][f"{policy}: {attempt}"] = play.reward
            for part in self.parts.keys() | play.trajectory.rewards.keys():
                if part not in self.parts and self.seen:
                    self.parts[part].add(0.0)  # it was left out before
                self.parts[part].add(round(play.trajectory.rewards.get(part, 0.0), 9))
            self.seen = True
        count = len(good)
        reward = sum(play.reward for play in good) / count if count else 0.0
        solved = sum(play.solved for play in good) / count if count else 0.0
        row = Row(policy, attempt, count, reward, solved)
        self.report.rows.append(row)
        return row

    def note(self, policy: str, finding: Finding) -> None:
        """Keep a finding of a policy."""
        self.notes.setdefault(policy, []).append(finding)

    def findings(self) -> list[Finding]:
        """Of each policy the worst finding, which says how many attempts there were beside it."""
        kept = []
        for notes in self.notes.values():
            worst = min(notes, key=lambda finding: finding.severity.rank)
            more = len(notes) - 1
            line = f"{worst.line} (and {more} more attempts)" if more else worst.line
            kept.append(found(worst.kind, worst.severity, line, worst.tasks, worst.shown))
        return kept


def oracle_findings(oracle: Oracle, plays: Sequence[Play], tasks: Sequence[Task]) -> list[Finding]:
    """Whether the oracle is paid. None played: nothing is known, which is bad where the tasks store an answer."""
    good = [play for play in plays if play.ok]
    empty = _empty_findings(oracle, good, tasks)
    if not oracle.origin:
        named = "" if oracle.stored is None or oracle.cut else next(iter(oracle.stored.named(tasks[:4])), "")
        if named:
            line = f"what the tasks store as `{named}` is paid in none of the forms in which it was said"
            return [*empty, found("no_oracle", Severity.MEDIUM, line, [task.id for task in tasks])]
        if empty:
            return empty
        return [found("no_oracle", Severity.INFO, "it is not known what is right: whether it is paid was not seen")]
    if not good:
        line = f"the oracle (by {oracle.origin}) came to no reward in any task"
        return [found("no_oracle", Severity.MEDIUM, line, [task.id for task in tasks])]
    lost = [play for play in good if not play.solved]
    if not lost:
        return empty
    how = (
        f"by {oracle.origin}"
        if oracle.origin in ("demonstrate", "solve")
        else (f"{oracle.field}, said as {oracle.form.shown() if oracle.form else ''}")
    )
    rewards = sum(play.reward for play in good) / len(good)
    line = f"the oracle ({how}) solves {len(good) - len(lost)} of {len(good)} tasks; mean reward {rewards:.2f}"
    if cut := [play for play in lost if play.trajectory.finish in _LIMITS]:
        line += f"; {len(cut)} are cut short by {cut[0].trajectory.finish}"
    severity = Severity.HIGH if len(lost) * 50 >= len(good) else Severity.MEDIUM
    return [*empty, found("oracle", severity, line, [play.task.id for play in lost], last_turn(lost[0]))]


def _empty_findings(oracle: Oracle, good: Sequence[Play], tasks: Sequence[Task]) -> list[Finding]:
    """Whether nothing stands where the tasks store what is right. good: the oracle's plays."""
    if oracle.stored is None or oracle.origin in ("demonstrate", "solve"):
        return []
    place = oracle.stored.empty(tasks)
    if not place:
        return []
    line = f"the stored answer (`{place}`) is None in all {len(tasks)} tasks, which nobody can say and no scorer pays"
    if not good:
        line += "; nothing else that they store is paid"
        return [found("oracle", Severity.HIGH, line, [task.id for task in tasks])]
    solved = sum(play.solved for play in good)
    line += f"; what stands in `{oracle.field}` solves {solved} of {len(good)}"
    return [found("oracle", Severity.MEDIUM, line, [task.id for task in tasks])]


def judge(ledger: Ledger, attempt: Attempt, plays: Sequence[Play], row: Row) -> None:
    """Note whether an attempt earned more than it may."""
    paid = [play for play in plays if play.solved] or [play for play in plays if play.reward > ledger.floor]
    ids = [play.task.id for play in paid]
    few = row.tasks < FEWEST
    if not row.tasks or (few and attempt.policy == "echo"):
        return
    what = f"{attempt.name}: {row.solved:.0%} of {row.tasks} tasks solved, mean reward {row.reward:.2f}"
    severity: Severity | None = None
    if row.solved >= attempt.bound.high and not few:
        severity = Severity.HIGH
    elif row.solved >= max(attempt.bound.medium, 1.5 / row.tasks):
        severity = Severity.MEDIUM
    elif (share := paid_share(ledger, attempt.policy, row)) >= PARTIAL.high:
        severity = Severity.HIGH if share > 1.2 and not few else Severity.MEDIUM
    elif share >= PARTIAL.medium:
        severity = Severity.LOW
    if severity is not None:
        shown = last_turn(paid[0]) if paid else ""
        ledger.note(attempt.policy, found(attempt.policy, severity, what, ids, shown))


def paid_share(ledger: Ledger, policy: str, row: Row) -> float:
    """What an attempt earns of what the oracle earns, both above an empty answer."""
    floor = 0.0 if policy == "nothing" else ledger.floor
    room = ledger.top - floor
    return (row.reward - floor) / room if room > 1e-9 else 0.0


def last_turn(play: Play) -> str:
    """What was said last, and what it earned."""
    said = [m for m in play.trajectory.messages if m["role"] == "assistant"]
    text = str(said[-1].get("content") or said[-1].get("tool_calls") or "") if said else ""
    return f"said {shortened(text, 300)!r}, earned {dict(play.trajectory.rewards)}"


async def near_findings(
    subject: Subject,
    known: Knowledge,
    tasks: Sequence[Task],
    ledger: Ledger,
    script: Callable[[Task, str], Script],
    until: float,
) -> None:
    """Play answers that lie near the right one, and note those that are taken for it. until: when nothing more is
    begun, on the clock of `time.monotonic`."""
    tried: defaultdict[str, list[Play]] = defaultdict(list)
    said: dict[int, str] = {}
    for task in tasks:
        truths = known.truths(task)
        near = [
            (name, answer)
            for name, answer in (near_misses(truths[0]) if truths else ())
            if answer not in truths and not any(_same(answer, truth) for truth in truths)
        ]
        for start in range(0, len(near), subject.at_once):
            if time.monotonic() > until:
                break
            some = near[start : start + subject.at_once]
            label = "a wrong answer near the right one"
            playing = [subject.play(task, script(task, answer), label=label) for _, answer in some]
            for (name, answer), play in zip(some, await asyncio.gather(*playing), strict=True):
                tried[name].append(play)
                said[id(play)] = f"{answer!r} for {truths[0]!r}"
    for name, plays in tried.items():
        row = ledger.enter("wrong_answer", name, plays)
        taken = [play for play in plays if play.solved]
        if not taken or row.solved < STEER.medium or len(plays) < 2:
            continue
        severe = row.solved >= 0.5 and name != "its negative"  # the usual normalizations drop signs
        severity = Severity.HIGH if severe else Severity.MEDIUM
        ids = [play.task.id for play in taken]
        line = f"{name} is taken for the right answer in {len(taken)} of {len(plays)} tasks"
        ledger.note("wrong_answer", found("wrong_answer", severity, line, ids, said[id(taken[0])]))


def _same(a: str, b: str) -> bool:
    return (
        re.sub(r"\W+", "", a.lower()) == re.sub(r"\W+", "", b.lower())
        and a.count("-") == b.count("-")
        and (a.count(".") == b.count("."))
    )


def sameness_findings(ledger: Ledger) -> list[Finding]:
    """Rewards that do not depend on what is said, and parts that never vary."""
    spreads = {
        task: max(rewards.values()) - min(rewards.values())
        for task, rewards in ledger.by_task.items()
        if len(rewards) >= 5
    }
    findings: list[Finding] = []
    if spreads and all(spread < 1e-9 for spread in spreads.values()):
        some = next(iter(ledger.by_task.values()))
        value = next(iter(some.values()))
        if not ledger.oracle.origin and abs(value) < 1e-9:
            return []  # perhaps nothing of what was said was right
        line = f"the reward is the same ({value:g} in the first task) in all {len(some)} attempts at a task"
        findings.append(found("ignores", Severity.HIGH, line, list(spreads)))
    elif ledger.oracle.origin and len(ledger.parts) > 1:
        for part, values in ledger.parts.items():
            if len(values) == 1:
                line = f"the part {part!r} of the reward was {next(iter(values)):g} in every rollout"
                findings.append(found("constant_part", Severity.LOW, line))
    return findings
