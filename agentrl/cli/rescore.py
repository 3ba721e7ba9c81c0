"""`agentrl rescore`: the rewards of stored rollouts computed again, and what flips."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from agentrl.cli.common import Text, Texts, console, without_output

if TYPE_CHECKING:
    from agentrl.offline.rescore import Change, Rescored


def rescore_command(
    run: Annotated[str, Argument(metavar="RUN", help="A run folder, or one of an evaluation.")],
    overrides: Annotated[
        Texts, Argument(metavar="[KEY=VALUE]...", help="Keys to change, such as rewards.weights.a=2.")
    ] = None,
    recipe: Annotated[
        Text, Option("--recipe", metavar="FILE", help="A recipe with other rewards, instead of RUN's own.")
    ] = None,
    step: Annotated[int | None, Option("--step", min=0, help="The rollouts of this step (default: all).")] = None,
    split: Annotated[
        Text, Option("--split", metavar="NAME", help="Those of this split: train, or an evaluated one.")
    ] = None,
    output: Annotated[
        Text, Option("--output", metavar="DIR", help="A new folder (default: RUN/rescored-<number>).")
    ] = None,
    replay: Annotated[
        bool, Option("--replay", help="Play every rollout again, so that environment and tools score it anew.")
    ] = False,
    limit: Annotated[int, Option("--limit", min=0, help="Changed samples that are listed; 0: all.")] = 20,
) -> None:
    """Compute the rewards of stored rollouts again, by changed reward functions, weights or graders.

    What functions of the recipe and its reward model give is computed anew; what environment and tools gave is kept,
    unless --replay plays the stored turns again with live calls.
    """
    given, output = without_output(overrides, output)
    from agentrl.offline.rescore import rescore

    found = rescore(run, recipe=recipe, overrides=given, step=step, split=split, output=output, replay=replay)
    out = console()
    for line in found.notes:
        out.print(line, markup=False)
    out.print(_totals(found))
    changed = [one for one in found.samples if one.changed]
    if changed:
        out.print(_samples(changed[: limit or None]))
    if limit and len(changed) > limit:
        out.print(f"{len(changed) - limit} more: --limit 0 lists all", style="dim")
    out.print(_summary(found, changed), markup=False, soft_wrap=True)


def _summary(found: "Rescored", changed: "Sequence[Change]") -> str:
    flips = [one for one in changed if one.flipped and one.before.solved is not None and one.after.solved is not None]
    gained = sum(one.after.solved is True for one in flips)
    lost = sum(one.after.failure is not None and one.before.failure is None for one in found.samples)
    whole = sum(one.after.failure is None and one.before.failure is not None for one in found.samples)
    lines = [
        f"{len(changed)} of {len(found.samples)} samples changed; {gained} solved now, {len(flips) - gained} no more"
        + (f"; {lost} failed now" if lost else "")
        + (f"; {whole} that had failed are whole now" if whole else ""),
        f"computed: {', '.join(found.computed) or 'nothing'}; "
        f"kept as stored, of environment and tools: {', '.join(found.kept) or 'nothing'}",
        f"folder: {found.folder}",
    ]
    return "\n".join(lines)


def _totals(found: "Rescored") -> "object":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="means, without failed samples", title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    both = [[one.before for one in found.samples], [one.after for one in found.samples]]
    whole = [[scores for scores in each if scores.reward is not None] for each in both]
    table.add_row("samples", *(f"{len(each):,}" for each in whole))
    table.add_row("reward", *(_mean(scores.reward or 0.0 for scores in each) for each in whole))
    for part in dict.fromkeys(part for each in whole for scores in each for part in scores.parts):
        each_has = [any(part in scores.parts for scores in each) for each in whole]
        means = [_mean(scores.parts.get(part, 0.0) for scores in each) for each in whole]
        what = f"  {part}" + ("" if part in found.computed else " (kept)")
        table.add_row(escape(what), *(mean if has else "-" for mean, has in zip(means, each_has, strict=True)))
    table.add_row("solved", *(f"{sum(scores.solved is True for scores in each):,}" for each in whole))
    return table


def _mean(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{sum(numbers) / len(numbers):.4f}" if numbers else "-"


def _samples(changed: "Sequence[Change]") -> "object":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="changed samples, flips first", title_justify="left")
    for name in ("split", "step", "task", "sample", "reward", "solved", "parts"):
        table.add_column(name)
    for one in sorted(changed, key=lambda one: not one.flipped):
        before, after = one.before, one.after
        parts = [
            f"{name} {_number(before.parts.get(name))} -> {_number(after.parts.get(name))}"
            for name in {**before.parts, **after.parts}
            if before.parts.get(name) != after.parts.get(name)
        ]
        told = after.failure if after.failure is not None else ", ".join(parts)
        solved = f"{_word(before.solved)} -> {_word(after.solved)}" if one.flipped else _word(after.solved)
        reward = f"{_number(before.reward)} -> {_number(after.reward)}"
        cells = (one.file.split, str(one.file.step), one.task, str(one.sample), reward, solved, told)
        table.add_row(*map(escape, cells), style="bold" if one.flipped else None)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _word(solved: bool | None) -> str:
    return {True: "yes", False: "no", None: "failed"}[solved]
