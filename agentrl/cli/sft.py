"""`agentrl sft`: supervised fine-tuning on demonstrations; `agentrl reward-model`: training of a reward model."""

from typing import Annotated

import typer


def sft_command(
    recipe: Annotated[str, typer.Argument(help="Recipe with an `sft` section: a file, or the name of one that ships.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="Folder to write the model to (default: in the run folder).")
    ] = None,
) -> None:
    """Train a model on demonstrations, with the same loss mask as reinforcement learning."""
    from agentrl.recipe.schema import Recipe
    from agentrl.sft.run import sft

    sft(Recipe.load(recipe, overrides or []), out)


def reward_model_command(
    recipe: Annotated[str, typer.Argument(help="Recipe with a `reward_model` section, which says what to learn from.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
) -> None:
    """Train a reward model on pairs of conversations, for `rewards.model`."""
    from agentrl.recipe.load import recipe_name
    from agentrl.recipe.schema import Recipe
    from agentrl.sft.reward_model import train_reward_model

    train_reward_model(Recipe.load(recipe, overrides or []), name=recipe_name(recipe))
