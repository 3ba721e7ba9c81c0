"""The recipes that ship: where they are, what each is about, and the files that belong to one."""

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_NAMED = re.compile(r"^\s*(?:extends|chat_template):\s*(\S+)", re.MULTILINE)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship, by name: those in the installed package, or those of the checkout."""
    folder = _PACKAGE / "recipes"  # a wheel has them there, a checkout beside the package
    folder = folder if folder.is_dir() else _PACKAGE.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def summary(recipe: Path) -> str:
    """The first comment line of a recipe."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")


def files_of(recipe: Path) -> list[Path]:
    """A shipped recipe's file, those of the recipes that it extends, and the chat templates that they name."""
    beside = [recipe.parent / name for name in _NAMED.findall(recipe.read_text(encoding="utf-8"))]
    found = {recipe: None}
    for path in filter(Path.is_file, beside):
        found |= dict.fromkeys(files_of(path) if path.suffix == ".yaml" else [path])
    return list(found)
