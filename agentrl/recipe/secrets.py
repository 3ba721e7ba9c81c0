"""Find the secrets of a recipe, and hide them in what is shown of it: their keys stay, their values become `***`.

Secrets belong into `${VAR}`, which is kept and written as it stands. This hides those that were written out all the
same: by people, and by versions that wrote the values of variables into their run folders.
"""

import os
import re
from collections.abc import Mapping, Sequence

from agentrl.jsonable import Json
from agentrl.recipe.document import Key, Reference
from agentrl.secrets import LEAST, MASK, is_secret_name, masked_text

FREE = "args"
"""A recipe's own keys hold no secrets; below `args` lies what a plugin takes."""

_ALL_BELOW = ("headers", "env")


def masked(value: object, free: bool = False) -> Json:
    """A recipe's tree (`Recipe.written`) without secrets. free: it lies below a plugin's arguments."""
    if isinstance(value, dict):
        return {
            key: _hidden(item) if free and is_secret(key, item) else masked(item, free or key == FREE)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return masked_words(value) if free else [masked(item) for item in value]
    if isinstance(value, Reference):
        return Reference(masked_text(value.text), value.plain, None)
    return masked_text(value) if isinstance(value, str) else value


def plain(tree: object) -> Json:
    """A tree with the text of each Reference in its place."""
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    return tree.text if isinstance(tree, Reference) else tree


def masked_words(words: Sequence[Json]) -> list[Json]:
    """A list, such as the arguments of a command, without secrets: what follows `--token` is hidden too."""
    found = []
    for before, word in zip((None, *words), words, strict=False):
        option = isinstance(before, str) and before.startswith("-") and is_secret(before, word)
        found.append(_hidden(word) if option else masked(word, free=True))
    return found


def secret_values(references: Mapping[Key, Reference]) -> tuple[str, ...]:
    """The values of a recipe's variables that are secrets by the name of the variable or of their key."""
    found = set()
    for key, reference in references.items():
        variables = [name for name in re.findall(r"\w+", reference.variables) if is_secret_name(name)]
        if variables or (key and is_secret_name(str(key[-1]))):
            found |= {str(reference.value), *(os.environ.get(name, "") for name in variables)}
    return tuple(sorted((value for value in found if len(value) >= LEAST), key=len, reverse=True))


def is_secret(name: str, value: object) -> bool:
    """Whether to hide what lies at a key of this name. `max_tokens: 256` is a count."""
    counted = isinstance(value, int | float) and name.endswith("s")
    return name.lower() in _ALL_BELOW or (not counted and is_secret_name(name))


def _hidden(value: object) -> Json:
    """Keep names and variables; hide values, except those that are no secret: a switch, nothing."""
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    if isinstance(value, Reference):
        return Reference(value.variables, value.plain, None)
    return value if isinstance(value, bool) or not value else MASK
