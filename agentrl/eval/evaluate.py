"""`Evaluation`: a model on held-out tasks, without training it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError, nearest
from agentrl.eval.held_out import HeldOut
from agentrl.eval.progress import Progress
from agentrl.eval.result import SplitResult, failures
from agentrl.plugins.environment import Environment, is_validation
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.recipe.schema import Recipe
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


async def play(
    recipe: Recipe, model: str | None, progress: Progress, extend: Callable[[Player], None] | None = None
) -> Evaluation:
    """As the recipe's `eval` says. model: a folder or hub name in place of the recipe's. extend: called once with what
    plays, before it does. Raises UserError; what can be known without a model is said before one is loaded."""
    env = make_environment(recipe.env)
    chosen = chosen_splits(env, recipe)
    if empty := [split for split in chosen if not len(tasks_of(env, split))]:
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {', '.join(empty)}")
    player = await Player.build(recipe, model_path=model, env=env, say=progress.say, phase=progress.phase)
    try:
        held_out, notes = await HeldOut.prepare(player, recipe, chosen)
        if extend is not None:
            extend(player)
        results = []
        for split in held_out.splits:
            on_group = progress.follow(split, len(held_out.tasks[split]))
            result, groups = await held_out.play(split, on_group)
            results.append(result)
            if line := failures(f"evaluation of {split}", groups):
                notes.append(line)
    finally:
        unclosed = await player.close()
    played = player.chat.description if player.model is None else model or recipe.model.path
    source = "" if recipe.env.mix else f" ({recipe.env.source})"
    return Evaluation(played, f"{env.name}{source}", tuple(results), (*notes, *unclosed))


def chosen_splits(env: Environment, recipe: Recipe) -> tuple[str, ...]:
    """Those to report: the recipe's, or all held-out ones but those for validation, where there are others. Raises
    UserError for one that the environment does not have."""
    if recipe.eval.splits is None:
        return reported(env)
    for split in recipe.eval.splits:
        if split not in (*env.splits, "train"):
            raise UserError(f"eval.splits: environment {env.name!r} has no split {split!r}{nearest(split, env.splits)}")
    return recipe.eval.splits


def reported(env: Environment) -> tuple[str, ...]:
    """The held-out splits that are not for validation; all where there is no other."""
    return tuple(split for split in env.splits if not is_validation(split)) or tuple(env.splits)


def choosing_split(env: Environment, recipe: Recipe, splits: tuple[str, ...]) -> str | None:
    """The one that is evaluated during training, to choose the best checkpoint by: for validation, or else the first of
    `splits`, those that are reported. None: the recipe evaluates nothing."""
    own = next((split for split in env.splits if is_validation(split)), None)
    if not splits or own is None or not 0 < recipe.eval.every < recipe.train.steps:
        return splits[0] if splits else None
    return own
