"""`agentrl sft`: a warm start on an environment's demonstrations."""

from typing import Annotated

import typer


def sft_command(
    recipe: Annotated[str, typer.Argument(help="A recipe with an `sft` section.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="The folder of the model (default: in the run folder).")
    ] = None,
) -> None:
    """Train a model on demonstrations; the loss mask is the one of reinforcement learning."""
    from agentrl.recipe.schema import Recipe
    from agentrl.sft.run import sft

    sft(Recipe.load(recipe, overrides or []), out)
