"""`agentrl sft`: supervised fine-tuning; `agentrl reward-model`: training of a reward model."""

from typing import Annotated

from typer import Argument, Option

from agentrl.cli.common import Overrides, ResumedRun, Text, Texts, recipe_and_keys, until_interrupted


def sft_command(
    arguments: Annotated[
        Texts,
        Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="Recipe with an `sft` section, a file or the name of one that ships, then keys to change: "
            "sft.source=mine.jsonl.",
        ),
    ] = None,
    out: Annotated[
        Text, Option("--out", help="Folder to copy the model to (default: it stays in the run folder).")
    ] = None,
    resume: ResumedRun = None,
) -> None:
    """Train a model on conversations: files, a run's rollouts, or demonstrations. The loss mask is that of RL."""
    path, given = recipe_and_keys(arguments)
    until_interrupted(lambda: _sft(path, given, out, resume))


def _sft(path: str | None, given: list[str], out: str | None, resume: str | None) -> bool:
    """Whether it was interrupted. given: overrides."""
    from agentrl.checkpoint.run_folder import check_export
    from agentrl.errors import UserError
    from agentrl.recipe.schema import Recipe

    if out is not None:
        check_export(out)
    if resume is not None:
        if path is not None:
            raise UserError("--resume goes on with the run's own recipe: name keys to change alone")
        from agentrl.fine_tuning.run import resume_sft

        return resume_sft(resume, overrides=given, output=out).interrupted
    if path is None:
        raise UserError("sft needs a recipe, such as tiny_warmstart (see `agentrl recipes`), or --resume RUN")
    recipe = Recipe.load(path, given).changed(start=None)  # before anything heavy is imported
    from agentrl.fine_tuning.run import sft

    return sft(recipe, out).interrupted


def reward_model_command(
    recipe: Annotated[str, Argument(help="Recipe with a `reward_model` section, which says what to learn from.")],
    overrides: Overrides = None,
) -> None:
    """Train a reward model on pairs of conversations, for `rewards.model`."""
    from agentrl.fine_tuning.reward_model import train_reward_model
    from agentrl.recipe.load import recipe_name
    from agentrl.recipe.schema import Recipe

    train_reward_model(Recipe.load(recipe, overrides or []), name=recipe_name(recipe))
