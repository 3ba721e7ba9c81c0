"""Output of evaluation results: a table on the terminal, and a JSON file."""

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.errors import UserError
from agentrl.eval.evaluate import Evaluation
from agentrl.eval.result import SplitResult
from agentrl.terminal import terminal


def show(evaluation: Evaluation, console: Console | None = None) -> None:
    """Print the notes and a table with one column per split. console: default stdout."""
    console = console or terminal()
    for note in evaluation.notes:
        console.print(note, highlight=False, markup=False)
    table = Table(title=escape(f"{evaluation.model} on {evaluation.env}"), title_justify="left")
    table.add_column("held-out split")
    for result in evaluation.splits:
        table.add_column(escape(result.split), justify="right")
    cells = [dict(_cells(result)) for result in evaluation.splits]
    for name in dict.fromkeys(name for column in cells for name in column):
        table.add_row(name, *(column.get(name, "") for column in cells))
    console.print(table)


def _cells(r: SplitResult) -> Iterator[tuple[str, str]]:
    yield "accuracy", f"[bold]{r.accuracy:.1%}[/bold]"
    yield "95 % interval", f"{r.low:.1%} to {r.high:.1%}"
    for k, value in r.pass_at.items():
        if k > 1:
            yield f"pass@{k}", f"{value:.1%}"
    yield "tasks", f"{r.tasks:,}"
    yield "samples", f"{r.samples:,}"
    yield "reward", f"{r.reward:.3f}"
    yield "turns per sample", f"{r.turns:.2f}"
    yield "tool calls per sample", f"{r.tool_calls:.2f}"
    yield "tool errors", f"{r.tool_errors:.1%}"
    yield "tokens per sample", f"{r.tokens:.1f}"
    for reason, count in sorted(r.finish.items()):
        yield f"ended by {reason}", f"{count / r.samples:.1%}"
    if r.failed:
        yield "failed, not counted above", f"[yellow]{r.failed:,}[/yellow]"


def check_writable(path: str) -> None:
    """Check before the evaluation that `write_json` can write to `path`. Raises UserError if not."""
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        what = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise UserError(f"--json {path}: cannot be written: {what}")


def write_json(evaluation: Evaluation, path: str) -> None:
    """Write `evaluation.json()` to `path`. Raises UserError if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(evaluation.json(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written: {error.strerror}") from error
