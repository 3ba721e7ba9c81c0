"""Finds the solution in what a model says: the last closed block of Python that defines the function."""

import re

FENCE = "```"
_LANGUAGES = ("", "python", "py", "python3")


def find_solution(text: str, name: str) -> str | None:
    """The code; None where no closed block defines `name`."""
    for block in reversed(_blocks(text)):
        if re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b|^\s*{re.escape(name)}\s*=", block, re.MULTILINE):
            return block
    return None


def _blocks(text: str) -> list[str]:
    """The insides of fences that are closed, of Python or of no named language."""
    found = []
    parts = text.split(FENCE)
    for inside in parts[1 : len(parts) - 1 : 2]:
        language, line, code = inside.partition("\n")
        if line and language.strip().lower() in _LANGUAGES:
            found.append(code)
    return found
