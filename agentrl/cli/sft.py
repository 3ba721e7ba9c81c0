"""`agentrl sft`: supervised fine-tuning on an environment's demonstrations."""

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
