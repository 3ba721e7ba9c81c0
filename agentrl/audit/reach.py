"""Findings about answers that are reached without the work, calls that are paid, and tools that nobody needs."""

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random

from agentrl.audit.answer import Oracle
from agentrl.audit.finding import Finding, Severity, found
from agentrl.audit.policy import Knowledge, always, random_call
from agentrl.audit.rewards import Ledger
from agentrl.audit.subject import Play, Seat, Subject, Voice, shortened, text_of
from agentrl.errors import UserError
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Task
from agentrl.testing.agent import call

SHARE = 0.6
"""Share of the tasks whose answer is shown, from which it counts as reachable."""
CHANCE = 0.3
"""Share of the tasks that show another task's answer, up to which that is no chance."""
FREQUENT, DOMINANT = 0.6, 0.8
"""Share of the tasks that have one answer."""
CALLS = (4, 64, 1_024)
"""Calls of one tool whose pay is compared; the last only where they are fast."""
FARMED = 0.25
"""Of the oracle's reward: what more calls may add."""
_CALL_SECONDS = 5.0  # of a rollout: no more calls than that


async def reach_findings(subject: Subject, known: Knowledge, tasks: Sequence[Task], until: float) -> list[Finding]:
    """Whether errors, results of calls at random, or replies to a wrong answer hold the stored answer. until: as of
    `Subject.play_all`."""
    telling = [task for task in tasks if any(map(distinct, known.truths(task)))][:8]
    if len(telling) < 3:
        return []
    findings: list[Finding] = []
    ways = (
        ("errors of calls that no schema takes", Severity.HIGH, _wrong_calls()),
        ("results of calls with random arguments", Severity.MEDIUM, _blind_calls()),
        ("results of tools that no demonstration calls", Severity.HIGH, _idle_calls(known, telling)),
        ("replies to a wrong answer", Severity.HIGH, _wrong_answers(known)),
    )
    for number, (way, severity, voice) in enumerate(ways):
        now = time.monotonic()
        if now > until:
            findings.append(found("not_examined", Severity.INFO, f"{way}: there was no time for it"))
            continue
        end = now + (until - now) / (len(ways) - number)
        plays = await subject.play_each(telling, partial(always, voice), label=way, until=end)
        findings += _shown(known, plays, way, severity)
    findings += _in_schemas(subject, known, telling)
    return findings


def distinct(truth: str) -> bool:
    """Whether a text holds an answer hardly by chance."""
    letters = re.sub(r"\W", "", truth)
    return (
        len(letters) >= 4 or (letters.isdigit() and len(letters) >= 2) or (len(letters) >= 3 and not letters.isdigit())
    )


def holds(text: str, truth: str) -> bool:
    """Whether a text holds an answer as words of its own."""
    return bool(truth.strip()) and re.search(rf"(?<![\w.]){re.escape(truth)}(?![\w])", text, re.I) is not None


def _shown(known: Knowledge, plays: Sequence[Play], way: str, severity: Severity) -> list[Finding]:
    """The finding that most plays were told their own task's answer, and not the others'."""
    hits, chance = [], 0
    for play in plays:
        opening = " ".join(text_of(message) for message in known.openings.get(play.task.id, ()))
        said = " ".join(text_of(m) for m in play.trajectory.messages if m["role"] == "assistant")
        heard = "\n".join(text for role, text in play.heard() if role != "system").replace(opening, "")
        own = [truth for truth in known.truths(play.task) if distinct(truth) and not holds(said, truth)]
        if not own or all(holds(opening, truth) for truth in own):
            continue
        if any(holds(heard, truth) for truth in own):
            hits.append((play, heard))
        chance += any(holds(heard, answer) for answer in known.wrong(play.task) if distinct(answer))
    if len(hits) < max(2, SHARE * len(plays)) or chance > CHANCE * len(plays):
        return []
    line = f"{way} show the stored answer in {len(hits)} of {len(plays)} tasks"
    return [found("reachable", severity, line, [play.task.id for play, _ in hits], shortened(hits[0][1], 300))]


def _wrong_calls() -> Voice:
    async def voice(seat: Seat) -> str:
        needing = [name for name, tool in seat.tools.items() if tool.parameters.get("required")]
        if seat.number > 0 or not needing:
            return "I do not know."
        lines = [call(name) for name in needing]
        return "\n".join([*lines[:3], call(needing[0], no_such_argument=1), call("no_such_tool")])

    return voice


def _blind_calls() -> Voice:
    async def voice(seat: Seat) -> str:
        needing = {name: tool for name, tool in seat.tools.items() if tool.parameters.get("required")}
        if seat.number > 1 or not needing:
            return "I do not know."
        return "\n".join(random_call(needing, seat.rng, name) for name in list(needing)[:3])

    return voice


def called_in(oracle: Oracle, tasks: Sequence[Task]) -> Counter[str]:
    """How often the demonstrations of tasks call each tool."""
    called: Counter[str] = Counter()
    for task in tasks:
        with contextlib.suppress(UserError):
            for turn in oracle.demonstrated(task):
                called.update(found_call[1] for found_call in re.finditer(r"^/([A-Za-z_][\w.-]*)", turn, re.M))
    return called


def _idle_calls(known: Knowledge, tasks: Sequence[Task]) -> Voice:
    """One call of each tool without arguments that the demonstrations do without, where they call others."""
    called = called_in(known.oracle, tasks) if known.oracle.origin == "demonstrate" else Counter[str]()

    async def voice(seat: Seat) -> str:
        idle = [n for n, tool in seat.tools.items() if n not in called and not tool.parameters.get("required")]
        return "\n".join(map(call, idle[:4])) if called and idle and seat.number == 0 else "I do not know."

    return voice


def _wrong_answers(known: Knowledge) -> Voice:
    async def voice(seat: Seat) -> str:
        wrong = known.wrong(seat.task, 8)
        turns = known.say(wrong[seat.number % len(wrong)]) if wrong else ["I do not know."]
        return turns[0]

    return voice


def _in_schemas(subject: Subject, known: Knowledge, tasks: Sequence[Task]) -> list[Finding]:
    """The finding that the schemas of a task's tools hold its answer."""
    hits = []
    for task in tasks:
        text = " ".join(str(tool.schema) for tool in subject.tools_of(task).values())
        wrong = [answer for answer in known.wrong(task) if distinct(answer)]
        own = [truth for truth in known.truths(task) if distinct(truth)]
        if any(holds(text, truth) for truth in own) and not any(holds(text, answer) for answer in wrong):
            hits.append(task.id)
    if len(hits) < max(2, SHARE * len(tasks)):
        return []
    line = f"the schemas of tools show the stored answer in {len(hits)} of {len(tasks)} tasks"
    return [found("reachable", Severity.HIGH, line, hits)]


async def calling_findings(
    subject: Subject, known: Knowledge, tasks: Sequence[Task], ledger: Ledger, until: float
) -> list[Finding]:
    """Whether a tool that is called more often than needed earns more. until: as of `Subject.play_all`."""
    findings: list[Finding] = []
    tools = [name for name, tool in subject.tools_of(tasks[0]).items() if not tool.converses][:8]
    for place, name in enumerate(tools):
        if time.monotonic() > until:
            line = f"calls without need of {', '.join(map(repr, tools[place:]))}: there was no time for them"
            findings.append(found("not_examined", Severity.INFO, line))
            break
        findings += await _farmed(subject, known, tasks[:2], ledger, name, until)
    return findings


async def _farmed(
    subject: Subject, known: Knowledge, tasks: Sequence[Task], ledger: Ledger, name: str, until: float
) -> list[Finding]:
    """Whether one tool's calls are paid, by ever more of them."""
    stage, few, seconds = subject.wide(), 0.0, 0.0
    for count in CALLS:
        if count == CALLS[-1] and seconds * count / CALLS[-2] > _CALL_SECONDS:
            break
        plays: list[Play] = []
        for task in tasks:
            if count == CALLS[0] or (time.monotonic() < until and seconds < _CALL_SECONDS):
                label = f"{count} calls of {name}"
                plays.append(await subject.play(task, _repeated(known, name, count), stage=stage, label=label))
                seconds = float(plays[-1].trajectory.seconds.get("total", 0.0))
        good = [play for play in plays if play.ok]
        if not good or (count == CALLS[0] and len(good) < len(plays)):
            break
        mean = sum(play.reward for play in good) / len(good)
        if count == CALLS[0]:
            few = mean
            continue
        ledger.enter("calling", f"{count} calls of {name}", good)
        if mean - few >= FARMED * max(ledger.top - ledger.floor, 1e-6):
            top = f"the oracle earns {ledger.top:.2f}"
            line = f"{count:,} calls of {name!r} earn {mean - few:.2f} more than {CALLS[0]} do; {top}"
            return [found("calling", Severity.HIGH, line, [play.task.id for play in good])]
    return []


def _repeated(known: Knowledge, name: str, count: int) -> Voice:
    """The same call again and again, at most 16 a turn or 64 of very many, then a wrong answer."""
    each = min(count, 16 if count <= 64 else 64)

    async def voice(seat: Seat) -> str:
        if name in seat.tools and seat.number * each < count:
            return "\n".join([random_call(seat.tools, Random(seat.task.id), name)] * each)
        return "I do not know."

    return voice


def distribution_findings(known: Knowledge) -> list[Finding]:
    """Whether one stored answer is that of most tasks."""
    total = sum(known.counts.values())
    if total < 8 or len(known.counts) < 2:
        if total >= 8 and known.oracle.field and known.oracle.form is not None:
            only = next(iter(known.counts))
            return [found("constant", Severity.HIGH, f"all {total:,} tasks have the answer {shortened(only, 40)!r}")]
        return []
    answer, count = known.counts.most_common(1)[0]
    share = count / total
    surely = share - 1.64 * math.sqrt(share * (1 - share) / total)
    if share < FREQUENT or surely < 0.55:
        return []
    severity = Severity.HIGH if share >= DOMINANT else Severity.MEDIUM
    line = f"{share:.0%} of {total:,} tasks have the answer {shortened(answer, 40)!r}"
    return [found("constant", severity, line)]


def unused_findings(oracle: Oracle, tasks: Sequence[Task], tools: Mapping[str, Tool]) -> list[Finding]:
    """Tools that no demonstration calls, where some are called."""
    if oracle.origin != "demonstrate" or not tools:
        return []
    looked = [tasks[index] for index in range(0, len(tasks), max(1, len(tasks) // 128))]
    called = called_in(oracle, looked)
    unused = [name for name in tools if name not in called]
    if not called or not unused:
        return []
    line = f"no demonstration of {len(looked):,} tasks calls {', '.join(map(repr, unused[:5]))}"
    return [found("unused_tool", Severity.LOW, line)]
