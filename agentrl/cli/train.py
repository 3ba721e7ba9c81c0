"""`agentrl train`: train by a recipe."""

import logging
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from agentrl.cli.common import ResumedRun, Texts, importing, recipe_and_keys, until_interrupted


def train_command(
    arguments: Annotated[
        Texts,
        Argument(
            metavar="[RECIPE] [KEY=VALUE]...", help="A recipe's file or name, then keys to change: train.steps=50."
        ),
    ] = None,
    resume: ResumedRun = None,
    stored: Annotated[
        Texts,
        Option(
            "--from",
            metavar="RUN|FILE",
            help="Train on stored rollouts without sampling: those of a run (its recipe unless one is named), or "
            "Parquet files, one a step; can be repeated.",
        ),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="With --resume: allow another environment, tools, model or algorithm.")
    ] = False,
    verbose: Annotated[
        bool,
        Option("--verbose", "-v", help="Say more at the start: how messages become tokens, how the trainer computes."),
    ] = False,
) -> None:
    """Train a model by reinforcement learning."""
    path, given = recipe_and_keys(arguments)
    if verbose:
        logging.getLogger("agentrl").setLevel(logging.INFO)
    until_interrupted(lambda: _train(path, given, resume, force, list(stored or [])))


def _train(path: str | None, given: list[str], resume: str | None, force: bool, stored: list[str]) -> bool:
    """Whether it was interrupted. given: overrides. stored: of --from."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.errors import UserError
    from agentrl.recipe.load import load_recipe, recipe_name

    if resume is not None:
        from agentrl.checkpoint.run_folder import RunFolder
        from agentrl.remote import is_remote

        if not is_remote(resume):
            RunFolder.existing(resume)
        with importing():
            from agentrl.training.run import resume_run

        result = resume_run(resume, recipe=path, overrides=given, force=force, stored=stored)
    elif force:
        raise UserError("--force needs --resume RUN")
    elif path is None and stored and (own := recipe_of(stored[0]))[1] is not None:
        recipe = load_recipe(own[0], given)
        if not any(key.startswith("output=") for key in given):
            recipe = recipe.changed(output=None)  # its own is the run's
        with importing():
            from agentrl.fine_tuning.start import train

        result = train(recipe, name=Path(stored[0]).absolute().name, stored=stored)
    elif path is None and stored:
        from agentrl.rollout.stored import training_files

        training_files(stored[:1])
        raise UserError(f"--from {stored[0]}: there is no recipe with it: name one too, such as gsm8k_tool")
    elif path is None:
        raise UserError("train needs a recipe, such as gsm8k_tool (see `agentrl recipes`), or --resume RUN")
    else:
        recipe = load_recipe(path, given)  # before anything heavy is imported
        with importing():
            from agentrl.fine_tuning.start import train

        result = train(recipe, name=recipe_name(path), stored=stored)
    return result.interrupted
