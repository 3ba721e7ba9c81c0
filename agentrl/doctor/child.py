"""The process that checks run in: `python -m agentrl.doctor.child FOLDER CHECKS NAME...`.

FOLDER holds `recipe.yaml`. Each check writes a line to `findings.jsonl` as it begins and another as it ends. After one
that failed the process ends: what comes next should not suffer from what that one left behind.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.plugins.types import Json

FINDINGS, RECIPE = "findings.jsonl", "recipe.yaml"


def main(arguments: Sequence[str]) -> None:
    """Run the named checks, and write their findings: see the docstring of the module."""
    folder, place, *names = arguments
    signal.signal(signal.SIGTERM, _end)
    from agentrl.doctor.check import Check, Status, perform
    from agentrl.doctor.subject import Subject
    from agentrl.plugins.registry import load_path
    from agentrl.recipe.load import load_recipe

    checks: dict[str, Check] = {check.name: check for check in load_path(place, "the checks")}
    subject = Subject(load_recipe(Path(folder) / RECIPE), Path(folder))
    for name in names:
        say(Path(folder), {"began": name, "at": os.fstat(1).st_size})
        finding = perform(checks[name], subject)
        say(Path(folder), finding.written())
        if finding.status is Status.FAILED:
            break
    else:
        subject.close()
    sys.stdout.flush()
    os._exit(0)  # whatever threads or processes a part has left


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def say(folder: Path, line: dict[str, Json]) -> None:
    """Append a line, as one write."""
    with (folder / FINDINGS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
