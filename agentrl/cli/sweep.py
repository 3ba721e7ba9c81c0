"""`agentrl sweep`: runs of a recipe over values of its keys, in one folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Text, Texts, console, recipe_and_keys, without_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from agentrl.plugins.types import Json
    from agentrl.training.sweep import Sweep

_SHOWN = 60  # runs of the table


def sweep_command(
    arguments: Annotated[
        Texts,
        Argument(
            metavar="[RECIPE] [KEY=VALUES]...",
            help="A recipe's file or name, then keys: train.lr=1e-4,3e-4 (values), train.lr=1e-5..1e-3 (a range), "
            "train.seed=0,1,2 (each configuration is run with all), train.steps=50 (one value).",
        ),
    ] = None,
    output: Annotated[Text, Option("--output", metavar="DIR", help="Its folder (default: sweeps/RECIPE-001).")] = None,
    resume: Annotated[Text, Option("--resume", metavar="DIR", help="Go on with this sweep.")] = None,
    parallel: Annotated[int, Option("--parallel", min=1, help="Runs at once.")] = 1,
    drawn: Annotated[int, Option("--random", min=0, help="So many configurations at random.")] = 0,
    proposed: Annotated[int, Option("--optuna", min=0, help="So many configurations that Optuna proposes.")] = 0,
    halve: Annotated[
        Text,
        Option(
            "--halve",
            metavar="STEP[,STEP]",
            help="After these steps, drop the lower half, as far as it is told apart from the best.",
        ),
    ] = None,
    budget: Annotated[
        Text, Option("--budget", metavar="600s|90m|8h|2000steps", help="Stop when this is spent; --resume goes on.")
    ] = None,
) -> None:
    """Train a recipe with several values of its keys, and compare what came out."""
    from agentrl.errors import UserError
    from agentrl.training.sweep import deadline

    until, most_steps = deadline(budget)
    path, given = recipe_and_keys(arguments)
    if resume is not None:
        if path is not None or given or output or drawn or proposed or halve:
            raise UserError("--resume goes on with the sweep as it was begun: it takes --parallel and --budget alone")
        from agentrl.training.sweep import Sweep

        sweep = Sweep.existing(Path(resume), typer.echo)
    else:
        given, folder = without_output(given, output)
        sweep = _begun(path, given, folder, drawn, proposed, halve or "")
    _run(sweep, parallel, until, most_steps)


def _begun(path: str | None, given: list[str], output: str | None, drawn: int, proposed: int, halve: str) -> "Sweep":
    from agentrl.checkpoint.run_folder import RunFolder
    from agentrl.errors import UserError
    from agentrl.recipe.load import load_recipe, recipe_name
    from agentrl.training.axes import split_keys
    from agentrl.training.sweep import Sweep, plan

    if path is None:
        raise UserError("sweep needs a recipe, such as gsm8k_tool (see `agentrl recipes`), or --resume DIR")
    fixed, axes = split_keys(given)
    recipe = load_recipe(path, fixed).changed(output=None)
    try:
        rounds = [int(step) for step in halve.split(",") if step.strip()]
    except ValueError as error:
        raise UserError(f"--halve {halve}: expected steps, such as 20,40") from error
    made = plan(recipe, axes, drawn, proposed, rounds)
    folder = Path(output) if output is not None else RunFolder.within(Path("sweeps"), recipe_name(path)).path
    return Sweep.new(folder, recipe, made, typer.echo)


def _run(sweep: "Sweep", parallel: int, until: float, most_steps: int | None) -> None:
    import os
    import shlex

    from agentrl.recipe.load import load_recipe
    from agentrl.training.sweep import BASE
    from agentrl.training.trials import Processes, gpus

    plan, base = sweep.plan, sweep.folder / BASE
    recipe = load_recipe(base)
    share = max(1, (os.cpu_count() or 1) // parallel)
    more = (f"train.threads={share}",) if parallel > 1 and not recipe.train.threads else ()
    count = plan.proposed or len(plan.configurations)
    typer.echo(f"{sweep.folder}: {count} configurations, {count * max(1, len(plan.seeds))} runs of {plan.steps} steps")
    devices = gpus() if parallel > 1 and not recipe.cluster.address else ()  # a Ray cluster deals its own
    whole = sweep.run(Processes(base, parallel, more, typer.echo, until, devices), most_steps)
    console().print(_table(sweep))
    again = f"agentrl sweep --resume {shlex.quote(str(sweep.folder))}"
    if not whole:
        typer.echo(f"The budget is spent; go on with: {again}")
        return
    left = [row for row in sweep.rows() if row["state"] in ("begun", "not begun")]
    if left:
        typer.echo(f"{len(left)} runs failed; their last lines are above; to try them again: {again}")
    _compare(sweep)
    if left:
        raise typer.Exit(1)


def _compare(sweep: "Sweep") -> None:
    """Print how the configurations compare, and the command that prints it again."""
    import shlex

    from agentrl.eval.show_comparison import show
    from agentrl.eval.sides import AGAINST, LETTERS
    from agentrl.training.sweep import TRIALS

    if (found := sweep.comparison()) is None:
        return
    show(found)
    if sweep.plan.keys:
        words = [str(sweep.folder / TRIALS), "--by", ",".join(sweep.plan.keys)]
        if len(sweep.plan.configurations) > len(LETTERS):
            sides = ([str(one.folder) for one in side.members] for side in found.sides)
            words = [word for side in sides for word in (*side, AGAINST)][:-1]
        typer.echo(f"again, or by another measure (--on): {shlex.join(['agentrl', 'compare', *words])}")


def _table(sweep: "Sweep") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    rows = sweep.rows()
    every = dict.fromkeys(key for row in rows for key in row)
    bounds = {bound for name in every for bound in _bounds(name)}
    names = [name for name in every if name not in bounds]
    table = Table()
    for name in names:
        table.add_column(escape(name))
    for row in rows[:_SHOWN]:
        table.add_row(*(escape(_cell(row, name)) for name in names))
    table.caption = f"{sweep.folder / 'table.csv'}" + (f", {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")
    return table


def _bounds(name: str) -> tuple[str, str]:
    """The columns of a figure's interval, where it has one."""
    stem = name.removesuffix("/mean")
    return f"{stem}_low", f"{stem}_high"


def _cell(row: "Mapping[str, Json]", name: str) -> str:
    """A figure of a run with its interval, or another of its values."""
    from agentrl.eval.result import Accuracy, MeanReward

    value, low, high = row.get(name, ""), *map(row.get, _bounds(name))
    if low is None or high is None:
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return str((Accuracy if name.endswith("accuracy") else MeanReward)(value, low, high))
