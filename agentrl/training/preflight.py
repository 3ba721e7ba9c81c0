"""What can be looked at before a model is loaded, so that a mistake costs no waiting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.algo import losses
from agentrl.algo.registry import check_critic
from agentrl.errors import UserError
from agentrl.eval.evaluate import choosing_split, chosen_splits
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import load, make_environment, tasks_of
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.training.needs import lacking
from agentrl.training.reward_model import classifier_config


@dataclass(frozen=True, slots=True)
class Checked:
    """splits: those that are held out and reported. choosing: see `choosing_split`. tasks: to train on. trackers: what
    makes them, by their names."""

    env: Environment
    splits: tuple[str, ...]
    choosing: str | None
    tasks: Sequence[Task]
    trackers: Mapping[str, Callable[[], Tracker]]


def check_names(recipe: Recipe) -> None:
    """Look up advantage, loss and reward model. Raises UserError: one line."""
    check_critic(recipe)
    losses.get(recipe.algorithm.loss)
    if recipe.rewards.model is not None:
        classifier_config(recipe.rewards.model, recipe.model)


def check_run(recipe: Recipe) -> Checked:
    """Raises UserError: one line."""
    trackers = {name: load("agentrl.trackers", name) for name in recipe.track.trackers}
    check_names(recipe)
    if getattr(load("engines", recipe.engine.name), "brings_chat", False):
        raise UserError(f"engine.name {recipe.engine.name!r} plays a model that cannot be trained: use `agentrl eval`")
    if missing := lacking(recipe):
        more = f" (and {len(missing) - 1} more, which `agentrl check` lists)" if len(missing) > 1 else ""
        raise UserError(missing[0] + more)
    env = make_environment(recipe.env)
    if not (env.pays or recipe.tools or env.tools() or recipe.rewards.functions or recipe.rewards.model):
        raise UserError(f"environment {env.name!r} pays nothing, and no tool can: name a reward in rewards.functions")
    splits = chosen_splits(env, recipe)
    choosing = choosing_split(env, recipe, splits)
    tasks = tasks_of(env, "train")
    needed = dict.fromkeys(("train", *splits, *((choosing,) if choosing is not None else ())))
    if empty := [split for split in needed if not len(tasks_of(env, split))]:
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {', '.join(empty)}")
    return Checked(env, splits, choosing, tasks, trackers)
