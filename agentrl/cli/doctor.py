"""`agentrl doctor`: try each part of a run for real, small, on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Overrides, Text, Texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from agentrl.doctor.check import Finding
    from agentrl.recipe.schema import Recipe

COLOURS = {"ok": "green", "failed": "bold red", "not here": "dim"}


def doctor_command(
    recipe: Annotated[
        str, Argument(help="A recipe: a file, or the name of one that ships.", show_default=True)
    ] = "gsm8k_tool",
    overrides: Overrides = None,
    only: Annotated[Texts, Option("--only", metavar="CHECK", help="Run this check alone; may be given again.")] = None,
    output: Annotated[
        Text,
        Option("--output", metavar="FILE", help="Write a report here. Default: agentrl-doctor.json if a check fails."),
    ] = None,
) -> None:
    """Try each part of a run for real, small, on this machine: devices, kernels, engine, weights, checkpoint."""
    from pathlib import Path

    from agentrl.cli.common import console
    from agentrl.doctor.check import Status
    from agentrl.recipe.load import load_recipe

    given = list(overrides or [])
    if "=" in recipe.split("/")[-1]:
        recipe, given = "gsm8k_tool", [recipe, *given]
    examined = load_recipe(recipe, given)  # before anything heavy is imported
    from agentrl.doctor.examine import refuse
    from agentrl.doctor.report import NAME, write_report

    refuse(examined)

    out = console()
    findings = _examine(out, examined, list(only or []))
    _show(out, findings)
    failed = [finding for finding in findings if finding.status is Status.FAILED]
    if output is not None or failed:
        path = Path(output or NAME)
        write_report(path, examined, findings)
        out.print(f"report: {path}", markup=False)
    if failed:
        raise typer.Exit(1)


def _examine(out: "Console", recipe: "Recipe", only: "Sequence[str]") -> "list[Finding]":
    """Run the checks; show which one runs, or off a terminal a line as each ends."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from agentrl.doctor.check import Check, Finding
    from agentrl.doctor.examine import examine

    columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("starting")

        def began(check: Check) -> None:
            progress.reset(bar, description=f"{check.name}: {check.tries}")

        def ended(finding: Finding) -> None:
            if not out.is_terminal:
                out.print(f"{finding.status:<9}{finding.name:<12}{finding.seconds:6.1f} s", markup=False)

        return examine(recipe, only=only, began=began, ended=ended)


def _show(out: "Console", findings: "Sequence[Finding]") -> None:
    from rich.table import Table
    from rich.text import Text

    from agentrl.secrets import masked_text

    table = Table("check", "tried", "result", "figure, or what is wrong", "what to do", box=None, pad_edge=False)
    for finding in findings:
        result = Text(str(finding.status), style=COLOURS[finding.status])
        table.add_row(finding.name, finding.tries, result, Text(masked_text(finding.figure)), Text(finding.remedy))
    out.print(table)
