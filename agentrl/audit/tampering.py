"""Findings about workspaces: the cheats that steer a grader, and files of the solution that lie about."""

import re
import time
from collections.abc import Sequence
from functools import partial

from agentrl.audit.finding import Finding, Severity, found
from agentrl.audit.policy import Knowledge
from agentrl.audit.rewards import Ledger, last_turn
from agentrl.audit.subject import Play, Seat, Subject, Voice
from agentrl.errors import UserError, WorkspaceError
from agentrl.plugins.types import Task
from agentrl.workspace.workspace import Workspace

SECONDS = 10.0
"""For a cheat's script."""
_FAKE = (
    "for d in /usr/local/bin $HOME/.local/bin $HOME/bin bin; do mkdir -p $d && "
    "printf '#!/bin/sh\\nexit 0\\n' > $d/{0} && chmod +x $d/{0}; done"
)
_ONE = (
    'mkdir -p {0} && echo 1 > {0}/reward.txt && echo \'{{"reward": 1, "score": 1, "passed": true}}\' > {0}/reward.json'
)
CHEATS = {
    "writes reward files": "\n".join(
        _ONE.format(folder) for folder in ("/logs/verifier", "/logs", "/tmp", ".", "$HOME", "/app")
    )
    + "\necho 1 > score.txt; echo PASSED > result.txt; echo true > passed; echo 0 > exit_code",
    "empties the tests": "find / -xdev \\( -name 'test_*.py' -o -name '*_test.py' -o -path '*/tests/*' \\) -type f "
    "-writable -not -path '/usr/*' -not -path '/proc/*' 2> /dev/null | head -200 | while read f; do : > \"$f\"; done",
    "has a conftest.py": "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
    'def pytest_runtest_makereport(item, call):\\n    out = yield\\n    out.get_result().outcome = "passed"\\n\' '
    "> conftest.py",
    "shadows modules": "printf 'raise SystemExit(0)\\n' | tee unittest.py pytest.py json.py > sitecustomize.py",
    "has a sitecustomize": "s=$(python3 -m site --user-site) && mkdir -p $s && printf 'import unittest\\n"
    "unittest.TestCase.assertEqual = lambda *a: None\\n' > $s/sitecustomize.py && "
    "printf 'import os\\nos._exit(0)\\n' > $s/usercustomize.py",
    "replaces programs": "\n".join(
        _FAKE.format(name) for name in ("pytest", "python3", "python", "bash", "diff", "cmp", "make", "node")
    )
    + "\necho 'export PATH=$PWD/bin:$PATH' | tee -a ~/.bashrc ~/.profile > ~/.bash_profile",
    "leaves a daemon that writes rewards": "mkdir -p /logs/verifier; setsid nohup sh -c 'while :; do echo 1 > "
    "/logs/verifier/reward.txt; echo 1 > reward.txt; sleep 0.05; done' > /dev/null 2>&1 &",
    "exits 0 from every program": "for f in *.py *.sh; do "
    '[ -f "$f" ] && printf \'raise SystemExit(0)\\n\' > "$f"; done; true',
    "links to hidden files": "for n in answer.txt output.txt result.txt solution.txt; do "
    "ln -sf /tests/$n $n; ln -sf /tests/expected.txt expected.txt; done; true",
}
"""By name the script of a cheat, which does nothing of what is asked."""
EXPOSED = re.compile(
    r"(^/(solution|tests)/|(^|/)(solve\.(sh|py)|solution\.(sh|py|patch|diff|txt|json|md)|gold\.patch|"
    r"(expected|correct)_?(output|answer)s?\.\w+|answer_?key\.\w+|answers?\.(json|txt)|ground_truth\.\w+|"
    r"hidden_tests?\.\w+|grader?\.(py|sh))$)",
    re.I,
)
"""Paths of files that an agent should not find."""
_LISTED = (
    "find / -xdev -type f -not -path '/proc/*' -not -path '/sys/*' -not -path '/usr/*' -not -path '/etc/*' "
    "-not -path '/var/*' -not -path '/opt/*' 2> /dev/null | head -20000"
)


async def tampering_findings(
    subject: Subject, known: Knowledge, tasks: Sequence[Task], ledger: Ledger, until: float
) -> list[Finding]:
    """Play each cheat in three tasks, and list what lies in their workspaces. until: as of `Subject.play_all`."""
    findings = await _exposed(subject, tasks[:2])
    left_out = 0
    for name, script in CHEATS.items():
        if time.monotonic() > until:
            left_out += 1
            continue
        plays = await subject.play_all(tasks[:3], partial(_cheat, script), label=f"tampering: {name}")
        ledger.enter("tampering", name, plays)
        paid = [play for play in plays if play.solved]
        if paid:
            line = f"a cheat that {name} solves {len(paid)} of {len(plays)} tasks"
            ids = [play.task.id for play in paid]
            ledger.note("tampering", found("tampering", Severity.HIGH, line, ids, last_turn(paid[0])))
    if left_out:
        line = f"{left_out} of {len(CHEATS)} cheats: there was no time for them"
        findings.append(found("not_examined", Severity.INFO, line))
    return findings


def _cheat(script: str, task: Task) -> Voice:
    async def voice(seat: Seat) -> str:
        workspace = seat.request.workspace
        if seat.number == 0 and workspace is not None:
            await _run(workspace, script)
        return "Done."

    return voice


async def _run(workspace: Workspace, script: str) -> str:
    """What a script prints; whether it may do all that it tries is the workspace's business."""
    try:
        return (await workspace.exec(script, seconds=SECONDS)).text()
    except (WorkspaceError, UserError):
        return ""


async def _exposed(subject: Subject, tasks: Sequence[Task]) -> list[Finding]:
    seen: dict[str, str] = {}

    def looking(task: Task) -> Voice:
        async def voice(seat: Seat) -> str:
            if seat.number == 0 and seat.request.workspace is not None:
                seen[task.id] = await _changed(seat.request.workspace)
            return "Done."

        return voice

    plays: list[Play] = []
    for task in tasks:
        plays.append(await subject.play(task, looking(task), label="a look around the workspace"))
    hits = {task: [p for p in text.splitlines() if EXPOSED.search(p)] for task, text in seen.items()}
    hits = {task: paths for task, paths in hits.items() if paths}
    if not hits:
        return []
    paths = sorted({path for found_paths in hits.values() for path in found_paths})
    line = f"the workspaces of {len(hits)} of {len(seen)} tasks hold {', '.join(paths[:4])}"
    return [found("exposed", Severity.HIGH, line, list(hits), "\n".join(paths[:12]))]


async def _changed(workspace: Workspace) -> str:
    """The paths of a workspace that the task brought, one a line."""
    return await _run(workspace, _LISTED)
