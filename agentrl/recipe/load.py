"""Recipes as functions: read one from a file or by name, and write one as YAML."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.jsonable import Json
from agentrl.recipe.document import dump
from agentrl.recipe.schema import Recipe
from agentrl.recipe.secrets import masked


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read, extend, override and check a recipe; see `Recipe.load`. Raises UserError."""
    return Recipe.load(path, overrides)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every key, with `${VAR}` where one stood; `load_recipe` reads back an equal one."""
    return dump(recipe.written())


def show_recipe(recipe: Recipe) -> str:
    """The recipe as YAML for people: `dump_recipe` without the values of secrets."""
    return dump(masked(recipe.written()))


def recipe_name(path: str | Path) -> str:
    """The name that run folders carry: the file's, without its ending."""
    return Path(path).stem


def differing(before: Recipe, now: Recipe) -> list[str]:
    """The dotted keys whose values differ, except `output`, in the order of the former recipe."""
    old, new = (dict(leaves(recipe.model_dump(mode="json"))) for recipe in (before, now))
    return [key for key in old | new if old.get(key) != new.get(key) and key != "output"]


def leaves(value: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the values of a tree of mappings and lists, by their dotted keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
