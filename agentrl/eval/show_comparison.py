"""Output of a comparison on the terminal."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.eval.compare import Comparison, Paired, Side, TaskPair, points, sentences
from agentrl.terminal import terminal


def show(comparison: Comparison, limit: int = 5, console: Console | None = None) -> None:
    """Print who is compared, a table with a row for each comparison, and in words what each says. limit: tasks that are
    listed of those gained and of those lost; 0: all. console: default stdout."""
    console = console or terminal()
    for side in comparison.sides:
        told = f"  ({side.model})" if side.model else ""
        console.print(f"{side.letter}  {side.name}{told}", highlight=False, markup=False, soft_wrap=True)
    for note in comparison.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    console.print(_table(comparison.paired))
    sides = {side.letter: side for side in comparison.sides}
    for one in comparison.paired:
        console.print(f"[bold]{escape(one.split)}, {one.b} against {one.a}[/bold]: {escape(next(sentences(one)))}")
        for line in list(sentences(one))[1:]:
            console.print(line, highlight=False, markup=False)
        if one.alone:
            told = ", ".join(f"{why}: {number:,}" for why, number in one.alone.items())
            console.print(f"Tasks without a pair: {told}.", highlight=False, markup=False)
        for line in (*_tasks("gained", one, sides, limit), *_tasks("lost", one, sides, limit)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(paired: Sequence[Paired]) -> Table:
    table = Table()
    names = ("split", "", "tasks", "samples", "accuracy", "difference", "95 % interval", "p", "gained", "lost")
    for name in names:
        table.add_column(name, justify="left" if name in ("split", "") else "right")
    for one in paired:
        a, b = one.results
        samples = f"{a.samples:,}" if a.samples == b.samples else f"{a.samples:,}, {b.samples:,}"
        accuracy, p = f"{a.accuracy:.1%} -> {b.accuracy:.1%}", "< 0.0001" if one.p < 0.0001 else f"{one.p:.4f}"
        table.add_row(
            escape(one.split), f"{one.a} -> {one.b}", f"{len(one.pairs):,}", samples, accuracy,
            points(one.found.value), f"{points(one.found.low)} to {points(one.found.high)}", p,
            f"{len(one.gained):,}", f"{len(one.lost):,}", style="bold" if one.apart else "",
        )  # fmt: skip
    tests = dict.fromkeys(one.found.test for one in paired)
    holm = ", Holm" if len({one.b for one in paired}) > 1 else ""
    table.caption = f"differences in points; p: {', '.join(tests)}{holm}; interval: bootstrap of tasks"
    return table


def _tasks(what: str, one: Paired, sides: dict[str, Side], limit: int) -> list[str]:
    every = one.gained if what == "gained" else one.lost
    if not every:
        return []
    shown = every[:limit] if limit else every
    lines = [f"{what}: " + ", ".join(_task(pair) for pair in shown)]
    if len(every) > len(shown):
        lines[0] += f" and {len(every) - len(shown):,} more"
    lines.append(f"  {look(sides[one.b], one.split, shown[0].task)}")
    return lines


def _task(pair: TaskPair) -> str:
    (a, n), (b, m) = pair.a, pair.b
    return pair.task if n == m == 1 else f"{pair.task} ({a}/{n} to {b}/{m})"


def look(side: Side, split: str, task: str) -> str:
    """The command that prints the samples of a task of a side."""
    file = side.files[split]
    words = ["agentrl", "show", str(side.folder), "--split", split, "--step", str(file.step), "--task", task]
    return shlex.join(words)
