"""Output of a comparison on the terminal."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.eval.compare import Comparison, Paired, TaskPair, sentences
from agentrl.eval.measure import Measure
from agentrl.eval.paired import Difference
from agentrl.eval.sides import Side
from agentrl.terminal import terminal


def show(comparison: Comparison, limit: int = 5, console: Console | None = None) -> None:
    """Print who is compared, a table with a row for each comparison, and in words what each says. limit: tasks that are
    listed of those gained and of those lost; 0: all. console: default stdout."""
    console = console or terminal()

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for side in comparison.sides:
        line(f"{side.letter}  {side.name}" + (f"  ({side.model})" if side.model else ""))
        if side.called:
            line(f"   {', '.join(one.name for one in side.members)}")
    for note in comparison.notes:
        line(note)
    console.print(_table(comparison.paired))
    for told in comparison.beside:
        line(told)
    sides = {side.letter: side for side in comparison.sides}
    for one in comparison.paired:
        first, *others = sentences(one)
        console.print(f"[bold]{escape(one.split)}, {one.b} against {one.a}[/bold]: {escape(first)}")
        for text in others:
            console.print(text, highlight=False, markup=False)
        for text in (
            *_tasks(words(one.measure)[0], one, sides, limit),
            *_tasks(words(one.measure)[1], one, sides, limit),
        ):
            line(text)


def words(measure: Measure) -> tuple[str, str]:
    """What tasks are called of which the other side has more of a measure, and less."""
    return ("gained", "lost") if measure.share else ("more", "less")


def _table(paired: Sequence[Paired]) -> Table:
    table = Table()
    seeds = any(one.replicated for one in paired)
    up, down = words(paired[0].measure)
    names = ("split", "", "seeds", "tasks", "samples", "of", "mean", "difference", "95 % interval", "p", up, down)
    for name in names:
        if name != "seeds" or seeds:
            table.add_column(name, justify="left" if name in ("split", "", "of") else "right")
    for one in paired:
        a, b = one.results
        counts = [f"{len(one.means[0])}, {len(one.means[1])}"] if seeds else []
        samples = f"{a.samples:,}" if a.samples == b.samples else f"{a.samples:,}, {b.samples:,}"
        means = [sum(those) / len(those) for those in one.means]
        p = "< 0.0001" if one.p < 0.0001 else f"{one.p:.4f}"
        table.add_row(
            escape(one.split), f"{one.a} -> {one.b}", *counts, f"{len(one.pairs):,}", samples, escape(one.measure.name),
            *_figures(one.measure, means, one.found), p, f"{len(one.gained):,}", f"{len(one.lost):,}",
            style="bold" if one.apart else "",
        )  # fmt: skip
        if one.also is not None:
            blank = [""] * (len(counts) + 2)
            table.add_row(
                "", "", *blank, one.also.measure.name, *_figures(one.also.measure, one.also.means, one.also.found)
            )
    tests = dict.fromkeys("t over seeds and tasks" if one.replicated else one.found.test for one in paired)
    holm = f", Holm over {len(paired)}" if len(paired) > 1 else ""
    method = "seeds and tasks" if seeds else "bootstrap of tasks"
    points = "differences of solved in points; " if any(one.measure.share or one.also for one in paired) else ""
    table.caption = f"{points}p: {', '.join(tests)}{holm}; interval: {method}"
    return table


def _figures(measure: Measure, means: Sequence[float], found: Difference) -> tuple[str, str, str]:
    """The means of both sides, their difference, and its interval."""
    told = measure.told
    interval = f"{told(found.low, True)} to {told(found.high, True)}"
    return f"{measure.mean(means[0])} -> {measure.mean(means[1])}", told(found.value, True), interval


def _tasks(what: str, one: Paired, sides: dict[str, Side], limit: int) -> list[str]:
    every = one.gained if what == words(one.measure)[0] else one.lost
    if not every:
        return []
    shown = every[:limit] if limit else every
    lines = [f"{what}: " + ", ".join(_task(pair, one.measure) for pair in shown)]
    if len(every) > len(shown):
        lines[0] += f" and {len(every) - len(shown):,} more"
    lines.append(f"  {look(sides[one.b], one.split, shown[0].task)}")
    return lines


def _task(pair: TaskPair, measure: Measure) -> str:
    (a, n), (b, m) = pair.a, pair.b
    if not measure.share:
        return f"{pair.task} ({measure.told(a / n)} to {measure.told(b / m)})"
    return pair.task if n == m == 1 else f"{pair.task} ({a:g}/{n} to {b:g}/{m})"


def look(side: Side, split: str, task: str) -> str:
    """The command that prints the samples of a task of a side."""
    file = side.files[split]
    words = ["agentrl", "show", str(side.folder), "--split", split, "--step", str(file.step), "--task", task]
    return shlex.join(words)
