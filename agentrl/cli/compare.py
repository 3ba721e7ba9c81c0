"""`agentrl compare`: evaluations of the same tasks against each other."""

from typing import Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Text, Texts


def compare_command(
    names: Annotated[
        list[str],
        Argument(
            metavar="A B... | A1 A2 vs B1 B2",
            help="Run folders (their newest evaluation; RUN@STEP: that after a step), evaluation folders, checkpoints, "
            "models, openai:MODEL. A run alone: before and after its training. With `vs`: seeds of one recipe against "
            "seeds of another.",
        ),
    ],
    split: Annotated[Texts, Option("--split", help="A split; can be repeated (default: those that all have).")] = None,
    difference: Annotated[
        float | None,
        Option(
            "--difference", help="Say how many tasks or seeds would show this difference (default: 0.02, 2 points)."
        ),
    ] = None,
    on: Annotated[
        Text,
        Option(
            "--on",
            metavar="MEASURE",
            help="solved, reward, a reward part, turns, tokens, seconds, cost, tool_errors, a scanner's name (default: "
            "solved, or reward where that alone differs).",
        ),
    ] = None,
    by: Annotated[
        Text,
        Option(
            "--by", metavar="KEY[,KEY]", help="Put the runs in the folders named together by keys of their recipes."
        ),
    ] = None,
    recipe: Annotated[
        Text, Option("--recipe", help="What models are evaluated by (default: the recipe of the first).")
    ] = None,
    limit: Annotated[int, Option("--limit", min=0, help="Tasks that are listed; 0: all.")] = 5,
    json_file: Annotated[Text, Option("--json", metavar="FILE", help="Also write everything to this file.")] = None,
    page: Annotated[
        Text, Option("--page", metavar="FILE", help="Also write a page: conversations side by side.")
    ] = None,
) -> None:
    """Compare evaluations of the same tasks: can the data tell them apart?"""
    from agentrl.eval.show import check_writable, write_json

    for option, file in (("--json", json_file), ("--page", page)):
        if file is not None:
            check_writable(file, option)
    from agentrl.eval.compare import compare
    from agentrl.eval.show_comparison import show

    keys = [key.strip() for key in (by or "").split(",") if key.strip()]
    found = compare(*names, splits=split, recipe=recipe, wanted=difference, on=on, by=keys, say=typer.echo)
    show(found, limit)
    if json_file is not None:
        write_json(found, json_file)
    if page is not None:
        from agentrl.eval.comparison_page import write_page

        write_page(found, page)
        typer.echo(f"page: {page}")
