"""`agentrl sft`: supervised fine-tuning; `agentrl reward-model`: training of a reward model."""

import re
from typing import Annotated

import typer


def sft_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="Recipe with an `sft` section, a file or the name of one that ships, then keys to change: "
            "sft.source=mine.jsonl.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="Folder to copy the model to (default: it stays in the run folder).")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue this run from its last checkpoint.")
    ] = None,
) -> None:
    """Train a model on conversations: files, a run's rollouts, or demonstrations. The loss mask is that of RL."""
    from agentrl.errors import UserError
    from agentrl.recipe.schema import Recipe

    given = list(arguments or [])
    path = given.pop(0) if given and not re.match(r"[\w.]+=", given[0]) else None
    try:
        if resume is not None:
            if path is not None:
                raise UserError("--resume goes on with the run's own recipe: name keys to change alone")
            from agentrl.sft.run import resume_sft

            result = resume_sft(resume, overrides=given, output=out)
        elif path is None:
            raise UserError("sft needs a recipe, such as tiny_warmstart (see `agentrl recipes`), or --resume RUN")
        else:
            recipe = Recipe.load(path, given)  # before anything heavy is imported
            from agentrl.sft.run import sft

            result = sft(recipe, out)
    except KeyboardInterrupt as interrupt:  # typer would drop its message
        if message := str(interrupt):
            typer.echo(message, err=True)
        raise typer.Exit(130) from None
    if result.interrupted:
        raise typer.Exit(130)


def reward_model_command(
    recipe: Annotated[str, typer.Argument(help="Recipe with a `reward_model` section, which says what to learn from.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
) -> None:
    """Train a reward model on pairs of conversations, for `rewards.model`."""
    from agentrl.recipe.load import recipe_name
    from agentrl.recipe.schema import Recipe
    from agentrl.sft.reward_model import train_reward_model

    train_reward_model(Recipe.load(recipe, overrides or []), name=recipe_name(recipe))
