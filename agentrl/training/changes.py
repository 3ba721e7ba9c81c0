"""What a resumed run does otherwise than it began: what extends it is said in a line, what makes it another is refused.

A run whose first half learned one thing and whose second half another is a falsehood in its own folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe

SHOWN = 8
BOUND = ("env", "tools", "rewards", "model", "algorithm", "critic", "train.seed")
"""What a run is. Everything else (steps, learning rate, sampling, limits, evaluation, machines) may be changed on its
way, and is said."""
FREE = ("model.device", "model.checkpointing", "model.compute", "model.trust_remote_code")
"""Below `BOUND`: where and how the same is computed."""


def changes(former: Path, recipe: Recipe) -> str | None:
    """Keys of `recipe` that stand otherwise in the recipe at `former`, with both values; None: there are none.
    Values of variables are compared, and not shown."""
    try:
        before = load_recipe(former)
    except UserError as error:
        return f"what changed since the run began is not known: {error}"
    keys = _differing(before, recipe)
    return f"changed since the run began: {_told(keys, before, recipe)}" if keys else None


def check_same_run(former: Path, recipe: Recipe) -> None:
    """Raises UserError: `recipe` is another run than that at `former`, or nobody can tell."""
    force = "start a new run with it, or go on all the same with --force"
    try:
        before = load_recipe(former)
    except UserError as error:
        raise UserError(f"--resume: the run's own recipe cannot be compared: {error}; {force}") from error
    if keys := [key for key in _differing(before, recipe) if _below(key, BOUND) and not _below(key, FREE)]:
        raise UserError(f"--resume: this is not what the run began with: {_told(keys, before, recipe)}; {force}")


def _below(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _differing(before: Recipe, now: Recipe) -> list[str]:
    """Dotted keys whose values differ, in the order of the former recipe. Where the output goes is no difference."""
    old, new = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (before, now))
    return [key for key in old | new if old.get(key) != new.get(key) and key != "output"]


def _told(keys: list[str], before: Recipe, now: Recipe) -> str:
    old, new = (dict(_leaves(recipe.shown())) for recipe in (before, now))
    said = [f"{key} {_value(old.get(key))} -> {_value(new.get(key))}" for key in keys[:SHOWN]]
    return ", ".join(said + ([f"and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []))


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from _leaves(item, f"{at}{key}.")
        else:
            yield f"{at}{key}", item


def _value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
