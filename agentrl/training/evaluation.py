"""`evaluate`: a model on held-out tasks, scored by all that the recipe would train it by."""

from collections.abc import Sequence

from agentrl.errors import UserError
from agentrl.eval.evaluate import Evaluation, play
from agentrl.eval.progress import Progress
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.blocking import blocking, run
from agentrl.training.model_reward import ask_reward_model


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

    model: a folder or hub name in place of the recipe's. splits: in place of `eval.splits`. A reward model
    (`rewards.model`) is loaded into this process and asked. Raises UserError; what can be known without a model is said
    before one is loaded.
    """
    if isinstance(recipe, str):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    changed = {"samples": samples or recipe.eval.samples, "splits": tuple(splits) if splits else recipe.eval.splits}
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update=changed)})
    extend = None if recipe.rewards.model is None else ask_reward_model
    with progress or Progress() as shown:
        return blocking(lambda: run(play(recipe, model, shown, extend), shown.say))
