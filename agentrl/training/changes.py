"""What a resumed run does otherwise than it began, in a line: a slip of the keyboard is seen before it costs a day."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe

SHOWN = 8


def changes(former: Path, recipe: Recipe) -> str | None:
    """Keys of `recipe` that stand otherwise in the recipe at `former`, with both values. None where there are none, or
    the former cannot be read."""
    try:
        before = dict(_leaves(load_recipe(former).model_dump(mode="json")))
    except UserError:
        return None
    now = dict(_leaves(recipe.model_dump(mode="json")))
    keys = [key for key in before | now if before.get(key) != now.get(key) and key != "output"]
    if not keys:
        return None
    said = [f"{key} {_value(before.get(key))} -> {_value(now.get(key))}" for key in keys[:SHOWN]]
    more = [f"and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return f"changed since the run began: {', '.join(said + more)}"


def _leaves(value: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{at}{key}.")
        else:
            yield f"{at}{key}", item


def _value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
