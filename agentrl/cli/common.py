"""What several commands share: the console, KEY=VALUE arguments, and texts made short."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.recipe.schema import Recipe
    from agentrl.terminal import Terminal


def console() -> "Terminal":
    """Return the terminal on stdout; rich is imported when this is called."""
    from agentrl.terminal import terminal

    return terminal()


def key_values(texts: Sequence[str], option: str = "") -> dict[str, Any]:
    """Return `KEY=VALUE` texts as a mapping, the values read as YAML. option: begins the UserError."""
    import yaml

    from agentrl.errors import UserError

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"{option}{text}: expected KEY=VALUE, such as {option}max_operations=2")
        try:
            found[key.strip()] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            found[key.strip()] = value
    return found


SUBJECT = (
    "A run folder (its recipe and best checkpoint), a recipe's file or name, or a model: `tiny`, a folder, a hub name."
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def recipe_and_model(what: str, overrides: Sequence[str], model: str | None) -> "tuple[Recipe, str | None]":
    """Return the recipe of a run folder, recipe or model `what` (SUBJECT), and the model in place of the recipe's, or
    None. model: replaces it. Raises UserError."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.recipe.load import load_recipe

    path, run = recipe_of(what)
    is_model = run is None and _is_model(what)
    recipe = load_recipe(None if is_model else path, overrides)  # before anything heavy is imported
    from agentrl.eval.evaluate import model_of
    from agentrl.models.load import resolve_types

    named = model or run or (what if is_model else None)
    return resolve_types(recipe), model_of(named) if named else None


def _is_model(what: str) -> bool:
    from agentrl.models import EMBEDDED

    if Path(what).exists():
        return (Path(what) / "config.json").is_file()
    return what == EMBEDDED or (bool(_HUB_NAME.fullmatch(what)) and not what.endswith((".yaml", ".yml")))


def first_line(text: str | None) -> str:
    """Return the first line of a description or docstring."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def shortened(text: str, length: int = 100) -> str:
    """Return a text as one line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
