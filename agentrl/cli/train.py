"""`agentrl train`: train by a recipe."""

import re
from pathlib import Path
from typing import Annotated

import typer


def train_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe's file or name, then keys to change: train.steps=50.",
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue this run from its last checkpoint.")
    ] = None,
    stored: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN|FILE",
            help="Train on stored rollouts without sampling: those of a run (its recipe unless one is named), or "
            "Parquet files, one a step; can be repeated.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --resume: allow another environment, tools, model or algorithm."),
    ] = False,
) -> None:
    """Train a model by reinforcement learning."""
    try:
        interrupted = _train(list(arguments or []), resume, force, list(stored or []))
    except KeyboardInterrupt as interrupt:  # typer would drop its message
        if message := str(interrupt):
            typer.echo(message, err=True)
        interrupted = True
    if interrupted:
        raise typer.Exit(130)


def _train(given: list[str], resume: str | None, force: bool, stored: list[str]) -> bool:
    """Return whether it was interrupted. given: the recipe, if it is named, and overrides. stored: of --from."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.errors import UserError
    from agentrl.recipe.load import load_recipe, recipe_name

    path = given.pop(0) if given and not re.match(r"[\w.]+=", given[0]) else None
    if resume is not None:
        from agentrl.checkpoint.run_folder import RunFolder

        RunFolder.existing(resume)
        from agentrl.training.run import resume_run

        result = resume_run(resume, recipe=path, overrides=given, force=force, stored=stored)
    elif force:
        raise UserError("--force needs --resume RUN")
    elif path is None and stored and (own := recipe_of(stored[0]))[1] is not None:
        recipe = load_recipe(own[0], given)
        if not any(key.startswith("output=") for key in given):
            recipe = recipe.model_copy(update={"output": None})  # its own is the run's
        from agentrl.training.run import train

        result = train(recipe, name=Path(stored[0]).absolute().name, stored=stored)
    elif path is None:
        raise UserError("train needs a recipe, such as gsm8k_tool (see `agentrl recipes`), or --resume RUN")
    else:
        recipe = load_recipe(path, given)  # before anything heavy is imported
        from agentrl.training.run import train

        result = train(recipe, name=recipe_name(path), stored=stored)
    return result.interrupted
