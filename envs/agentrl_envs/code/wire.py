"""Plain values as hexadecimal text, between this process and the sandboxes. Its source also runs inside them.

A solution owns its interpreter and may make this code there say anything. What is read here is therefore a claim about
a value, never code: numbers, texts, lists, tuples, sets and dicts, whose `==` is Python's own.
"""

import json


class WireError(ValueError):
    """A value that cannot be written, or text that is none."""


def write(value):
    """The text of a value. Raises WireError for what is not plain."""
    return json.dumps(_encoded(value)).encode().hex()


def read(text):
    """The value of a text. Raises WireError."""
    try:
        return _decoded(json.loads(bytes.fromhex(text)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise WireError(f"{type(error).__name__} in what came back") from error


def call(names, name, arguments):
    """What the function `name` returns, as text. arguments: the text of (positional, named)."""
    if name not in names:
        raise NameError(f"there is no {name}")
    positional, named = read(arguments)
    return write(names[name](*positional, **named))


def _encoded(value):
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[_encoded(k), _encoded(v)] for k, v in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_encoded(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return _encoded(value.tolist())
    raise WireError(f"a {type(value).__name__} is not a plain value")


def _decoded(value):
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise WireError("a bare list")
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {_decoded(k): _decoded(v) for k, v in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](_decoded(item) for item in inner)
