"""Errors that a person can act on. Each is one line: what was wrong, where, what to do."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: a recipe, a data row, a plugin, a folder. The command line prints it as one line and exits with 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'calculator'?`, or the known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return f"; known: {', '.join(names)}" if names else ""
