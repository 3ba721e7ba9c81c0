"""Findings about hooks: what is not the same again, what leaks from one rollout to another, what is slow or left."""

import asyncio
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from agentrl.audit.finding import Finding, Severity, found
from agentrl.audit.subject import GAP, Play, Script, Seat, Subject, Voice, shortened
from agentrl.plugins.types import Task
from agentrl.testing.hooks import sizes
from agentrl.trajectory import Boundary

SLOW, VERY_SLOW = 2.0, 10.0
"""Seconds of a rollout in its hooks, from which on they are slow."""
MEET = 1.0
"""Seconds for which rollouts that are to run at the same time wait for each other."""
_GROWTH_ROUNDS = 2
_OBJECTS = 3  # environments that an audit makes, at least: what each leaves is there as often
_SERIES = 8  # plays of one rollout, where it is to be seen what makes it differ


@dataclass(frozen=True, slots=True)
class Part:
    """One rollout of the comparison: a task, and who plays it."""

    task: Task
    name: str
    """Who plays, such as `oracle`."""
    script: Script
    """The player."""

    @property
    def key(self) -> tuple[str, str]:
        """What it is compared by."""
        return self.task.id, self.name


@dataclass(slots=True)
class Repeats:
    """The same rollouts, played in several ways."""

    outcomes: defaultdict[tuple[str, str], dict[str, Play]] = field(default_factory=lambda: defaultdict(dict))
    """By rollout: what came of it, by the way."""

    def differing(self, way: str, other: str) -> list[tuple[tuple[str, str], Play, Play]]:
        """The rollouts that came out otherwise in one way than in the other, by their keys."""
        triples = [(key, p[way], p[other]) for key, p in self.outcomes.items() if way in p and other in p]
        return [(key, a, b) for key, a, b in triples if a.outcome() != b.outcome()]


async def repeat_findings(subject: Subject, parts: Sequence[Part], until: float) -> list[Finding]:
    """Play the same rollouts in one order, in the other order, and all at once, each in an environment made anew.
    until: when nothing more is begun, on the clock of `time.monotonic`."""
    repeats, findings = Repeats(), list[Finding]()
    await _in_order(subject, parts, ("first",), repeats, until)
    await _in_order(subject, list(reversed(parts)), ("back", "more"), repeats, until)
    findings += _flickers(repeats)
    alone = (
        repeats.differing("first", "back") or repeats.differing("back", "more") or repeats.differing("first", "more")
    )
    if alone:
        findings.append(await _why_differing(subject, parts, alone, until))
    at_once = [part for part in parts if "first" in repeats.outcomes[part.key]]
    if time.monotonic() > until or subject.at_once == 1:
        why = "they wait for each other" if subject.at_once == 1 else "there was no time for all of them"
        findings.append(found("not_examined", Severity.INFO, f"rollouts again, and at once: {why}"))
        return findings
    fresh = await subject.again()
    try:
        findings += await _together(fresh, at_once, repeats, bool(alone))
        _take(subject, fresh)
    finally:
        await fresh.close()
    return findings


async def _in_order(
    subject: Subject, parts: Sequence[Part], ways: Sequence[str], repeats: Repeats, until: float
) -> None:
    """Play rollouts alone, in an environment made anew: in their order the first way, in the other order the second."""
    fresh = await subject.again()
    try:
        for way, order in zip(ways, (parts, list(reversed(parts))), strict=False):
            for part in order:
                if time.monotonic() > until:
                    break
                play = await fresh.play(part.task, part.script, twice=way == "first", label=f"a rollout alone, {way}")
                repeats.outcomes[part.key][way] = play
        _take(subject, fresh)
    finally:
        await fresh.close()


def _take(subject: Subject, fresh: Subject) -> None:
    """Keep of another object of the environment what it says about all."""
    subject.failures += fresh.failures
    subject.counts += fresh.counts
    for key, ids in fresh.tool_errors.items():
        subject.tool_errors.setdefault(key, []).extend(ids)


def _flickers(repeats: Repeats) -> list[Finding]:
    asked = [plays["first"] for plays in repeats.outcomes.values() if "first" in plays and plays["first"].again]
    if not asked:
        return []
    line = f"asked twice after one rollout, the reward differs in {len(asked)} of {len(repeats.outcomes)} rollouts"
    return [found("flicker", Severity.HIGH, line, [play.task.id for play in asked], asked[0].again)]


async def _why_differing(
    subject: Subject, parts: Sequence[Part], differing: Sequence[tuple[tuple[str, str], Play, Play]], until: float
) -> Finding:
    """What makes rollouts differ that should not: chance, or what an earlier one left. until: from when on two plays of
    each series must do."""
    key, a, b = differing[0]
    part = next(part for part in parts if part.key == key)
    series, count = list[list[tuple[object, ...]]](), _SERIES
    for _ in range(2):
        fresh = await subject.again()
        try:
            plays: list[Play] = []
            while len(plays) < count:
                plays.append(await fresh.play(part.task, part.script, label="a rollout once more"))
                if not series and len(plays) > 1 and time.monotonic() > until:
                    count = len(plays)
            series.append([play.outcome() for play in plays])
        finally:
            await fresh.close()
    ids = [play.task.id for _, play, _ in differing]
    shown = difference(a, b)
    settled = len({*series[0][1:], *series[1]}) == 1
    if series[0] == series[1] or settled:
        line = f"{len(differing)} of {len(parts)} rollouts come out otherwise after other rollouts than before them"
        return found("leak_after", Severity.HIGH, line, ids, shown)
    rewards_alone = all(x.heard() == y.heard() for _, x, y in differing)
    kind = "flicker" if rewards_alone else "unseeded"
    what = "earn otherwise" if rewards_alone else "are answered otherwise"
    line = f"{len(differing)} of {len(parts)} rollouts {what} the second time, with the same words and the same seed"
    return found(kind, Severity.HIGH, line, ids, shown)


def difference(a: Play, b: Play) -> str:
    """The first thing in which two rollouts differ."""
    for (_, before), (_, after) in zip(a.heard(), b.heard(), strict=False):
        if before != after:
            return f"heard {shortened(before, 200)!r}, then {shortened(after, 200)!r}"
    rewards = dict(a.trajectory.rewards), dict(b.trajectory.rewards)
    why = [play.trajectory.failure.message for play in (a, b) if play.trajectory.failure is not None]
    return f"earned {rewards[0]}, then {rewards[1]}{'; ' if why else ''}{'; '.join(why)}"


async def _together(subject: Subject, parts: Sequence[Part], repeats: Repeats, differ: bool) -> list[Finding]:
    """Play all at the same time, several times each, and look for what grows."""
    many = [part for part in parts for _ in range(_GROWTH_ROUNDS)]
    held: list[dict[str, int]] = []
    plays: list[Play] = []
    for _ in range(_GROWTH_ROUNDS):
        meeting = Meeting(len(many))
        work = (subject.play(part.task, meeting.met(part.script), label="rollouts at once") for part in many)
        plays = list(await asyncio.gather(*work))
        held.append(sizes(subject.env))
    findings = _growth(held, len(many))
    if differ:
        return findings
    pairs = [
        (alone, play)
        for part, play in zip(many, plays, strict=True)
        if (alone := repeats.outcomes[part.key]["first"]).outcome() != play.outcome()
    ]
    if pairs:
        line = f"{len(pairs)} of {len(many)} rollouts come out otherwise among others than alone"
        ids = [play.task.id for play, _ in pairs]
        findings.append(found("leak_together", Severity.HIGH, line, ids, difference(*pairs[0])))
    return findings


def _growth(held: Sequence[dict[str, int]], rollouts: int) -> list[Finding]:
    findings = []
    for name, size in held[-1].items():
        grown = size - held[0].get(name, 0)
        if grown >= rollouts:
            line = f"self.{name} grew by {grown} entries over {rollouts} rollouts that were all released"
            findings.append(found("left_behind", Severity.MEDIUM, line))
    return findings


class Meeting:
    """Rollouts that wait for each other before each of their first turns."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrived: defaultdict[int, int] = defaultdict(int)
        self._open: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def met(self, script: Script) -> Voice:
        """The player, waiting for the others."""

        async def voice(seat: Seat) -> str:
            if seat.number < 2:
                await self._meet(seat.number)
            else:
                await asyncio.sleep(0)
            return await script(seat) if callable(script) else script[min(seat.number, len(script) - 1)]

        return voice

    async def _meet(self, number: int) -> None:
        self._arrived[number] += 1
        if self._arrived[number] >= self._count:
            self._open[number].set()
        try:
            async with asyncio.timeout(MEET if number == 0 else 0.05):
                await self._open[number].wait()
        except TimeoutError:
            self._open[number].set()


def failure_findings(subject: Subject) -> list[Finding]:
    """Rollouts that came to no reward, releases that failed, and tools that raised."""
    by_line: defaultdict[str, list[Play]] = defaultdict(list)
    lost = list[Play]()
    for play in subject.failures:
        failure = play.trajectory.failure
        if failure is not None and failure.boundary is Boundary.ENGINE:
            lost.append(play)
        elif failure is not None:
            by_line[failure.message].append(play)
        for line in play.trajectory.extra.get("release_errors", ()):
            by_line[line].append(play)
    findings = []
    for line, plays in sorted(by_line.items(), key=lambda item: -len(item[1]))[:5]:
        kind = "hangs" if "took too long" in line or "took longer" in line or "ignores" in line else "fails"
        said = [m for m in plays[0].trajectory.messages if m["role"] == "assistant"]
        shown = f"after {shortened(str(said[-1].get('content') or said[-1].get('tool_calls')), 200)!r}" if said else ""
        what = f"{len(plays)} of {subject.counts['plays']} rollouts: {line}"
        findings.append(found(kind, Severity.HIGH, what, [play.task.id for play in plays], shown))
    if lost and (failure := lost[0].trajectory.failure) is not None:
        line = f"{len(lost)} rollouts, whose player failed: {failure.message}"
        findings.append(found("not_examined", Severity.INFO, line, [play.task.id for play in lost]))
    for (name, line), ids in list(subject.tool_errors.items())[:5]:
        kind, what = ("fails", "solved()") if name == "solved" else ("tool_fails", f"tool {name!r}")
        findings.append(found(kind, Severity.MEDIUM, f"{what}: {line} ({len(ids)} times)", ids))
    return findings


def clock_findings(subject: Subject) -> list[Finding]:
    """Hooks that are slow, and those that hold the event loop."""
    findings = []
    for part, seconds in subject.clock.seconds.items():
        if seconds and (middle := median(seconds)) >= SLOW:
            severity = Severity.HIGH if middle >= VERY_SLOW else Severity.MEDIUM
            findings.append(found("slow", severity, f"a rollout spends {middle:.1f} s in its {part} (the median)"))
    timed = len(subject.clock.seconds["hooks"])
    for where, gaps in subject.clock.gaps.items():
        if timed >= 3 and len(gaps) * 2 > timed:
            line = (
                f"{where} holds the event loop for {median(gaps):.2f} s, beyond {GAP} s in {len(gaps)} of {timed} plays"
            )
            findings.append(found("blocking", Severity.MEDIUM, line))
    return findings


@dataclass(frozen=True, slots=True)
class Traces:
    """What a process has outside of its memory."""

    processes: frozenset[int]
    """The processes that descend from it."""
    threads: frozenset[int]
    """Idents of the threads that are not agentrl's own."""
    files: frozenset[str]
    """Paths in the folders that are looked at."""
    descriptors: int
    """How many files are open."""

    @classmethod
    def taken(cls, folders: Sequence[Path]) -> "Traces":
        """Those of this process now. folders: where new files are looked for."""
        files = {str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()}
        idents = {thread.ident or 0 for thread in threading.enumerate() if not _ours(thread)}
        try:
            descriptors = len(os.listdir("/proc/self/fd"))
        except OSError:
            descriptors = 0
        return cls(frozenset(children()), frozenset(idents), frozenset(files), descriptors)

    def findings(self, before: "Traces", rollouts: int) -> list[Finding]:
        """What has been left since `before`."""
        findings = []
        if left := self.processes - before.processes:
            names = ", ".join(sorted({_command(pid) for pid in left}))
            line = f"{len(left)} processes still run after `close`: {names}"
            findings.append(found("left_behind", Severity.MEDIUM if len(left) >= _OBJECTS else Severity.LOW, line))
        alive = [t for t in threading.enumerate() if t.ident in self.threads - before.threads]
        if len(alive) >= _OBJECTS:
            line = f"{len(alive)} threads still run after `close`: {', '.join(sorted({t.name for t in alive})[:5])}"
            findings.append(found("left_behind", Severity.MEDIUM, line))
        if files := sorted(self.files - before.files):
            names = ", ".join(Path(name).name for name in files[:5])
            line = f"{len(files)} files or folders are left after `close`: {names}"
            findings.append(found("left_behind", Severity.MEDIUM, line))
        if self.descriptors - before.descriptors >= max(8, rollouts // 8):
            line = f"{self.descriptors - before.descriptors} more files are open after `close` than before"
            findings.append(found("left_behind", Severity.LOW, line))
        return findings


def _ours(thread: threading.Thread) -> bool:
    """Whether agentrl's pools or asyncio made a thread, which live on for a while."""
    return thread.name.startswith(("asyncio", "agentrl", "image", "reward-", "tool-", "plugin", "pydevd"))


def children() -> list[int]:
    """The processes that descend from this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            try:
                rest = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if rest[0] != "Z":
                parents[int(entry.name)] = int(rest[1])
    found_ones, level = list[int](), {os.getpid()}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found_ones += level
    return found_ones


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return str(pid)
    return shortened(" ".join(words[:3]), 60)


def own_folder() -> tuple[tempfile.TemporaryDirectory[str], Callable[[], None]]:
    """A folder for temporary files of this process, and what undoes that."""
    folder = tempfile.TemporaryDirectory(prefix="agentrl-audit-")
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder.name

    def undo() -> None:
        tempfile.tempdir = before
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable
        folder.cleanup()

    return folder, undo
