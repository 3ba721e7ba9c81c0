"""`evaluate`: a model on held-out tasks, without training it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError, nearest
from agentrl.eval.held_out import HeldOut
from agentrl.eval.progress import Progress
from agentrl.eval.result import SplitResult, failures
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.blocking import blocking
from agentrl.rollout.player import Player


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One result a split, in the order asked for. `notes`: lines about tasks or samples that were left out."""

    model: str
    env: str
    splits: tuple[SplitResult, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, split: str) -> SplitResult:
        return next(r for r in self.splits if r.split == split)

    def json(self) -> dict[str, Any]:
        return {"model": self.model, "env": self.env, "splits": {r.split: r.json() for r in self.splits}}


def evaluate(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    splits: Sequence[str] | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
    extend: Callable[[Player], None] | None = None,
) -> Evaluation:
    """Play `eval.tasks` tasks of each split, `samples` (else `eval.samples`) times each.

    model: a folder or hub name in place of the recipe's. splits: in place of `eval.splits`. extend: called once with
    what plays, to add a reward model; without it that of the recipe is not asked. Raises UserError; what can be known
    without a model is said before one is loaded.
    """
    if isinstance(recipe, str):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    changed = {"samples": samples or recipe.eval.samples, "splits": tuple(splits) if splits else recipe.eval.splits}
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update=changed)})
    with progress or Progress() as shown:
        return blocking(lambda: asyncio.run(_evaluate(recipe, model, shown, extend)))


async def _evaluate(
    recipe: Recipe, model: str | None, progress: Progress, extend: Callable[[Player], None] | None
) -> Evaluation:
    env = make_environment(recipe.env)
    chosen = chosen_splits(env, recipe)
    if empty := [split for split in chosen if not len(tasks_of(env, split))]:
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {', '.join(empty)}")
    player = await Player.build(recipe, model_path=model, env=env, say=progress.say, phase=progress.phase)
    try:
        held_out, notes = await HeldOut.prepare(player, recipe, chosen)
        if extend is not None:
            extend(player)
        elif recipe.rewards.model is not None:
            notes.append(f"rewards.model: {recipe.rewards.model} was not asked, so rewards are without its part")
        results = []
        for split in held_out.splits:
            on_group = progress.follow(split, len(held_out.tasks[split]))
            result, groups = await held_out.play(split, on_group)
            results.append(result)
            if line := failures(f"evaluation of {split}", groups):
                notes.append(line)
    finally:
        await player.close()
    played = player.chat.description if player.model is None else model or recipe.model.path
    source = "" if recipe.env.mix else f" ({recipe.env.source})"
    return Evaluation(played, f"{env.name}{source}", tuple(results), tuple(notes))


def chosen_splits(env: Environment, recipe: Recipe) -> tuple[str, ...]:
    """Those of the recipe, or all held-out ones. Raises UserError for one that the environment does not have."""
    if recipe.eval.splits is None:
        return tuple(env.splits)
    for split in recipe.eval.splits:
        if split not in (*env.splits, "train"):
            raise UserError(f"eval.splits: environment {env.name!r} has no split {split!r}{nearest(split, env.splits)}")
    return recipe.eval.splits
