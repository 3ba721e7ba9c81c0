"""Output of evaluation results: a table on the terminal, and a JSON file."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.errors import UserError
from agentrl.eval.result import SplitResult
from agentrl.jsonable import dumps
from agentrl.plugins.types import Json
from agentrl.terminal import terminal

if TYPE_CHECKING:
    from agentrl.eval.evaluate import Evaluation

SHOWN = 30
"""Values of a field that are shown."""


def show(evaluation: "Evaluation", console: Console | None = None) -> None:
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
    for result in evaluation.splits:
        if result.by:
            console.print(_parts(result))


def _parts(result: SplitResult) -> Table:
    table = Table(title=escape(f"{result.split}, the lowest first"), title_justify="left")
    for name in ("value", "tasks", "samples", "accuracy", "95 % interval", "reward", "its interval"):
        table.add_column(name, justify="left" if name == "value" else "right")
    for value, part in list(result.by.items())[:SHOWN]:
        low, high = part.accuracy.low or 0.0, part.accuracy.high or 0.0
        reward = (f"{part.reward[0]:.3f}", f"{part.reward[1]:.3f} to {part.reward[2]:.3f}")
        counts = (f"{part.tasks:,}", f"{part.samples:,}")
        figures = (*counts, f"{part.accuracy.value:.1%}", f"{low:.1%} to {high:.1%}", *reward)
        table.add_row(escape(value), *figures)
    if len(result.by) > SHOWN:
        table.caption = f"and {len(result.by) - SHOWN} more: --json has all"
    return table


def _cells(r: SplitResult) -> Iterator[tuple[str, str]]:
    yield "accuracy", f"[bold]{r.accuracy:.1%}[/bold]"
    yield "95 % interval", f"{r.low:.1%} to {r.high:.1%}"
    for k, value in r.pass_at.items():
        if k > 1:
            yield f"pass@{k} (one of {k})", f"{value:.1%}"
            yield f"pass^{k} (all of {k})", f"{r.pass_all[k]:.1%}"
    yield "tasks", f"{r.tasks:,}"
    yield "samples", f"{r.samples:,}"
    yield "reward", f"{r.reward:.3f}"
    yield "  95 % interval", f"{r.reward_low:.3f} to {r.reward_high:.3f}"
    if len(r.rewards) > 1:
        for name, value in r.rewards.items():
            yield escape(f"  {name}"), f"{value:.3f}"
    yield "turns per sample", f"{r.turns:.2f}"
    yield "tool calls per sample", f"{r.tool_calls:.2f}"
    yield "tool errors", f"{r.tool_errors:.1%}"
    if len(r.tools) > 1:
        for name, tool in r.tools.items():
            yield escape(f"  {name}"), f"{tool.errors:,} of {tool.calls:,}"
    yield "tokens per sample", f"{r.tokens:.1f}"
    yield "seconds per sample", f"{r.seconds:.2f}"
    if r.cost is not None:
        yield "cost", f"{r.cost:.4f}"
    for reason, count in sorted(r.finish.items()):
        yield f"ended by {reason}", f"{count / r.samples:.1%}"
    if r.failed:
        yield "failed, not counted above", f"[yellow]{r.failed:,}[/yellow]"


class Told(Protocol):
    """What is written as JSON."""

    def json(self) -> dict[str, Json]:
        """JSON values."""
        ...


def check_writable(path: str, option: str = "--json") -> None:
    """Check before the work that a file can be written to `path`. option: begins the UserError."""
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        what = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise UserError(f"{option} {path}: cannot be written: {what}")


def write_json(found: Told, path: str) -> None:
    """Write `found.json()` to `path`. Raises UserError if the file cannot be written."""
    try:
        Path(path).write_text(dumps(found.json(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written: {error.strerror}") from error


def least_accuracies(wanted: Sequence[str]) -> dict[str, float]:
    """Split -> accuracy from texts such as `test=0.9`. Raises UserError."""
    found = {}
    for text in wanted:
        split, _, share = text.partition("=")
        try:
            found[split] = float(share)
        except ValueError:
            found[split] = math.nan
        if not split or not 0 <= found[split] <= 1:
            raise UserError(f"--fail-below {text}: expected a split and a share from 0 to 1, such as test=0.9")
    return found


def too_low(evaluation: "Evaluation", least: Mapping[str, float]) -> list[str]:
    """A line for each split whose accuracy is below `least`; its splits are those of the evaluation."""
    found = {result.split: result.accuracy for result in evaluation.splits}
    return [
        f"{split}: accuracy {found[split]:.1%} is below {share:.1%} (--fail-below)"
        for split, share in least.items()
        if found[split] < share
    ]
