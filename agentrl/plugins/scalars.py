"""Checks of single values that a model wrote: strings, numbers, booleans, and the limits that a JSON schema sets.

A check takes the value and its path (for the message), and returns it as the tool wants it or raises ArgumentError.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins.patterns import Pattern
from agentrl.plugins.types import ArgumentError

Check = Callable[[Any, str], Any]
_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}")


def shown(value: Any) -> str:
    """A value that the model wrote, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def named(path: str) -> str:
    """An argument's name, which the model may have made up, cut short."""
    return repr(path if len(path) <= 60 else path[:57] + "...")


def should(path: str, words: str, value: Any) -> str:
    """The message: which argument, what it should do, what it is."""
    what = f"argument {named(path)}" if path else "the arguments"
    return f"{what} should {words}, got {shown(value)}"


def limits(schema: Mapping[str, Any]) -> list[Check]:
    """The checks of a schema's limits on numbers, lengths and patterns; values of another type pass them."""
    return [_LIMITS[key](bound) for key, bound in schema.items() if key in _LIMITS]


def _bound(
    kind: Any, size: Callable[[Any], Any], holds: Callable[[Any, Any], bool], words: str
) -> Callable[[Any], Check]:
    def with_bound(bound: Any) -> Check:
        def check(value: Any, path: str) -> Any:
            if isinstance(value, kind) and not isinstance(value, bool) and not holds(size(value), bound):
                raise ArgumentError(should(path, words.format(bound), value))
            return value

        return check

    return with_bound


def _itself(value: Any) -> Any:
    return value


def _matches(pattern: Any) -> Check:
    try:
        known = Pattern(pattern)
    except ValueError as error:
        raise UserError(f"a tool's parameters: {error}") from error

    def check(value: Any, path: str) -> Any:
        if isinstance(value, str) and not known.found(value):
            raise ArgumentError(should(path, f"match {pattern:.60}", value))
        return value

    return check


_LIMITS: dict[str, Callable[[Any], Check]] = {
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


def _string(lenient: bool) -> Check:
    def check(value: Any, path: str) -> Any:
        if isinstance(value, str):
            return value
        if lenient and isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)
        raise ArgumentError(should(path, "be a string", value))

    return check


def _integer(lenient: bool) -> Check:
    def check(value: Any, path: str) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if lenient and isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        raise ArgumentError(should(path, "be an integer", value))

    return check


def _number(lenient: bool) -> Check:
    def check(value: Any, path: str) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if lenient and isinstance(value, str) and len(value) <= 4000:
            if _INTEGER.fullmatch(value.strip()):
                return int(value)
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if math.isfinite(number):
                return number
        raise ArgumentError(should(path, "be a number", value))

    return check


def _boolean(lenient: bool) -> Check:
    def check(value: Any, path: str) -> Any:
        if isinstance(value, bool):
            return value
        if lenient and isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        raise ArgumentError(should(path, "be true or false", value))

    return check


def _null(lenient: bool) -> Check:
    def check(value: Any, path: str) -> Any:
        if value is None:
            return None
        raise ArgumentError(should(path, "be null", value))

    return check


SCALARS: dict[str, Callable[[bool], Check]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
}
