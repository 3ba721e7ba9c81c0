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
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="FIELD", help="Accuracy by the values of a field of the tasks' data, too."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="DIR", help="Keep every conversation there, for `agentrl show DIR --split S`."),
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-below", metavar="SPLIT=SHARE", help="Exit with 1 if its accuracy is lower; can be repeated."
        ),
    ] = None,
) -> None:
    """Evaluate a model on held-out tasks."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.recipe.load import load_recipe

    path, run = recipe_of(recipe)
    checked = load_recipe(path, overrides or [])  # before anything heavy is imported
    from agentrl.eval.show import check_writable, least_accuracies, show, too_low, write_json

    least = least_accuracies(fail_below or ())

    if json_file is not None:
        check_writable(json_file)
    from agentrl.eval.evaluate import evaluate

    result = evaluate(checked, model=model or run, splits=split, samples=samples, by=by, keep=keep)
    show(result)
    if json_file is not None:
        write_json(result, json_file)
    if keep is not None:
        typer.echo(f"conversations: {keep} (agentrl show {keep} --split {result.splits[0].split})")
    if lines := too_low(result, least):
        for line in lines:
            typer.echo(line, err=True)
        raise typer.Exit(1)
