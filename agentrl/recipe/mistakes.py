"""What is wrong with a recipe, as one line: where it was written, the key, what is wanted and what was given."""

import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.errors import nearest
from agentrl.recipe.document import Document, Key, describe, dotted
from agentrl.recipe.schema import Recipe

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping of keys",
}
_GONE: dict[Key, str] = {
    ("algorithm", "normalize_std"): (
        "is no key any more: for false write `algorithm.advantage: dr_grpo` (in place of grpo), for true leave it out"
    ),
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, document: Document, file: str) -> str:
    """The first mistake (unknown keys before all else) and how many more there are."""
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first, key = errors[0], tuple(errors[0]["loc"])
    reference = document.references.get(key)  # whose value may be a secret
    said = f"what {reference.variables} holds" if reference else describe(first["input"])
    line = f"{_origin(document, key, file)}: " + (f"{dotted(key)}: " if key else "") + _what(first, key, said)
    return line + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")


def known_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every key of a recipe as a dotted path, sections included; what lies in a list is left out."""
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        if section := _section(info.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _origin(document: Document, key: Key, file: str) -> str:
    """Where the key, or the nearest thing above it, was written. A combination of keys belongs to the whole file."""
    for end in range(len(key), 0, -1):
        if key[:end] in document.origins:
            return document.origins[key[:end]]
    return file


def _what(error: ErrorDetails, key: Key, said: str) -> str:
    """said: what was given, in words."""
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return _GONE.get(key) or "unknown key" + _nearest_key(key)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"wants {words} {error['ctx'][name]:g}, got {said.removeprefix('the number ')}"
    if kind == "literal_error":
        wanted = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        one_of = "one of " if "," in wanted else ""
        return f"wants {one_of}{wanted}, got {said}" + _near_word(given, wanted.split(", "))
    if kind in ("too_short", "too_long", "missing_argument"):
        return f"has the wrong number of entries: {error['msg'].lower()}"
    stem = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
    if stem in _WANTED:
        return f"wants {_WANTED[stem]}, got {said}"
    return error["msg"][:1].lower() + error["msg"][1:]


def _near_word(given: Any, words: list[str]) -> str:
    close = difflib.get_close_matches(given, words, n=1) if isinstance(given, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest_key(key: Key) -> str:
    """Keys beside it that look alike, else keys elsewhere that end alike, else the keys beside it."""
    model, prefix = _model_at(key[:-1]), "".join(f"{part}." for part in key[:-1])
    name, beside = str(key[-1]), list(model.model_fields)
    close = [prefix + k for k in difflib.get_close_matches(name, beside, n=2, cutoff=0.6)]
    elsewhere = [k for k in known_keys() if k.rsplit(".", 1)[-1] == name]
    if found := elsewhere or close:
        return "; did you mean " + " or ".join(repr(k) for k in found[:2]) + "?"
    return nearest(name, beside)


def _model_at(key: Key) -> type[BaseModel]:
    model: type[BaseModel] = Recipe
    for part in key:
        if isinstance(part, str) and part in model.model_fields:
            model = _section(model.model_fields[part].annotation, lists=True) or model
    return model


def _section(annotation: Any, lists: bool = False) -> type[BaseModel] | None:
    """The section class in an annotation: `Section`, `Section | None` and, with `lists`, `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated) or (lists and origin is tuple):
        for inner in typing.get_args(annotation):
            if found := _section(inner, lists):
                return found
    return None
