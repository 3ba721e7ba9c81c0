"""A function's signature and docstring as a tool's description, JSON schema and argument check.

Docstrings are read in the styles of Google, numpy and Sphinx.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import dedent
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from agentrl.errors import UserError, nearest
from agentrl.plugins.schema import named, outline, shown
from agentrl.plugins.types import ArgumentError, Json, Session

_typed_dict: Any = TypedDict
_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
_CONTAINERS = ("list_type", "dict_type", "model_type", "tuple_type", "set_type", "dataclass_type")


@dataclass(frozen=True)
class Signature:
    """parameters: a JSON schema of type `object`. session: the parameter that takes the Session, if any."""

    description: str
    """The docstring's text before its sections."""
    parameters: Mapping[str, Json]
    session: str | None
    _adapter: TypeAdapter[dict[str, object]]
    _not_null: frozenset[str]  # may be left out but not null: a model's null is taken as leaving it out

    def check(self, arguments: Mapping[str, Json]) -> dict[str, object]:
        """The arguments converted to the annotated types. Raises ArgumentError with one line for the model."""
        if None in arguments.values():
            arguments = {k: v for k, v in arguments.items() if v is not None or k not in self._not_null}
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            first = error
        try:  # again, with lists and objects that were written as JSON text once too often
            return self._adapter.validate_python(_read_texts(arguments, first))
        except ValidationError as error:
            raise ArgumentError(_line(error.errors(include_url=False)[0], self.parameters)) from None


def read_signature(function: Callable[..., object], name: str) -> Signature:
    """Read a function's signature and docstring. Raises UserError, beginning with the tool's name, for a function that
    cannot be a tool."""
    documented = read_docstring(inspect.getdoc(function) or "")
    annotations = _annotations(function, name)
    session, fields, defaults = None, {}, {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool {name!r}: parameter {str(parameter)!r} cannot be filled by name")
        if parameter.name not in annotations:
            raise UserError(f"tool {name!r}: parameter {parameter.name!r} has no type annotation")
        annotation = annotations[parameter.name]
        if _is_session(annotation):
            session = parameter.name
            continue
        if text := documented.arguments.get(parameter.name):
            annotation = Annotated[annotation, Field(description=text)]
        if parameter.default is not parameter.empty:
            annotation, defaults[parameter.name] = NotRequired[annotation], parameter.default
        fields[parameter.name] = annotation
    for unknown in documented.arguments.keys() - inspect.signature(function).parameters.keys():
        hint = nearest(unknown, fields)
        raise UserError(f"tool {name!r}: its docstring describes {unknown!r}, which is not a parameter{hint}")
    return _signature(name, documented.description, fields, defaults, session)


def _signature(
    name: str, description: str, fields: dict[str, Json], defaults: dict[str, Json], session: str | None
) -> Signature:
    arguments = _typed_dict(name, fields)
    arguments.__pydantic_config__ = _CONFIG
    try:
        adapter = TypeAdapter(arguments)
        parameters = {"type": "object", "properties": {}, **_untitled(adapter.json_schema())}
    except PydanticUserError as error:
        raise UserError(f"tool {name!r}: its arguments have no JSON schema: {str(error).splitlines()[0]}") from None
    for key, value in defaults.items():
        if value is not None:
            parameters["properties"][key]["default"] = _jsonable(value, name, key)
    parameters.pop("additionalProperties", None)  # refused in any case; not worth the model's tokens
    not_null = frozenset(key for key in defaults if not _takes_null(adapter, key))
    return Signature(description, parameters, session, adapter, not_null)


def _annotations(function: Callable[..., object], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"tool {name!r}: an annotation cannot be read: {error}") from None


def _is_session(annotation: object) -> bool:
    return annotation is Session or (get_origin(annotation) is not None and Session in get_args(annotation))


def _jsonable(value: object, name: str, key: str) -> object:
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        raise UserError(f"tool {name!r}: the default of {key!r} cannot be written as JSON") from None


def _takes_null(adapter: TypeAdapter[dict[str, object]], key: str) -> bool:
    try:
        adapter.validate_python({key: None})
    except ValidationError as error:
        return all(e["loc"][:1] != (key,) for e in error.errors())
    return True


def _untitled(schema: object) -> Json:
    """Drop the titles that pydantic adds: they tell a model nothing and cost tokens."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named = ("properties", "$defs")
    plain = ("default", "enum", "const", "examples", "required")
    return {
        key: {k: _untitled(v) for k, v in value.items()}
        if key in named
        else value
        if key in plain
        else _untitled(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _read_texts(arguments: Mapping[str, Json], error: ValidationError) -> dict[str, object]:
    result: dict[str, object] = dict(arguments)
    for detail in error.errors(include_url=False):
        key = detail["loc"][0] if detail["loc"] else None
        if detail["type"] in _CONTAINERS and isinstance(key, str) and isinstance(text := result.get(key), str):
            try:
                result[key] = json.loads(text)
            except (ValueError, RecursionError):
                continue
    return result


def _line(error: ErrorDetails, parameters: Mapping[str, Json]) -> str:
    path = named(".".join(str(part) for part in error["loc"]))
    if error["type"] == "missing":
        return f"argument {path} is missing; it takes {outline(parameters)}"
    if error["type"] == "extra_forbidden":
        return f"unknown argument {path}; it takes {outline(parameters)}"
    if error["type"] in _CONTAINERS:
        wanted = "a list" if error["type"] in ("list_type", "tuple_type", "set_type") else "an object"
        return f"argument {path} should be {wanted}, got {shown(error['input'])}"
    text = " ".join(error["msg"].split()).partition(", unable")[0].removeprefix("Input ").removeprefix("Value error, ")
    return f"argument {path} {text}, got {shown(error['input'])}"


_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|References|See Also|Warnings?)\s*:?$"
)
_TAKES_ARGUMENTS = ("Args", "Arguments", "Parameters", "Params")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")  # name: text, name (type): text; numpy: name : type
_SPHINX = re.compile(
    r":(\w+)(?:\s+[^:]*?)?(?:\s+(\w+))?:\s*(.*)$"
)  # :param x: text, :param int x: text, :returns: text


@dataclass(frozen=True, slots=True)
class Docstring:
    """What a docstring says."""

    description: str
    """The text before its sections, lines kept."""
    arguments: dict[str, str]
    """Descriptions of arguments by name, each on one line."""


def read_docstring(text: str) -> Docstring:
    """Read a docstring as `inspect.getdoc` gives it. Lines of the description are kept; an argument's lines are
    joined."""
    lines = text.strip().splitlines()
    start = next((i for i in range(len(lines)) if _heading(lines, i)), len(lines))
    head, arguments = _sphinx(lines[:start])
    for i in range(start, len(lines)):
        if _heading(lines, i) in _TAKES_ARGUMENTS:
            end = next((j for j in range(i + 1, len(lines)) if _heading(lines, j)), len(lines))
            ruled = _is_rule(lines[i + 1]) if i + 1 < len(lines) else False
            arguments |= _entries(lines[i + 1 + ruled : end], numpy=ruled)
    return Docstring("\n".join(head).strip(), arguments)


def _heading(lines: list[str], i: int) -> str | None:
    """The section that begins at line `i`: `Args:`, or `Parameters` over a rule of dashes."""
    match = _SECTION.match(lines[i])
    if not match:
        return None
    ruled = i + 1 < len(lines) and _is_rule(lines[i + 1])
    return match.group(1) if ruled or lines[i].rstrip().endswith(":") else None


def _is_rule(line: str) -> bool:
    return len(line.strip()) >= 3 and set(line.strip()) == {"-"}


def _entries(lines: list[str], numpy: bool) -> dict[str, str]:
    """The entries of a section by name. Entries begin where the indent is least; what is indented more belongs
    to the entry before."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in dedent("\n".join(lines)).splitlines():
        if line[:1].strip():
            if numpy:
                name, text = re.split(r"[\s:,]", line, maxsplit=1)[0], ""
            elif match := _ENTRY.match(line):
                name, text = match.groups()
            else:
                name, text = "", ""
            if name:
                found[name] = [text]
        elif name and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(parts).strip() for name, parts in found.items()}


def _sphinx(lines: list[str]) -> tuple[list[str], dict[str, str]]:
    head: list[str] = []
    arguments: dict[str, str] = {}
    name: str | None = None
    fields = False
    for line in lines:
        if _SPHINX.match(line):
            fields = True
            field = re.match(r":param(?:\s+[^:]*?)?\s+(\w+):\s*(.*)$", line)
            name = field.group(1) if field else None
            if field:
                arguments[field.group(1)] = field.group(2)
        elif fields and line.strip() and name:
            arguments[name] += " " + line.strip()
        elif not fields:
            head.append(line)
    return head, arguments
