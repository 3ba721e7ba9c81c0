"""The reference of all recipe keys, as Markdown, generated from the schema:

python -m agentrl.recipe.reference > docs/reference/recipe.md
"""

import ast
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.recipe.mistakes import section_of
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import Schedule
from agentrl.recipe.sections.section import Unit

HEAD = """# Recipe reference

Every key of a recipe. This page is generated from `agentrl/recipe/sections/`; do not edit it:
`python -m agentrl.recipe.reference > docs/reference/recipe.md`.

A recipe is a YAML file; `KEY=VALUE` on the command line replaces the value of one key, such as `train.lr=1e-4` or
`tools.calculator.args.max_operations=2`. `extends: other.yaml` at the top starts from another recipe: a file relative
to this one, or the name of one that ships. `${VAR}` and `${VAR:-default}` in a value are replaced from the
environment. `N` in a key is an entry of a list, counted from 0. All keys exist since 0.1.0.
"""
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", "≥"), Lt: ("lt", "<"), Le: ("le", "≤")}


def reference() -> str:
    """The page."""
    return HEAD + "".join(_section(Recipe, ""))


def _section(model: type[BaseModel], prefix: str) -> Iterable[str]:
    """Yield a table of the keys of one section, then the sections below it."""
    fields = model.model_fields
    meanings = _meanings(model)
    rows = [
        _row(prefix + name, info, meanings.get(name, "")) for name, info in fields.items() if not _always_there(info)
    ]
    if prefix:
        yield f"\n## {prefix.removesuffix('.')}\n\n{_flat(model.__doc__)}\n"
    if rows:
        yield "\n| key | type | unit | default | meaning |\n|---|---|---|---|---|\n" + "".join(rows)
    for name, info in fields.items():
        if section := section_of(info.annotation, lists=True):
            entry = "" if section_of(info.annotation) else "N."
            yield from _section(section, f"{prefix}{name}.{entry}")


def _always_there(info: FieldInfo) -> bool:
    """Whether it is a section, whose keys say all, and not one that may be absent."""
    return section_of(info.annotation) is not None and info.default is not None


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a model, its base classes' first. (Pydantic's own reading of them would be a
    fifth of what importing the recipe takes, at every start.)"""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, BaseModel) or kind is BaseModel:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(value=ast.Constant(value=str() as meaning)):
                        found[field.target.id] = meaning
    return found


def _row(key: str, info: FieldInfo, meaning: str) -> str:
    unit = next((mark.name for mark in info.metadata if isinstance(mark, Unit)), "")
    cells = (f"`{key}`", _type(info.annotation, info.metadata), unit, _default(info), _flat(meaning))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _type(annotation: Any, metadata: Iterable[object] = ()) -> str:
    """A type in words, with its bounds: `whole number > 0`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0], _marks(inner[1:]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(kind) for kind in inner if kind is not type(None)) + ", or null"
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin is dict:
        return "mapping" if inner[1] is Any else f"mapping to {_type(inner[1])}"
    if origin is tuple and section_of(annotation, lists=True):
        return "list of sections"
    if origin is tuple:
        return f"list of {_type(inner[0])}" if Ellipsis in inner else f"list of {len(inner)}: {_type(inner[0])}"
    if section_of(annotation):
        return "section"
    if annotation is Schedule:
        return "number or schedule"
    return " ".join([_KINDS[annotation], *_bounds(metadata)])


def _marks(metadata: Iterable[object]) -> list[object]:
    """Metadata with that of each `Field(gt=0)` in its place."""
    return [mark for item in metadata for mark in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bounds(metadata: Iterable[object]) -> list[str]:
    marks = [(_BOUNDS[type(mark)], mark) for mark in metadata if type(mark) in _BOUNDS]
    return [" and ".join(f"{sign} {getattr(mark, name):g}" for (name, sign), mark in marks)] if marks else []


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple) and any(isinstance(entry, BaseModel) for entry in value):
        value = [entry.model_dump(mode="json", exclude_defaults=True) for entry in value]
    if isinstance(value, Schedule):
        value = value.model_dump()
    return f"`{json.dumps(value)}`"


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    print(reference(), end="")
