"""Hide secrets in what is shown of a recipe: their keys stay, their values become `***`.

Secrets belong into `${VAR}`, which is kept and written as it stands. This hides those that were written out all the
same: by people, and by versions that wrote the values of variables into their run folders.
"""

import re
from collections.abc import Mapping, Sequence

from agentrl.jsonable import Json
from agentrl.recipe.document import Key, Reference

MASK = "***"
_LEAST = 8  # characters of a value that is looked for in texts
FREE = "args"
"""A recipe's own keys hold no secrets; below `args` lies what a plugin takes."""

_WORDS = r"(?:key|token|secret|pass(?:word|wd|phrase)?|credential|auth(?:orization|entication)?|cookie)s?"
_NAME = re.compile(rf"(?:.*[^a-z])?(?:api|access|private)?{_WORDS}", re.IGNORECASE | re.DOTALL)
_ALL_BELOW = ("headers", "env")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_TEXT = (
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), MASK),  # https://user:password@host
    (re.compile(rf"([?&;][^=&;\s]*{_WORDS}=)[^&;\s]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(rf"^(-*[\w-]*{_WORDS}=)(?!\d+\b).+", re.IGNORECASE | re.DOTALL),
        rf"\1{MASK}",
    ),  # --token=..., API_KEY=...
    (
        re.compile(rf"({_WORDS}['\"]?\s*[=:]\s*(['\"]))(?:(?!\2).){{6,}}(?=\2)", re.IGNORECASE),
        rf"\1{MASK}",
    ),  # api_key='...'
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{16,}", re.IGNORECASE), rf"\1{MASK}"),
)


def masked(value: object, free: bool = False) -> Json:
    """Return a recipe's tree (`Recipe.written`) without secrets. free: it lies below a plugin's arguments."""
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
    """Return a tree with the text of each Reference in its place."""
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    return tree.text if isinstance(tree, Reference) else tree


def masked_words(words: Sequence[Json]) -> list[Json]:
    """Return a list, such as the arguments of a command, without secrets: what follows `--token` is hidden too."""
    found = []
    for before, word in zip((None, *words), words, strict=False):
        option = isinstance(before, str) and before.startswith("-") and is_secret(before, word)
        found.append(_hidden(word) if option else masked(word, free=True))
    return found


def secret_values(references: Mapping[Key, Reference]) -> tuple[str, ...]:
    """Return the values of a recipe's variables that are secrets by the name of the variable or of their key; short
    ones are none, since they would be found in any text."""
    found = set()
    for key, reference in references.items():
        names = [str(key[-1]) if key else "", *re.findall(r"\w+", reference.variables)]
        value = str(reference.value)
        if len(value) >= _LEAST and any(_NAME.fullmatch(_CAMEL.sub("_", name)) for name in names):
            found.add(value)
    return tuple(sorted(found, key=len, reverse=True))


def masked_text(text: str) -> str:
    """Return a text without passwords of URLs, `token=...` and the like."""
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text


def is_secret(name: str, value: object) -> bool:
    """Return whether to hide what lies at a key of this name. `max_tokens: 256` is a count."""
    counted = isinstance(value, int | float) and name.endswith("s")
    return name.lower() in _ALL_BELOW or (not counted and _NAME.fullmatch(_CAMEL.sub("_", name)) is not None)


def _hidden(value: object) -> Json:
    """Keep names and variables; hide values, except those that are no secret: a switch, nothing."""
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    if isinstance(value, Reference):
        return Reference(value.variables, value.plain, None)
    return value if isinstance(value, bool) or not value else MASK
