"""Explain what is wrong with a recipe in one line: where it was written, the key, what was expected, what was given."""

import difflib
import types
import typing
from collections.abc import Iterator

from pydantic import BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.errors import nearest
from agentrl.jsonable import Json
from agentrl.recipe.document import Document, Key, describe, dotted
from agentrl.recipe.previous import now_written

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping of keys",
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, document: Document, file: str, model: type[BaseModel]) -> str:
    """The first mistake (unknown keys before all else) and how many more there are."""
    errors = sorted(_errors(error), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    key = tuple(part for part in first["loc"] if part != "[key]")
    reference = document.references.get(key)  # whose value may be a secret
    given = f"what {reference.variables} holds" if reference else describe(first["input"])
    line = f"{_origin(document, key, file)}: " + (f"{dotted(key)}: " if key else "") + _what(first, key, given, model)
    return line + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")


def _errors(error: ValidationError) -> Iterator[ErrorDetails]:
    """Yield the mistakes; those of a mapping that was checked as another section by their keys below it."""
    for mistake in error.errors():
        inner = mistake.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):
            for below in _errors(inner):
                below["loc"] = (*mistake["loc"], *below["loc"])
                yield below
        else:
            yield mistake


def known_fields(model: type[BaseModel], lists: bool = False, prefix: str = "") -> dict[str, FieldInfo]:
    """Every field below a model by its dotted key, sections included. lists: also `tools.N.name`."""
    found = {}
    for name, info in model.model_fields.items():
        found[prefix + name] = info
        if section := section_of(info.annotation):
            found |= known_fields(section, lists, f"{prefix}{name}.")
        elif lists and (section := section_of(info.annotation, lists=True)):
            found |= known_fields(section, lists, f"{prefix}{name}.N.")
    return found


def _origin(document: Document, key: Key, file: str) -> str:
    """Where the key, or the nearest one above it, was written. Several keys together belong to the file."""
    for end in range(len(key), 0, -1):
        if key[:end] in document.origins:
            return document.origins[key[:end]]
    return file


def _what(error: ErrorDetails, key: Key, given: str, model: type[BaseModel]) -> str:
    """What is wrong. given: the value, in words."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return now_written(key) or "unknown key" + _nearest_key(key, model)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"expected {words} {error['ctx'][name]:g}, got {given.removeprefix('the number ')}"
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        one_of = "one of " if "," in expected else ""
        return f"expected {one_of}{expected}, got {given}" + _near_word(error["input"], expected.split(", "))
    if kind in ("too_short", "too_long", "missing_argument"):
        return f"has the wrong number of entries: {error['msg'].lower()}"
    stem = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
    if stem in _EXPECTED:
        return f"expected {_EXPECTED[stem]}, got {given}"
    return error["msg"][:1].lower() + error["msg"][1:]


def _near_word(given: Json, words: list[str]) -> str:
    close = difflib.get_close_matches(given, words, n=1) if isinstance(given, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest_key(key: Key, root: type[BaseModel]) -> str:
    """A hint: keys elsewhere with the same ending, else similar keys beside it, else all keys beside it."""
    model, prefix = _model_at(root, key[:-1]), "".join(f"{part}." for part in key[:-1])
    name, beside = str(key[-1]), list(model.model_fields)
    close = [prefix + k for k in difflib.get_close_matches(name, beside, n=2, cutoff=0.6)]
    elsewhere = [k for k in known_fields(root) if k.rsplit(".", 1)[-1] == name]
    if found := elsewhere or close:
        return "; did you mean " + " or ".join(repr(k) for k in found[:2]) + "?"
    return nearest(name, beside)


def _model_at(model: type[BaseModel], key: Key) -> type[BaseModel]:
    for part in key:
        if isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            entry = typing.get_args(annotation)[1] if typing.get_origin(annotation) is dict else annotation
            model = section_of(entry, lists=True) or model
    return model


def section_of(annotation: object, lists: bool = False) -> type[BaseModel] | None:
    """The section class in `Section` and `Section | None`; with `lists`, in `tuple[Section, ...]` too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if issubclass(annotation, RootModel) else annotation
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated) or (lists and origin is tuple):
        for inner in typing.get_args(annotation):
            if found := section_of(inner, lists):
                return found
    return None
