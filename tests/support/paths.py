"""Folders that tests name."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = next(folder for folder in SUPPORT.parents if (folder / "pyproject.toml").is_file())
RECIPES = ROOT / "recipes"
