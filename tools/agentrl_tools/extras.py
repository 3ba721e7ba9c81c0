"""Packages that only an extra of agentrl installs."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agentrl.errors import UserError


def package(module: str, extra: str) -> Any:
    """Import a module of the extra's package and return it. Raises UserError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(f"{error}", extra) from error


def require(module: str, extra: str) -> None:
    """Raise UserError where a module that another process imports is not installed."""
    if find_spec(module) is None:
        raise _missing(f"No module named {module!r}", extra)


def _missing(why: str, extra: str) -> UserError:
    return UserError(f"it needs a package that is not installed ({why}): pip install 'agentrl[{extra}]'")
