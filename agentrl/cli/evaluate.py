"""`agentrl eval`: measure accuracy on held-out tasks."""

from typing import Annotated

import typer


def eval_command(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe's file or name, or a run folder: its recipe and best checkpoint."),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="A model, checkpoint or run folder, instead of the recipe's."),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option("--split", help="A held-out split to evaluate; can be repeated (default: all).")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Samples per task, for pass@k.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Evaluate a model on held-out tasks."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.recipe.load import load_recipe

    path, run = recipe_of(recipe)
    checked = load_recipe(path, overrides or [])  # before anything heavy is imported
    from agentrl.eval.show import check_writable, show, write_json

    if json_file is not None:
        check_writable(json_file)
    from agentrl.eval.evaluate import evaluate

    result = evaluate(checked, model=model or run, splits=split, samples=samples)
    show(result)
    if json_file is not None:
        write_json(result, json_file)
