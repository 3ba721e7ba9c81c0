"""`agentrl audit`: what is wrong with an environment, seen before money is spent on it."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from agentrl.cli.common import Text, Texts, key_values

if TYPE_CHECKING:
    from agentrl.audit.finding import Report
    from agentrl.recipe.schema import Recipe

FOUND = 1
_TURNS, _CALLS = 64, 256  # limits of a rollout where no recipe says them


def audit_command(
    what: Annotated[str, Argument(help="An environment (installed, or module:attribute), or a recipe.")],
    rest: Annotated[Texts, Argument(metavar="[KEY=VALUE]...", help="For a recipe: keys to change.")] = None,
    args: Annotated[
        Texts, Option("--args", metavar="KEY=VALUE", help="An argument of its class; can be repeated.")
    ] = None,
    source: Annotated[Text, Option("--source", help="For an environment: source of its tasks (env.source).")] = None,
    tools: Annotated[Texts, Option("--tools", metavar="NAME", help="For an environment: a tool to offer.")] = None,
    tasks: Annotated[int, Option("--tasks", min=1, help="Tasks that each attempt plays.")] = 16,
    seconds: Annotated[float, Option("--seconds", min=5, help="Nothing more is begun after so many seconds.")] = 45.0,
    model: Annotated[
        Text, Option("--model", metavar="PATH", help="Let a model play, too: `tiny`, a folder, or a hub name.")
    ] = None,
    fail_on: Annotated[
        Literal["high", "medium", "low", "never"],
        Option("--fail-on", help="Exit with 1 where a finding is as severe as this."),
    ] = "never",
    json_file: Annotated[Text, Option("--json", metavar="FILE", help="Also write the report to this file.")] = None,
    page: Annotated[Text, Option("--page", metavar="FILE", help="Also write a page.")] = None,
) -> None:
    """Play an environment's tasks with policies that need no model, and say what is wrong with it.

    agentrl audit gsm8k --tools calculator

    agentrl audit recipes/terminal.yaml --fail-on high --page audit.html
    """
    from agentrl.cli.try_ import kind_of, played_recipe
    from agentrl.errors import UserError
    from agentrl.eval.show import check_writable, write_json

    for option, file in (("--json", json_file), ("--page", page)):
        if file is not None:
            check_writable(file, option)
    kind = kind_of(what)
    if kind == "tool":
        raise UserError(f"{what!r} is a tool: audit an environment, or a recipe; `agentrl try` calls a tool")
    recipe = played_recipe(what, kind, list(rest or []), key_values(args or [], "--args "), source, tools or [])
    report = _audited(what, _roomy(recipe, kind), tasks, seconds, model, kind)
    if json_file is not None:
        write_json(report, json_file)
    if page is not None:
        from agentrl.audit.page import write_page

        write_page(report, page)
        typer.echo(f"page: {page}")
    if fail_on != "never":
        from agentrl.audit.finding import Severity

        if report.worst().rank <= Severity(fail_on).rank:
            raise typer.Exit(FOUND)


def _roomy(recipe: "Recipe", kind: str) -> "Recipe":
    """The recipe, with room for the longest rollout where an environment alone was named."""
    if kind == "recipe":
        return recipe
    limits = {"max_turns": _TURNS, "max_tool_calls": _CALLS, "max_tool_calls_per_turn": 16}
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})


def _audited(what: str, recipe: "Recipe", tasks: int, seconds: float, model: str | None, kind: str) -> "Report":
    """Audit and show the report; show what is examined, meanwhile."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from agentrl.audit.apart import audit_apart
    from agentrl.audit.show import show
    from agentrl.cli.common import console

    out = console()
    columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("starting")

        def on_stage(name: str) -> None:
            progress.update(bar, description=name)

        report = audit_apart(
            what, recipe, tasks=tasks, seconds=seconds, model=model, measured=kind == "recipe", on_stage=on_stage
        )
    show(out, report)
    return report
