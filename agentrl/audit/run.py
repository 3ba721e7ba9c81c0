"""`audit`: play an environment's tasks with policies that need no model, and say what is wrong with it."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.audit.answer import Oracle, counted, find_oracle, overridden
from agentrl.audit.finding import Finding, Report, Severity, found
from agentrl.audit.hooks import (
    Part,
    Traces,
    clock_findings,
    failure_findings,
    own_folder,
    repeat_findings,
)
from agentrl.audit.policy import Attempt, Knowledge, attempts, calling
from agentrl.audit.reach import calling_findings, distribution_findings, reach_findings, unused_findings
from agentrl.audit.rewards import Ledger, judge, near_findings, oracle_findings, sameness_findings
from agentrl.audit.subject import Make, Script, Subject, text_of
from agentrl.audit.tampering import tampering_findings
from agentrl.audit.tasks import (
    CHARACTERS,
    Asked,
    asked,
    hides,
    length_findings,
    schema_findings,
    shown_fields,
    split_findings,
)
from agentrl.errors import UserError, contained, describe
from agentrl.plugins.environment import not_carried
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Message, Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.hooks import opening_of
from agentrl.testing.agent import NO_LIMIT

OPENING_SECONDS = 20.0
LOOKED = 4_000
"""Tasks of a split whose questions are compared."""
COMPARED = 4
"""Rollouts that are played in several orders and all at once."""
HANGS = 6
"""Rollouts that hang, after which no further attempt is made."""
SLOW_PLAY = 0.3
"""Seconds of a rollout from which on fewer are compared."""
Measure = Callable[[Sequence[Message], Mapping[str, Tool]], int]
"""Counts the tokens of an opening."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much an audit does."""

    tasks: int = 16
    """Tasks that each attempt plays."""
    seconds: float = 45.0
    """Wall time after which nothing more is begun, from when the environment was opened."""


@dataclass(slots=True)
class Told:
    """Who is told what an audit comes to while it runs."""

    at: Callable[[str], None] = lambda where: None
    """Where it is, before strangers' code is called."""
    stage: Callable[[str], None] = lambda name: None
    """What it examines now."""
    found: Callable[[Finding], None] = lambda finding: None
    """Each finding."""


@dataclass(slots=True)
class Audit:
    """One audit while it runs."""

    subject: Subject
    """The environment, opened."""
    options: Options
    """How much is done."""
    told: Told
    """Who is told."""
    report: Report
    """What came of it so far."""
    began: float
    """When it was open, on the clock of `time.monotonic`."""
    measure: Measure | None = None
    """None: tokens are estimated."""
    looked: list[Task] = field(default_factory=list)
    """The tasks that are played, those of train first."""
    openings: dict[str, Sequence[Message]] = field(default_factory=dict)
    """By task its opening messages."""
    oracle: Oracle = field(default_factory=Oracle)
    """How the tasks are done well."""

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.began + self.options.seconds - time.monotonic()

    def until(self, share: float) -> float:
        """When a share of the time that is left is over, on the clock of `time.monotonic`."""
        return time.monotonic() + max(0.0, self.left) * share

    def add(self, findings: Sequence[Finding]) -> None:
        """Keep findings."""
        for finding in findings:
            self.report.findings.append(finding)
            self.told.found(finding)

    async def stage(self, name: str, work: Callable[[], Awaitable[Sequence[Finding]]], seconds: float = 0.5) -> None:
        """Examine one thing, if there is time. Whatever strangers' code raises there is a finding."""
        if self.left < seconds:
            self.add([found("not_examined", Severity.INFO, f"{name}: there was no time for it")])
            return
        self.told.stage(name)
        try:
            self.add(await work())
        except UserError as error:
            self.add([found("fails", Severity.HIGH, f"{name}: {error}")])
        except Exception as error:  # noqa: BLE001 - boundary: of what plugins may do, a hook too many is still a finding
            self.add([found("fails", Severity.MEDIUM, f"{name}: {describe(contained(error))}")])


async def audit(
    name: str,
    recipe: Recipe,
    make: Make,
    options: Options | None = None,
    told: Told | None = None,
    measure: Measure | None = None,
) -> Report:
    """Audit an environment in this process.

    name: of the report. recipe: its tools, rewards, workspace and limits. make: makes the environment, several times.
    measure: counts the tokens of an opening; None: they are estimated. Raises UserError where the environment, a tool
    or its workspaces cannot be had.
    """
    options, told = options or Options(), told or Told()
    began = time.monotonic()
    folder, undo = own_folder()
    try:
        report = Report(name)
        before = Traces.taken([Path(folder.name), Path.cwd()])
        told.stage("opening")
        subject = await Subject.open(name, recipe, make, told.at)
        try:
            run = Audit(subject, options, told, report, time.monotonic(), measure)
            await _examine(run)
        finally:
            await subject.close()
        after = Traces.taken([Path(folder.name), Path.cwd()])
        run.add(after.findings(before, subject.counts["plays"]))
        report.plays, report.seconds = subject.counts["plays"], time.monotonic() - began
        report.sort()
        return report
    finally:
        undo()


async def _examine(run: Audit) -> None:
    """All that there is to examine, what costs least first."""
    subject, report = run.subject, run.report
    lines = not_carried(subject.env, subject.toolbox.tools)
    run.add([found("not_carried", Severity.INFO, line) for line in lines])
    run.told.stage("tasks")
    splits = {split: subject.tasks(split) for split in ("train", *subject.env.splits)}
    report.splits.update({split: len(tasks) for split, tasks in splits.items()})
    if not splits["train"]:
        raise UserError(f"{subject.name}: its split 'train' has no task")
    run.looked = spread(splits["train"], run.options.tasks)
    await run.stage("openings", lambda: _openings(run, splits))
    await run.stage("the oracle", lambda: _oracle(run))
    await run.stage("tasks in common", lambda: _tasks(run, splits))
    ledger = Ledger(subject, run.oracle, report)
    await run.stage("oracle, played", lambda: _play_oracle(run, ledger))
    tools = _tools(run)  # those of an agent are known once it has played
    await run.stage("schemas of tools", lambda: _now(schema_findings(list(tools.values()))))
    await run.stage("prompts", lambda: _now(_lengths(run, tools)))
    known = _knowledge(run, splits["train"])
    await run.stage("answers", lambda: _now(distribution_findings(known)))
    await run.stage("policies", lambda: _policies(run, ledger, known, tools))
    await run.stage("answers in reach", lambda: reach_findings(subject, known, run.looked, run.until(0.4)))
    await run.stage("calls without need", lambda: calling_findings(subject, known, run.looked, ledger, run.until(0.4)))
    if subject.workspaces is not None:
        await run.stage("tampering", lambda: tampering_findings(subject, known, run.looked, ledger, run.until(0.5)))
    run.add([*ledger.findings(), *sameness_findings(ledger)])
    await run.stage("tools in use", lambda: _now(unused_findings(run.oracle, splits["train"], tools)))
    again = "rollouts again, and at once"
    await run.stage(again, lambda: repeat_findings(subject, _parts(run, known), run.until(1.0)), 3.0)
    run.add([*failure_findings(subject), *clock_findings(subject)])


async def _now(findings: Sequence[Finding]) -> Sequence[Finding]:
    return findings


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """The first half of `count` tasks from the beginning of a split, the others from all of it."""
    first = min(len(tasks), (count + 1) // 2)
    rest = min(len(tasks) - first, count - first)
    step = (len(tasks) - first) / max(1, rest)
    return [*(tasks[i] for i in range(first)), *(tasks[first + int(i * step)] for i in range(rest))]


async def _openings(run: Audit, splits: Mapping[str, Sequence[Task]]) -> Sequence[Finding]:
    """Make the openings of the tasks that are played, and of the first ones of each split; a second time, to see
    whether they are the same."""
    wanted = {task.id: task for task in (*run.looked, *(task for tasks in splits.values() for task in tasks[:16]))}
    failed = await _open(run, wanted.values(), max(time.monotonic() + 2.0, run.until(1 / 6)))
    findings = [found("fails", Severity.HIGH, line, ids) for line, ids in failed.items()]
    return findings + await _same_tasks(run, splits)


async def _open(run: Audit, tasks: Iterable[Task], until: float) -> dict[str, list[str]]:
    """Make the openings of tasks until the time is over; by error the tasks that have none."""
    failed: dict[str, list[str]] = {}
    for task in tasks:
        if time.monotonic() > until:
            break
        if task.id in run.openings:
            continue
        run.told.at(f"create of task {task.id}")
        try:
            run.openings[task.id] = await opening_of(run.subject.env, task, OPENING_SECONDS, 0)
        except UserError as error:
            failed.setdefault(re.sub(re.escape(task.id), "...", str(error)), []).append(task.id)
    return failed


async def _same_tasks(run: Audit, splits: Mapping[str, Sequence[Task]]) -> list[Finding]:
    """Whether an environment made anew has the same tasks."""
    run.told.at("making the environment again")
    other = await run.subject.again()
    findings = []
    try:
        for split, tasks in splits.items():
            for env, how in ((run.subject, "asked for twice"), (other, "of an environment made anew")):
                again = env.tasks(split)
                looked = range(min(len(tasks), len(again), 64))
                changed = [tasks[i].id for i in looked if (tasks[i].id, tasks[i].data) != (again[i].id, again[i].data)]
                if changed or len(again) != len(tasks):
                    line = f"{split}: the tasks {how} are others ({len(changed)} of the first {len(looked)})"
                    findings.append(found("unsteady_tasks", Severity.HIGH, line, changed))
                    break
    finally:
        await other.close()
    return findings


def _tools(run: Audit) -> dict[str, Tool]:
    """The tools of all tasks that are played, by name."""
    tools: dict[str, Tool] = {}
    for task in run.looked:
        tools |= run.subject.tools_of(task)
    return tools


async def _oracle(run: Audit) -> Sequence[Finding]:
    run.oracle = await find_oracle(run.subject, run.looked, run.until(1 / 6))
    error = run.oracle.stored.error if run.oracle.stored is not None else ""
    findings = [found("fails", Severity.MEDIUM, error)] if error else []
    if run.oracle.cut:
        line = "the forms in which a stored answer may be said: there was no time for all of them"
        findings.append(found("not_examined", Severity.INFO, line))
    return findings


async def _tasks(run: Audit, splits: Mapping[str, Sequence[Task]]) -> Sequence[Finding]:
    """What comes twice, of what tasks ask. Where openings are all that they ask, more of them are made, if need be."""
    seconds = min(2.0, run.left / 20)
    first = run.looked[0]
    replies = overridden(run.subject.env, "execute") and not await _ends_at_once(run)
    hiding = hides(run.subject.env, first, run.openings.get(first.id, ()), replies)
    compared: dict[str, list[Asked]] = {}
    for split, tasks in splits.items():
        if not hiding and not shown_fields(tasks, run.openings):
            some = (tasks[index] for index in range(min(len(tasks), LOOKED)))
            await _open(run, some, time.monotonic() + seconds)
        compared[split] = asked(tasks, run.openings, run.oracle, hiding, LOOKED, seconds)
    named = {one.task.id: one.task for some in compared.values() for one in some}
    findings = [
        finding
        for finding in split_findings(compared, run.oracle)
        if finding.kind != "contradictory" or not await _both_right(run, [named[name] for name in finding.tasks])
    ]
    if unknown := [split for split, tasks in splits.items() if len(tasks) and not compared[split]]:
        line = f"{', '.join(unknown)}: whether tasks ask the same: their openings and their data do not say all of it"
        findings.append(found("not_examined", Severity.INFO, line))
    return findings


async def _both_right(run: Audit, tasks: Sequence[Task]) -> bool:
    """Whether of two tasks that open alike, and store different answers, one takes the other's."""
    form, first, truths = run.oracle.form, tasks[0], run.oracle.truths
    other = next((task for task in tasks[1:] if truths(task) and truths(task)[0] not in truths(first)), None)
    if form is None or other is None:
        return False
    pairs = ((first, other), (other, first))
    plays = [await run.subject.play(a, form.turns(truths(b)[0]), label="the answer of its like") for a, b in pairs]
    return any(play.solved for play in plays)


async def _ends_at_once(run: Audit) -> bool:
    """Whether an answer that is wrong is the last turn, so that tasks are what their openings say."""
    form, truths = run.oracle.form, [run.oracle.truths(task) for task in run.looked]
    others = [answers[0] for answers in truths if answers]
    if form is None or form.tool or len(others) < 2 or run.subject.holder is not None:
        return False
    wrong = {
        task.id: form.turns(next(answer for answer in others if answer not in own))
        for task, own in zip(run.looked, truths, strict=True)
        if not set(others) <= set(own)
    }
    tasks, until = [task for task in run.looked if task.id in wrong][:3], run.until(0.05)
    plays = await run.subject.play_each(tasks, lambda task: wrong[task.id], label="a wrong answer", until=until)
    return bool(plays) and all(play.ok and len(play.trajectory.turns) == 1 for play in plays)


def _lengths(run: Audit, tools: Mapping[str, Tool]) -> list[Finding]:
    most = run.subject.recipe.rollout.max_tokens
    lengths = {}
    for task in run.looked:
        if messages := run.openings.get(task.id):
            offered = run.subject.tools_of(task)
            try:
                lengths[task.id] = run.measure(messages, offered) if run.measure is not None else 0
            except UserError:  # images, say, that this tokenizer has no place for
                run.measure = None
            if run.measure is None:
                text = "".join(map(text_of, messages)) + "".join(str(tool.schema) for tool in offered.values())
                lengths[task.id] = int(len(text) / CHARACTERS)
    return length_findings(lengths, most, run.measure is not None) if most < NO_LIMIT else []


async def _play_oracle(run: Audit, ledger: Ledger) -> Sequence[Finding]:
    """Play the oracle, and an empty answer, by which all others are judged. The first ones are timed, alone."""
    scripts: dict[str, Script] = {}
    for task in run.looked if run.oracle.origin else ():
        with contextlib.suppress(UserError):
            scripts[task.id] = run.oracle.script(task)
    done = [task for task in run.looked if task.id in scripts]
    plays = await run.subject.play_each(
        done, lambda task: scripts[task.id], label="oracle", until=run.until(0.5), timed=True
    )
    row = ledger.enter("oracle", run.oracle.origin or "none", plays)
    empty = await run.subject.play_each(
        run.looked[:8], lambda task: [""], label="nothing", until=run.until(0.2), timed=not plays
    )
    good = [play.reward for play in empty if play.ok]
    ledger.floor = sum(good) / len(good) if good else 0.0
    if any(play.solved for play in plays):
        ledger.top = row.reward
    return oracle_findings(run.oracle, plays, run.looked)


def _knowledge(run: Audit, train: Sequence[Task]) -> Knowledge:
    known = Knowledge(run.oracle, run.openings, counted(run.oracle, train), ())
    known.slots = slots(known, run.looked)
    if not known.counts and run.oracle.field:
        known.counts = Counter(run.oracle.truths(task)[0] for task in run.looked if run.oracle.truths(task))
    return known


def slots(known: Knowledge, tasks: Sequence[Task]) -> list[str]:
    """Words of openings after which the stored answer stands in most tasks."""
    before: Counter[str] = Counter()
    for task in tasks:
        text = " ".join(text_of(message) for message in known.openings.get(task.id, ()))
        truths = known.truths(task)
        spots = re.finditer(rf"(\S*\w\S*[\s:=]+|\S+)[\"'`(]*{re.escape(truths[0])}(?!\w)", text) if truths else ()
        before.update({spot[1].rstrip() for spot in spots})
    return [word for word, count in before.most_common(3) if count >= 0.5 * len(tasks)]


async def _policies(run: Audit, ledger: Ledger, known: Knowledge, tools: Mapping[str, Tool]) -> Sequence[Finding]:
    """Play all attempts, with as many tasks each as there is time for."""
    every = list(attempts(known, tools))
    end = run.until(0.6)
    for index, attempt in enumerate(every):
        remaining = end - time.monotonic()
        if remaining <= 0 or run.subject.hangs >= HANGS:
            line = f"{len(every) - index} of {len(every)} attempts, from `{attempt.policy}: {attempt.name}` on"
            why = "there was no time for them" if remaining <= 0 else "too many rollouts hung"
            run.add([found("not_examined", Severity.INFO, f"{line}: {why}")])
            break
        await _attempt(run, ledger, attempt, remaining / (len(every) - index))
    if known.counts:
        alone = known.oracle.form is not None

        def near(task: Task, answer: str) -> Script:
            with contextlib.suppress(UserError):
                return known.oracle.after_work(task, answer) or known.say(answer)
            return known.say(answer)

        if alone and run.left > 1:
            await near_findings(run.subject, known, run.looked[:6], ledger, near, run.until(0.5))
    return []


async def _attempt(run: Audit, ledger: Ledger, attempt: Attempt, seconds: float) -> None:
    """Play one attempt until its time is over."""
    scripts: dict[str, Script] = {}
    for task in run.looked:
        with contextlib.suppress(UserError):  # a task that no oracle does
            script = attempt.script(task)
            if script is not None:
                scripts[task.id] = script
    tasks = [task for task in run.looked if task.id in scripts]
    label, until = f"{attempt.policy}: {attempt.name}", time.monotonic() + seconds
    plays = await run.subject.play_all(tasks, lambda task: scripts[task.id], label=label, until=until)
    judge(ledger, attempt, plays, ledger.enter(attempt.policy, attempt.name, plays))


def _parts(run: Audit, known: Knowledge) -> list[Part]:
    """The rollouts that are compared with themselves: done well, badly and by random calls. Of slow ones fewer."""
    parts = []
    slow = run.subject.clock.middle() > SLOW_PLAY
    for task in run.looked[: 1 if slow else COMPARED]:
        if run.oracle.origin:
            with contextlib.suppress(UserError):
                parts.append(Part(task, "oracle", run.oracle.script(task)))
        wrong = known.wrong(task)
        parts.append(Part(task, "wrong", known.say(wrong[0]) if wrong else ["I do not know."]))
    if run.subject.tools_of(run.looked[0]):
        parts += [Part(task, "calls", calling(known, 1)) for task in run.looked[: 1 if slow else 2]]
    return parts
