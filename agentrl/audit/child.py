"""The process that an audit runs in: `python -m agentrl.audit.child FOLDER WHAT`.

FOLDER holds `recipe.yaml` and `options.json`. WHAT is `audit`, which appends to `lines.jsonl` where it is, what it
finds, and its report; or `digest`, which writes what the tasks are, for comparison with another process.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from agentrl.jsonable import dumps

LINES, RECIPE, OPTIONS, DIGEST = "lines.jsonl", "recipe.yaml", "options.json", "digest.json"
DIGESTED, OPENED = 64, 8
"""Tasks of a split that are compared between processes, and openings."""
OPENING_SECONDS = 4.0
"""For all openings that are compared."""


def main(arguments: Sequence[str]) -> None:
    """Audit, or write a digest of the tasks: see the docstring of the module."""
    folder, what = Path(arguments[0]), arguments[1]
    from agentrl.errors import UserError
    from agentrl.recipe.load import load_recipe

    recipe = load_recipe(folder / RECIPE)
    if what == "digest":
        (folder / DIGEST).write_text(json.dumps(digest(recipe)))
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
    _say(file, {"digest": digest(recipe), "report": report.json()})


def digest(recipe: Any) -> dict[str, dict[str, list[str]]]:
    """By split, a hash of each of the first tasks (`tasks`), and of the openings of some (`openings`), where these need
    no workspace."""
    from agentrl.containment.event_loop import run
    from agentrl.plugins.registry import make_environment, tasks_of

    env = make_environment(recipe.env)
    splits = {split: tasks_of(env, split) for split in ("train", *env.splits)}
    found = {split: [tasks[i] for i in range(min(DIGESTED, len(tasks)))] for split, tasks in splits.items()}
    made = {} if recipe.workspace is not None or env.uses_workspace else run(_openings(env, found))
    return {
        "tasks": {split: [_hash(task.id, _plain(task)) for task in tasks] for split, tasks in found.items()},
        "openings": made,
    }


async def _openings(env: Any, splits: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """By split, a hash of what the first openings say, as long as that takes little time."""
    from agentrl.audit.subject import text_of
    from agentrl.errors import UserError
    from agentrl.rollout.hooks import opening_of

    until, made = time.monotonic() + OPENING_SECONDS, dict[str, list[str]]()
    for split, tasks in splits.items():
        made[split] = []
        for task in tasks[:OPENED]:
            if (left := until - time.monotonic()) <= 0:
                return made
            try:
                messages = await opening_of(env, task, left, 0)
            except UserError:  # which the audit says
                return made
            made[split].append(_hash(task.id, [(message["role"], text_of(message)) for message in messages]))
    return made


def _hash(name: str, value: object) -> str:
    return f"{name} {hashlib.sha256(dumps(value, default=str, sort_keys=True).encode()).hexdigest()[:16]}"


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
