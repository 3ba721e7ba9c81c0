"""`evaluate`: a model on held-out tasks, scored by all that the recipe would train it by."""

from collections.abc import Sequence
from pathlib import Path

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.run_folder import MODEL, RunFolder, recipe_of
from agentrl.errors import UserError
from agentrl.eval.evaluate import Evaluation, play
from agentrl.eval.progress import Progress
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.blocking import blocking, run
from agentrl.rollout.model_reward import ask_reward_model


def evaluate(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    splits: Sequence[str] | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Play `eval.tasks` tasks of each split, `samples` (else `eval.samples`) times each.

    recipe: a Recipe, a recipe's path, or a run's folder, whose recipe then is taken with its best checkpoint. model: a
    folder, a run's folder (its best checkpoint), or a hub name, in place of the recipe's. splits: in place of
    `eval.splits`. A reward model (`rewards.model`) is loaded into this process and asked. Raises UserError; what can be
    known without a model is said before one is loaded.
    """
    if isinstance(recipe, str):
        path, folder = recipe_of(recipe)
        recipe, model = load_recipe(path, overrides), model or folder
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    model = model_of(model) if model is not None else None
    changed = {"samples": samples or recipe.eval.samples, "splits": tuple(splits) if splits else recipe.eval.splits}
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update=changed)})
    extend = None if recipe.rewards.model is None else ask_reward_model
    with progress or Progress() as shown:
        return blocking(lambda: run(play(recipe, model, shown, extend)))


def model_of(path: str) -> str:
    """The folder of a run's best checkpoint (the last, where none was evaluated), or of the model that a warm start
    left there; any other path or name as it is. Raises UserError for a run without a checkpoint."""
    if recipe_of(path)[1] is None:
        return path
    folder = RunFolder(Path(path))
    checkpoints = Checkpoints(folder.checkpoints, 1)
    if (saved := checkpoints.best() or checkpoints.latest()) is not None:
        return str(saved.path)
    if (folder.path / MODEL / "config.json").is_file():
        return str(folder.path / MODEL)
    raise UserError(f"{path}: this run has saved no checkpoint to be evaluated")
