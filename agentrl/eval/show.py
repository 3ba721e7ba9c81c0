"""Evaluation results for people and for programs."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.errors import UserError
from agentrl.eval.evaluate import Evaluation
from agentrl.eval.result import SplitResult

COLUMNS = ("split", "tasks", "accuracy", "95 % interval", "pass@k", "turns", "tool calls", "tool errors", "finish")


def show(evaluation: Evaluation, console: Console | None = None) -> None:
    """A table, a line a split."""
    console = console or Console()
    table = Table(title=f"{evaluation.model} on {evaluation.env}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("split", "pass@k", "finish") else "right")
    for result in evaluation.splits:
        table.add_row(*_row(result))
    console.print(table)
    for result in evaluation.splits:
        if result.failed:
            console.print(f"{result.split}: {result.failed} samples failed and count in no figure", style="yellow")


def _row(r: SplitResult) -> Sequence[str]:
    tasks = f"{r.tasks}" if r.samples == r.tasks else f"{r.tasks} x {r.samples / max(1, r.tasks):.0f}"
    return (
        r.split,
        tasks,
        f"{r.accuracy:.1%}",
        f"{r.low:.1%} to {r.high:.1%}",
        "  ".join(f"@{k} {value:.1%}" for k, value in r.pass_at.items()),
        f"{r.turns:.2f}",
        f"{r.tool_calls:.2f}",
        f"{r.tool_errors:.1%}",
        "  ".join(f"{reason} {count}" for reason, count in sorted(r.finish.items(), key=lambda item: -item[1])),
    )


def write_json(evaluation: Evaluation, path: str) -> None:
    """Raises UserError when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(evaluation.json(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written: {error.strerror}") from error
