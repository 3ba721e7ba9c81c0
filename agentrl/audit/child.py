"""The process that an audit runs in: `python -m agentrl.audit.child FOLDER WHAT`.

FOLDER holds `recipe.yaml` and `options.json`. WHAT is `audit`, which appends to `lines.jsonl` where it is, what it
finds, and its report; or `digest`, which writes what the tasks are, for comparison with another process.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from agentrl.jsonable import dumps

LINES, RECIPE, OPTIONS, DIGEST = "lines.jsonl", "recipe.yaml", "options.json", "digest.json"
DIGESTED = 64
"""Tasks of a split that are compared between processes."""


def main(arguments: Sequence[str]) -> None:
    """Audit, or write a digest of the tasks: see the docstring of the module."""
    folder, what = Path(arguments[0]), arguments[1]
    from agentrl.errors import UserError
    from agentrl.plugins.registry import make_environment
    from agentrl.recipe.load import load_recipe

    recipe = load_recipe(folder / RECIPE)
    if what == "digest":
        (folder / DIGEST).write_text(json.dumps(digest(make_environment(recipe.env))))
        sys.stdout.flush()
        os._exit(0)
    with (folder / LINES).open("a", encoding="utf-8") as file:
        try:
            _audit(folder, recipe, file)
        except UserError as error:
            _say(file, {"error": str(error)})
    sys.stdout.flush()
    os._exit(0)  # whatever threads or processes the environment has left


def _audit(folder: Path, recipe: Any, file: IO[str]) -> None:
    from agentrl.audit.run import Options, Told, audit
    from agentrl.containment.event_loop import run
    from agentrl.plugins.registry import make_environment

    given = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
    told = Told(
        lambda where: _say(file, {"at": where}),
        lambda name: _say(file, {"stage": name}),
        lambda finding: _say(file, {"finding": finding.written()}),
    )
    measure = None
    if given["measured"]:
        from agentrl.audit.model import measure_of

        told.stage("loading the tokenizer")
        measure = measure_of(recipe)

    async def work() -> Any:
        options = Options(given["tasks"], given["seconds"])
        report = await audit(given["name"], recipe, lambda: make_environment(recipe.env), options, told, measure)
        if given["model"] is not None:
            from agentrl.audit.model import model_findings

            report.findings += await model_findings(recipe, given["model"], report, told, given["tasks"])
            report.sort()
        return report

    report = run(work())
    _say(file, {"digest": digest(make_environment(recipe.env)), "report": report.json()})


def digest(env: Any) -> dict[str, list[str]]:
    """By split, a hash of each of the first tasks."""
    from agentrl.plugins.registry import tasks_of

    found = {}
    for split in ("train", *env.splits):
        tasks = tasks_of(env, split)
        some = (tasks[index] for index in range(min(DIGESTED, len(tasks))))
        found[split] = [
            f"{task.id} {hashlib.sha256(dumps(_plain(task), default=str, sort_keys=True).encode()).hexdigest()[:16]}"
            for task in some
        ]
    return found


def _plain(task: Any) -> Mapping[str, Any]:
    return {"id": task.id, "data": dict(task.data), "tools": task.tools, "create": dict(task.create_kwargs)}


def _say(file: IO[str], line: Mapping[str, object]) -> None:
    """Append a line, as one write."""
    file.write(json.dumps(line, default=str) + "\n")
    file.flush()


def options_of(name: str, tasks: int, seconds: float, model: str | None, measured: bool) -> dict[str, Any]:
    """The content of `options.json`."""
    return {"name": name, "tasks": tasks, "seconds": seconds, "model": model, "measured": measured}


if __name__ == "__main__":
    main(sys.argv[1:])
