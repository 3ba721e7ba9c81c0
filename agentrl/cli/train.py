"""`agentrl train`: learn from a recipe."""

from typing import Annotated

import typer


def train_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, then keys to change: train.steps=50"),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with this run from its last checkpoint.")
    ] = None,
) -> None:
    """Train a model by reinforcement learning, as a recipe says."""
    from agentrl.errors import UserError
    from agentrl.recipe.load import load_recipe, recipe_name

    given = list(arguments or [])
    path = given.pop(0) if given and "=" not in given[0].split("/")[-1] else None
    if resume is not None:
        from agentrl.training.run_folder import RunFolder

        RunFolder.existing(resume)
        from agentrl.training.run import resume_run

        result = resume_run(resume, recipe=path, overrides=given)
    elif path is None:
        raise UserError("train needs a recipe, such as recipes/gsm8k_tool.yaml, or --resume RUN")
    else:
        recipe = load_recipe(path, given)  # before anything heavy is imported
        from agentrl.training.run import train

        result = train(recipe, name=recipe_name(path))
    if result.interrupted:
        raise typer.Exit(130)
