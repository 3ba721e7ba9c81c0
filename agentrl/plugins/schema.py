"""Arguments that a model wrote, checked against a hand-written JSON schema.

Understood: type, enum, const, properties, required, additionalProperties, items, minimum, maximum, exclusiveMinimum,
exclusiveMaximum, minLength, maxLength, pattern, minItems, maxItems, anyOf, oneOf (as anyOf), allOf, nullable, $ref
within the schema, default. Other keywords describe, and check nothing. What is plainly meant is accepted: "3" for 3,
3.0 for 3, 3 for "3", "true" for true, a list or object written as JSON text, null for an argument that may be left out.
An unknown argument is refused unless the schema says `additionalProperties`. A schema is a stranger's: reading it and
checking by it are bounded in time, since the event loop waits.
"""

import copy
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins import patterns
from agentrl.plugins.prompt_schema import target
from agentrl.plugins.types import ArgumentError, Json

Check = Callable[[Json, str], Json]
"""Takes a value and its path (for the message); returns it as the tool wants it, or raises ArgumentError."""

_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}")
_READING_SECONDS = 1.0  # of CPU time, for the largest schemas

_compiled: dict[int, tuple[Mapping[str, Json], Check]] = {}


def check_arguments(parameters: Mapping[str, Json], arguments: Mapping[str, Json]) -> dict[str, Json]:
    """`arguments` with what is plainly meant converted and defaults filled in.

    Raises ArgumentError: one short line for the model; UserError for a schema that is none, or too large. The schema is
    compiled once an object: do not change it later.
    """
    entry = _compiled.get(id(parameters))
    if entry is None or entry[0] is not parameters:
        if len(_compiled) >= 1024:  # a schema made anew for every call must not fill the memory
            _compiled.clear()
        entry = _compiled[id(parameters)] = (parameters, _read(parameters))
    patterns.begin()
    try:
        result: dict[str, Json] = entry[1](arguments, "")
    except patterns.TooHardError:
        raise ArgumentError("the arguments take too long to check: write shorter or simpler ones") from None
    finally:
        patterns.end()
    return result


def _read(parameters: Mapping[str, Json]) -> Check:
    """The check of a schema; of one that takes too long to read, a check that says so. It is tried twice: a machine
    that stands still for a second has spent the time of the first."""
    for _ in range(2):
        patterns.begin(_READING_SECONDS)
        try:
            return _arguments(parameters)
        except patterns.TooHardError:
            continue
        finally:
            patterns.end()
    return _unreadable


def _unreadable(value: object, path: str) -> Json:
    raise UserError("a tool's parameters: the JSON schema has too many alternatives within alternatives to be read")


def outline(parameters: Mapping[str, Json]) -> str:
    """What a tool takes, tersely: `{expression: string, digits?: integer}`."""
    required = parameters.get("required", ())
    properties: Mapping[str, Json] = parameters.get("properties", {})
    parts = [f"{name}{'' if name in required else '?'}: {_kind(s, parameters)}" for name, s in properties.items()]
    text = "{" + ", ".join(parts) + "}"
    return text if len(text) <= 200 else "{" + ", ".join(properties) + "}"


def _kind(schema: object, root: Mapping[str, Json], inside: frozenset[str] = frozenset()) -> str:
    if isinstance(schema, Mapping) and "$ref" in schema:
        if schema["$ref"] in inside or len(inside) == 2:  # each further one could multiply what there is to say
            return "any"
        inside |= {schema["$ref"]}
        schema = {k: v for k, v in target(schema["$ref"], root).items() if k != "$ref"}
    if not isinstance(schema, Mapping):
        return "any"
    if schema.get("nullable") is True:
        return f"{_kind(_not_null(schema), root, inside)}|null"
    if "enum" in schema:
        return "|".join(str(v) for v in schema["enum"])
    if options := schema.get("anyOf", schema.get("oneOf")):
        return "|".join(dict.fromkeys(_kind(option, root, inside) for option in options))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema['items'], root, inside)}" if "items" in schema else "list"
    return "|".join(kind) if isinstance(kind, list) else str(kind)


def _not_null(schema: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in schema.items() if key != "nullable"}


def _arguments(parameters: Mapping[str, Json]) -> Check:
    """Compile the top level, where an error also says what the tool takes."""
    properties = parameters.get("properties", {})
    extra = parameters.get("additionalProperties", False)
    top = {**parameters, "type": "object", "additionalProperties": extra, "properties": properties}
    return _object(top, parameters, True, f"; it takes {outline(parameters)}")


def _compile(schema: object, root: Mapping[str, Json], lenient: bool) -> Check:
    patterns.left()
    if schema is True or schema == {}:
        return lambda value, path: value
    if not isinstance(schema, Mapping):
        raise UserError(f"a tool's parameters: {schema!r} is not a JSON schema")
    if schema.get("nullable") is True:
        check = _compile(_not_null(schema), root, lenient)
        return lambda value, path: None if value is None else check(value, path)
    checks: list[Check] = []
    if "$ref" in schema:
        checks.append(_reference(schema["$ref"], root, lenient))
    if "type" in schema:
        checks.append(_typed(schema, root, lenient))
    checks += [_compile(part, root, lenient) for part in schema.get("allOf", ())]
    if options := schema.get("anyOf", schema.get("oneOf")):
        checks.append(_either(options, root, lenient))
    if "enum" in schema or "const" in schema:
        checks.append(_one_of(list(schema.get("enum", [schema.get("const")])), lenient))
    checks += limits(schema)
    if len(checks) == 1:
        return checks[0]

    def every(value: object, path: str) -> Json:
        for check in checks:
            value = check(value, path)
        return value

    return every


def _reference(pointer: str, root: Mapping[str, Json], lenient: bool) -> Check:
    schema = target(pointer, root)
    found: list[Check] = []  # compiled when first used, so a schema may refer to itself

    def check(value: object, path: str) -> Json:
        patterns.left()
        if not found:
            found.append(_compile(schema, root, lenient))
        return found[0](value, path)

    return check


def _typed(schema: Mapping[str, Json], root: Mapping[str, Json], lenient: bool) -> Check:
    kind = schema["type"]
    if isinstance(kind, list):
        return _either([{**schema, "type": one} for one in kind], root, lenient)
    if kind == "object":
        return _object(schema, root, lenient, "")
    if kind == "array":
        return _array(schema, root, lenient)
    if kind not in SCALARS:
        raise UserError(f"a tool's parameters: unknown type {kind!r}")
    return SCALARS[kind](lenient)


def _object(schema: Mapping[str, Json], root: Mapping[str, Json], lenient: bool, takes: str) -> Check:
    properties = {name: _compile(s, root, lenient) for name, s in schema.get("properties", {}).items()}
    described = {name: s for name, s in schema.get("properties", {}).items() if isinstance(s, Mapping)}
    required = list(schema.get("required", ()))
    defaults = {name: s["default"] for name, s in described.items() if "default" in s and name not in required}
    nested = any(isinstance(default, list | dict) for default in defaults.values())
    extra = schema.get("additionalProperties", True)
    rest = None if extra is False else _compile(extra, root, lenient)

    def check(value: object, path: str) -> Json:
        value = _from_text(value, dict) if lenient else value
        if not isinstance(value, Mapping):
            raise ArgumentError(should(path, "be an object", value) + takes)
        result = copy.deepcopy(defaults) if nested else dict(defaults)
        for name, item in value.items():
            inside = f"{path}.{name}" if path else str(name)
            rule = properties.get(name, rest)
            if rule is None:
                raise ArgumentError(f"unknown argument {named(inside)}{takes}")
            if item is None and name in properties and name not in required and lenient and not _allows_null(rule):
                continue
            result[name] = rule(item, inside)
        for name in required:
            if name not in value:
                raise ArgumentError(f"argument {f'{path}.{name}' if path else name!r} is missing{takes}")
        return result

    return check


def _allows_null(rule: Check) -> bool:
    try:
        rule(None, "")
    except ArgumentError:
        return False
    return True


def _array(schema: Mapping[str, Json], root: Mapping[str, Json], lenient: bool) -> Check:
    item = _compile(schema.get("items", True), root, lenient)

    def check(value: object, path: str) -> Json:
        value = _from_text(value, list) if lenient else value
        if not isinstance(value, list):
            raise ArgumentError(should(path, "be a list", value))
        return [item(entry, f"{path}.{i}") for i, entry in enumerate(value)]

    return check


def _either(options: Json, root: Mapping[str, Json], lenient: bool) -> Check:
    """The first option that fits exactly, else the first that fits leniently."""
    checks = [_compile(option, root, False) for option in options]
    if lenient:
        checks += [_compile(option, root, True) for option in options]
    wanted = "|".join(dict.fromkeys(_kind(option, root) for option in options))

    def check(value: object, path: str) -> Json:
        for option in checks:
            patterns.left()
            try:
                return option(value, path)
            except ArgumentError:
                continue
        raise ArgumentError(should(path, f"be {wanted}", value))

    return check


def _one_of(values: list[Json], lenient: bool) -> Check:
    words = {str(v).lower(): v for v in values}

    def check(value: object, path: str) -> Json:
        for known in values:
            if known == value and isinstance(known, bool) == isinstance(value, bool):
                return known
        if lenient and not isinstance(value, list | dict) and str(value).strip().lower() in words:
            return words[str(value).strip().lower()]
        choices = ", ".join(str(v) for v in values)
        raise ArgumentError(should(path, f"be one of {choices}", value))

    return check


def _from_text(value: Json, kind: type) -> Json:
    """A list or object that the model wrote as JSON text once too often; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, kind) else value


def shown(value: object) -> str:
    """A value that the model wrote, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def named(path: str) -> str:
    """An argument's name, which the model may have made up, cut short."""
    return repr(path if len(path) <= 60 else path[:57] + "...")


def should(path: str, words: str, value: object) -> str:
    """The message: which argument, what it should do, what it is."""
    what = f"argument {named(path)}" if path else "the arguments"
    return f"{what} should {words}, got {shown(value)}"


def limits(schema: Mapping[str, Json]) -> list[Check]:
    """The checks of a schema's limits on numbers, lengths and patterns; values of another type pass them."""
    return [_LIMITS[key](bound) for key, bound in schema.items() if key in _LIMITS]


def _bound(
    kind: Json, size: Callable[[Json], Json], holds: Callable[[Json, Json], bool], words: str
) -> Callable[[Json], Check]:
    def with_bound(bound: Any) -> Check:
        def check(value: Json, path: str) -> Json:
            if isinstance(value, kind) and not isinstance(value, bool) and not holds(size(value), bound):
                raise ArgumentError(should(path, words.format(bound), value))
            return value

        return check

    return with_bound


def _itself(value: object) -> Json:
    return value


def _matches(pattern: Json) -> Check:
    try:
        known = patterns.Pattern(pattern)
    except ValueError as error:
        raise UserError(f"a tool's parameters: {error}") from error

    def check(value: object, path: str) -> Json:
        if isinstance(value, str) and not known.found(value):
            raise ArgumentError(should(path, f"match {pattern:.60}", value))
        return value

    return check


_LIMITS: dict[str, Callable[[Json], Check]] = {
    "minimum": _bound(int | float, _itself, operator.ge, "be at least {}"),
    "maximum": _bound(int | float, _itself, operator.le, "be at most {}"),
    "exclusiveMinimum": _bound(int | float, _itself, operator.gt, "be more than {}"),
    "exclusiveMaximum": _bound(int | float, _itself, operator.lt, "be less than {}"),
    "minLength": _bound(str, len, operator.ge, "have {} characters or more"),
    "maxLength": _bound(str, len, operator.le, "have at most {} characters"),
    "minItems": _bound(list, len, operator.ge, "have {} entries or more"),
    "maxItems": _bound(list, len, operator.le, "have at most {} entries"),
    "pattern": _matches,
}


def _scalar(words: str, read: Callable[[Json, bool], object]) -> Callable[[bool], Check]:
    """Make a check, strict or lenient, of `read`, which returns `_UNFIT` for a value that does not fit."""

    def compiled(lenient: bool) -> Check:
        def check(value: object, path: str) -> Json:
            found = read(value, lenient)
            if found is _UNFIT:
                raise ArgumentError(should(path, words, value))
            return found

        return check

    return compiled


_UNFIT = object()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _string(value: object, lenient: bool) -> Json:
    if isinstance(value, str):
        return value
    return json.dumps(value) if lenient and _is_number(value) else _UNFIT


def _integer(value: Json, lenient: bool) -> Json:
    if _is_number(value) and (isinstance(value, int) or value.is_integer()):
        return int(value)
    return int(value) if lenient and isinstance(value, str) and _INTEGER.fullmatch(value.strip()) else _UNFIT


def _number(value: object, lenient: bool) -> Json:
    if _is_number(value):
        return value
    if not lenient or not isinstance(value, str) or len(value) > 4000:
        return _UNFIT
    if _INTEGER.fullmatch(value.strip()):
        return int(value)
    try:
        number = float(value)
    except ValueError:
        return _UNFIT
    return number if math.isfinite(number) else _UNFIT


def _boolean(value: object, lenient: bool) -> Json:
    if lenient and isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower(), _UNFIT)
    return value if isinstance(value, bool) else _UNFIT


SCALARS: dict[str, Callable[[bool], Check]] = {
    "string": _scalar("be a string", _string),
    "integer": _scalar("be an integer", _integer),
    "number": _scalar("be a number", _number),
    "boolean": _scalar("be true or false", _boolean),
    "null": _scalar("be null", lambda value, lenient: value if value is None else _UNFIT),
}
