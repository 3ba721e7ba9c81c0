"""What can be looked at before a model is loaded, so that a mistake costs no waiting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algo import advantages, losses
from agentrl.algo.registry import check_critic
from agentrl.algo.terms import Tokens
from agentrl.compute.batch import Array, Batch
from agentrl.compute.classifier import classifier_config
from agentrl.engine.base import engine_class
from agentrl.errors import UserError, reason
from agentrl.eval.evaluate import choosing_split, chosen_splits
from agentrl.learner.actor import loss_terms
from agentrl.learner.advantages import with_advantages
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import load, make_environment, tasks_of
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.training.needs import lacking


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
    check_algorithm(recipe)
    if engine_class(recipe.engine.name).brings_chat:
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


def check_algorithm(recipe: Recipe) -> None:
    """Ask the recipe's advantage and loss once, about a step that is made up.

    Raises UserError unless each can be called as it will be, and gives back what a step needs. A mistake that their
    signature or their result shows is found before anything is sampled.
    """
    algorithm, batch = recipe.algorithm, _made_up(recipe)
    found = with_advantages(batch, advantages.get(algorithm.advantage), algorithm)
    logprobs = torch.from_numpy(batch.tokens["logprobs"]).requires_grad_()
    sample = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.lengths))
    tokens = Tokens(logprobs * 1.0, logprobs.detach(), torch.from_numpy(found.tokens["advantages"]), sample)
    terms, whose = loss_terms(losses.get(algorithm.loss), tokens, algorithm), f"algorithm.loss {algorithm.loss!r}"
    if not bool(torch.isfinite(terms.loss).all()):
        raise UserError(f"{whose} gave a loss that is not finite")
    if not terms.loss.requires_grad:
        raise UserError(f"{whose} gave a loss without a gradient: it is no function of `tokens.logprobs`")
    try:
        terms.loss.sum().backward()
    except Exception as error:  # the boundary: the gradient of a stranger's function
        raise UserError(f"{whose}: its gradient cannot be computed: {reason(error)}") from error


def _made_up(recipe: Recipe) -> Batch:
    """A step as large in samples as the recipe's own, of one to four tokens each; in every task some are right and some
    wrong. With the columns that the recipe's estimator may read."""
    limits = recipe.rollout
    size = limits.tasks * limits.n
    lengths = 1 + np.arange(size) % 4
    group = np.repeat(np.arange(limits.tasks), limits.n)
    place = np.linspace(-1.0, -0.1, int(lengths.sum()), dtype=np.float32)
    columns: dict[str, Array] = {
        "ids": np.zeros(len(place), np.int32),
        "loss_mask": np.ones(len(place), np.uint8),
        "logprobs": place,
    }
    if recipe.critic is not None:
        columns["values"] = -place
    if recipe.algorithm.kl_coef > 0 and recipe.algorithm.kl_in == "reward":
        columns["kl_penalty"] = 0.001 * place
    return Batch(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=columns,
        samples={
            "prompt_length": np.zeros(size, np.int32),
            "group": group,
            "reward": (np.arange(size) % limits.n % 2).astype(np.float32),
        },
    )
