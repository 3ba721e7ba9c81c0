"""`agentrl compare`: evaluations of the same tasks against each other."""

from typing import Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Text, Texts


def compare_command(
    names: Annotated[
        list[str],
        Argument(
            metavar="A B...",
            help="Run folders (their newest evaluation; RUN@STEP: that after a step), evaluation folders, checkpoints, "
            "models, openai:MODEL. A run alone: before and after its training.",
        ),
    ],
    split: Annotated[Texts, Option("--split", help="A split; can be repeated (default: those that all have).")] = None,
    difference: Annotated[
        float, Option("--difference", help="Say how many tasks would show this difference (0.02: 2 points).")
    ] = 0.02,
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

    found = compare(*names, splits=split, recipe=recipe, wanted=difference, say=typer.echo)
    show(found, limit)
    if json_file is not None:
        write_json(found, json_file)
    if page is not None:
        from agentrl.eval.comparison_page import write_page

        write_page(found, page)
        typer.echo(f"page: {page}")
