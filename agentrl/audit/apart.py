"""`audit_apart`: an audit in a process of its own, which an environment may hang, end, or flood with output."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.audit.child import DIGEST, LINES, OPTIONS, RECIPE, options_of
from agentrl.audit.finding import Finding, Report, Row, Severity, found
from agentrl.containment.process_tree import ProcessTree
from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe

CHILD = (sys.executable, "-m", "agentrl.audit.child")
STILL = 60.0
"""Seconds without a word of the process after which it hangs: no hook has longer."""
START = 120.0
"""Seconds for it to begin."""
MODEL_SECONDS = 600.0
"""Beside the audit's own time, where a model plays."""
PRINTED = 1 << 20
"""Bytes of output from which on an environment prints too much."""
_KEPT = 4_000  # bytes of it
_POLL = 0.05


@dataclass(slots=True)
class Watched:
    """What the process has said so far."""

    report: Report
    """The findings so far, and in the end all of it."""
    stage: str = "starting"
    """What it examines now."""
    at: str = "the start"
    """The hook or task that it was at last."""
    error: str = ""
    """The line of a UserError; empty where there is none."""
    done: bool = False
    """Whether it came to its end."""
    digest: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """See `agentrl.audit.child.digest`."""

    def take(self, line: Mapping[str, Any], on_stage: Callable[[str], None]) -> None:
        """Take in a line of the process."""
        if "at" in line:
            self.at = str(line["at"])
        elif "stage" in line:
            self.stage = str(line["stage"])
            on_stage(self.stage)
        elif "finding" in line:
            self.report.findings.append(Finding.read(line["finding"]))
        elif "error" in line:
            self.error, self.done = str(line["error"]), True
        elif "report" in line:
            given = line["report"]
            self.report.findings = [Finding.read(one) for one in given["findings"]]
            self.report.rows = [Row(**row) for row in given["policies"]]
            self.report.splits, self.report.plays = given["splits"], given["plays"]
            self.digest, self.done = line["digest"], True


class Output:
    """What a process prints: its end is kept, and it is counted."""

    def __init__(self) -> None:
        self._read, self.end = os.pipe()
        self.kept, self.count = b"", 0
        self._thread = threading.Thread(target=self._drain, daemon=True, name="agentrl-audit-output")
        self._thread.start()

    def _drain(self) -> None:
        while data := os.read(self._read, 1 << 16):
            self.count += len(data)
            self.kept = (self.kept + data)[-_KEPT:]
        os.close(self._read)

    def text(self) -> str:
        """The last lines."""
        return self.kept.decode(errors="replace")


def audit_apart(
    name: str,
    recipe: Recipe,
    *,
    tasks: int = 16,
    seconds: float = 45.0,
    model: str | None = None,
    measured: bool = False,
    on_stage: Callable[[str], None] = lambda name: None,
    still: float = STILL,
) -> Report:
    """Audit what a recipe names, in processes that are ended when they hang.

    tasks, seconds: see `Options`. model: plays, too. measured: count openings with the recipe's tokenizer. on_stage:
    told what is examined. still: seconds without a word of the process after which it hangs. Raises UserError: the
    environment cannot be had.
    """
    began = time.monotonic()
    most = 2 * seconds + START + (MODEL_SECONDS if model is not None else 0.0)
    report = Report(name)
    with tempfile.TemporaryDirectory(prefix="agentrl-audit-") as top:
        folder = Path(top)
        (folder / RECIPE).write_text(dump_recipe(recipe), encoding="utf-8")
        options = options_of(name, tasks, seconds, model, measured)
        (folder / OPTIONS).write_text(json.dumps(options), encoding="utf-8")
        (folder / LINES).touch()
        output, quiet = Output(), Output()
        watched = Watched(report)
        with os.fdopen(output.end, "wb", buffering=0) as out, os.fdopen(quiet.end, "wb", buffering=0) as other:
            second = _start(folder, "digest", other)
            tree = _start(folder, "audit", out)
            try:
                why = _follow(folder / LINES, tree, watched, (began + most, still), on_stage)
                _wait(second, 10.0)
                other_tasks = _digest(folder)
            finally:
                tree.end(at_once=True)
                second.end(at_once=True)
    if watched.error:
        raise UserError(watched.error)
    if why:
        report.findings.append(_broken(why, watched, output.text(), still, most))
    elif other_tasks is not None:
        report.findings += _compared(watched.digest, other_tasks)
    if output.count > PRINTED:
        line = f"it printed {output.count / 1e6:,.1f} MB in {report.plays:,} rollouts"
        report.findings.append(found("prints", Severity.MEDIUM, line, (), output.text()[-300:]))
    report.seconds = time.monotonic() - began
    report.sort()
    return report


def _start(folder: Path, what: str, out: Any) -> ProcessTree:
    own = Path(tempfile.mkdtemp(prefix="tree-", dir=folder))
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "random"}
    return ProcessTree([*CHILD, str(folder), what], out, env, grace=1.0, folder=own)


def _follow(
    path: Path,
    tree: ProcessTree,
    watched: Watched,
    limits: tuple[float, float],
    on_stage: Callable[[str], None],
) -> str:
    """Read what the process says to its end; the kind of finding that it did not come to one, or an empty text. limits:
    when it must be over, on the clock of `time.monotonic`, and the seconds for which it may be still."""
    until, still = limits
    since, position = time.monotonic(), 0
    while True:
        running = tree.running  # before its last lines are read
        with path.open("rb") as file:
            file.seek(position)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            position += len(whole) + 1
            since = time.monotonic()
            for line in whole.splitlines():
                watched.take(json.loads(line), on_stage)
        if watched.done:
            return ""
        limit = MODEL_SECONDS if watched.stage.startswith(("loading", "the model")) else still
        if watched.stage == "starting":
            limit = START
        if not running:
            return "exits"
        if time.monotonic() - since > limit:
            return "hangs"
        if time.monotonic() > until:
            return "not_examined"
        time.sleep(_POLL)


def _broken(why: str, watched: Watched, output: str, still: float, most: float) -> Finding:
    """The finding that an audit did not come to its end: it is the environment's fault unless all its time is over."""
    what = {
        "exits": "the process ended",
        "hangs": f"nothing went on for {still:g} s",
        "not_examined": f"the {most:g} s that an audit may take were over",
    }[why]
    line = f"{what} in {watched.at} ({watched.stage}); what comes after that was not examined"
    task = watched.at.partition("task ")[2].partition(",")[0]
    severity = Severity.INFO if why == "not_examined" else Severity.HIGH
    return found(why, severity, line, [task] if task else [], output[-500:])


def _wait(tree: ProcessTree, seconds: float) -> None:
    end = time.monotonic() + seconds
    while tree.running and time.monotonic() < end:
        time.sleep(_POLL)


def _digest(folder: Path) -> dict[str, dict[str, list[str]]] | None:
    try:
        given: dict[str, dict[str, list[str]]] = json.loads((folder / DIGEST).read_text())
    except (OSError, ValueError):
        return None
    return given


def _compared(
    digest: Mapping[str, Mapping[str, list[str]]], other: Mapping[str, Mapping[str, list[str]]]
) -> list[Finding]:
    findings = []
    for what, kind in (("tasks", "unsteady_tasks"), ("openings", "unseeded")):
        for split, hashes in digest[what].items():
            pairs = list(zip(hashes, other[what].get(split, ()), strict=False))
            changed = [a.split()[0] for a, b in pairs if a != b]
            if changed:
                line = f"{split}: {len(changed)} of the first {len(pairs)} {what} are others in another process"
                findings.append(found(kind, Severity.HIGH, line, changed))
        if findings:
            break  # other tasks have other openings
    return findings
