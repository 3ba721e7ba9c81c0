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
    from agentrl.training.run import resume_run, train

    given = list(arguments or [])
    recipe = given.pop(0) if given and "=" not in given[0].split("/")[-1] else None
    if resume is not None:
        result = resume_run(resume, recipe=recipe, overrides=given)
    elif recipe is None:
        raise UserError("train needs a recipe, such as recipes/gsm8k_tool.yaml, or --resume RUN")
    else:
        result = train(recipe, overrides=given)
    if result.interrupted:
        raise typer.Exit(130)
