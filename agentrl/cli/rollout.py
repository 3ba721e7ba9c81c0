"""`agentrl rollout`: sample and store, without training."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import SUBJECT, OtherModel, Overrides, Text, recipe_and_model


def rollout_command(
    what: Annotated[Text, Argument(metavar="[RECIPE]", help=SUBJECT)] = None,
    overrides: Overrides = None,
    steps: Annotated[
        int, Option("--steps", min=1, help="Times that rollout.tasks tasks are drawn, rollout.n samples each.")
    ] = 1,
    split: Annotated[
        Text, Option("--split", metavar="NAME", help="The split whose tasks are drawn (default: train).")
    ] = None,
    model: OtherModel = None,
    resume: Annotated[
        Text, Option("--resume", metavar="DIR", help="Go on with rollouts in this folder, up to --steps.")
    ] = None,
) -> None:
    """Sample rollouts and store them, without training: for `agentrl train --from`, `show` and `rescore`."""
    from agentrl.errors import UserError

    if resume is not None:
        if what is not None or model is not None or split is not None:
            raise UserError("--resume goes on with the folder's own recipe, split and model: name nothing else")
        from agentrl.offline.sample import resume_rollouts

        result = resume_rollouts(resume, steps=steps)
    elif what is None:
        raise UserError("rollout needs a recipe, such as gsm8k_tool (see `agentrl recipes`), or --resume DIR")
    else:
        recipe, named = recipe_and_model(what, overrides or [], model)
        is_run = (Path(what) / "recipe.yaml").is_file()
        if is_run and not any(key.startswith("output=") for key in overrides or ()):
            recipe = recipe.changed(output=None)  # its own is the run's
        from agentrl.offline.sample import sample_rollouts
        from agentrl.recipe.load import recipe_name

        name = f"{Path(what).absolute().name if is_run else recipe_name(what)}-rollouts"
        result = sample_rollouts(recipe, steps=steps, split=split or "train", model=named, name=name)
    typer.echo(f"folder: {result.folder} ({result.steps} of {steps} steps)")
    if result.interrupted:
        typer.echo(f"Interrupted; go on with: agentrl rollout --resume {result.folder} --steps {steps}", err=True)
        raise typer.Exit(130)
