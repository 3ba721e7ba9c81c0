"""`examine`: run the checks in processes of their own, each under its time limit."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.cluster.errors import tail
from agentrl.containment.process_tree import ProcessTree
from agentrl.doctor.check import Check, Finding, Status
from agentrl.doctor.child import FINDINGS, RECIPE
from agentrl.errors import UserError, nearest
from agentrl.plugins.registry import check_engine, find, load_path, make_environment
from agentrl.plugins.rewards import make_rewards
from agentrl.plugins.types import Json
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe

CHECKS = "agentrl.doctor.checks:CHECKS"
CHILD = (sys.executable, "-m", "agentrl.doctor.child")
START_SECONDS = 120.0
"""Time for a process to begin its first check."""
POLL_SECONDS = 0.05
GRACE = 5.0
LOG_LINES = 40
"""Of a check that failed, in the report."""


def examine(
    recipe: Recipe,
    *,
    only: Sequence[str] = (),
    checks: str = CHECKS,
    began: Callable[[Check], None] = lambda check: None,
    ended: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Run the checks on `recipe` and return what came of each, in their order.

    only: names of checks to run (none: all). checks: `module:attribute` of the list. began, ended: called as a check
    begins, and with what came of it. Raises UserError for an unknown name.
    """
    known: Sequence[Check] = load_path(checks, "the checks")
    if unknown := [name for name in only if name not in {check.name for check in known}]:
        raise UserError(f"there is no check {unknown[0]!r}{nearest(unknown[0], [check.name for check in known])}")
    chosen = [check for check in known if not only or check.name in only]
    found: dict[str, Finding] = {}

    def end(finding: Finding) -> None:
        found[finding.name] = finding
        ended(finding)

    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as folder:
        Path(folder, RECIPE).write_text(dump_recipe(recipe), encoding="utf-8")
        while due := _due(chosen, found, end):
            _run(Path(folder), checks, due, began, end)
    return [found[check.name] for check in chosen]


def refuse(recipe: Recipe) -> None:
    """Raise UserError for what the recipe itself has wrong, on whatever machine: names, arguments, combinations."""
    from agentrl.training.preflight import check_algorithm, check_names

    check_names(recipe)
    check_algorithm(recipe)
    check_engine(recipe.engine)
    make_environment(recipe.env)
    for tool in recipe.tools:
        find("tools", tool.name)
    make_rewards(recipe.rewards)


def _due(chosen: Sequence[Check], found: dict[str, Finding], end: Callable[[Finding], None]) -> list[Check]:
    """The checks that are still to run; those that rest on one that failed are left out."""
    due = []
    for check in chosen:
        if check.name in found:
            continue
        lost = next((name for name in check.needs if name in found and found[name].status is not Status.OK), None)
        if lost is None:
            due.append(check)
        else:
            end(Finding(check.name, check.tries, Status.ABSENT, f"the check `{lost}` did not succeed"))
    return due


def _run(
    folder: Path, place: str, due: Sequence[Check], began: Callable[[Check], None], end: Callable[[Finding], None]
) -> None:
    """Run as many of the checks as one process does: until one fails, or rests on one that did not succeed."""
    (folder / FINDINGS).unlink(missing_ok=True)
    (folder / FINDINGS).touch()
    words = [*CHILD, str(folder), place, *(check.name for check in due)]
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as aside, (folder / "log").open("wb+") as log:
        own = Path(aside, "tree")  # removed with the tree
        own.mkdir()
        tree = ProcessTree(words, log, {**os.environ, "PYTHONUNBUFFERED": "1"}, grace=GRACE, folder=own)
        try:
            _follow(_Lines(folder / FINDINGS), tree, {check.name: check for check in due}, folder / "log", began, end)
        finally:
            tree.end()  # what a check holds is freed as it is told to end


def _follow(
    lines: "_Lines",
    tree: ProcessTree,
    due: dict[str, Check],
    log: Path,
    began: Callable[[Check], None],
    end: Callable[[Finding], None],
) -> None:
    """Read what the process writes until it ends, or a check takes too long."""
    current, since, done = next(iter(due.values())), time.monotonic(), set[str]()
    limit, at = START_SECONDS, 0
    began(current)
    while True:
        running = tree.running  # before its last lines are read
        for line in lines.new():
            if "began" in line:
                if line["began"] != current.name:
                    began(due[line["began"]])
                current, since, at = due[line["began"]], time.monotonic(), line["at"]
                limit = current.seconds
                continue
            finding = replace(Finding.read(line), seconds=time.monotonic() - since)
            if finding.status is Status.FAILED:
                finding = replace(finding, log="\n".join(tail(log, LOG_LINES, at)))
            done.add(finding.name)
            end(finding)
            if finding.status is Status.FAILED:
                return
            left = [check for name, check in due.items() if name not in done]
            if not left or (any(finding.name in check.needs for check in left) and finding.status is not Status.OK):
                return
            since, limit = time.monotonic(), START_SECONDS
        if not running:
            why = "its process ended (see the log in the report)"
        elif time.monotonic() - since > limit:
            why = f"it took more than {limit:g} s"
        else:
            time.sleep(POLL_SECONDS)
            continue
        seconds = time.monotonic() - since
        if current.name not in done:
            found = Finding(
                current.name,
                current.tries,
                Status.FAILED,
                why,
                current.remedy,
                seconds,
                "\n".join(tail(log, LOG_LINES, at)),
            )
            end(found)
        return


class _Lines:
    """The lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Json]]:
        """The whole lines since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._at += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]
