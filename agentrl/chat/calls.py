"""One call out of its text. No reader raises on what a model may write: what is wrong becomes `ParsedCall.error`."""

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from agentrl.chat.base import ParsedCall
from agentrl.plugins.types import Json

_MAX_LITERAL = 100_000  # characters; Python's parser is not meant for more
MAX_DEPTH = 64
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class CallError(Exception):
    """What is wrong with a call, in words for the model."""


class RepeatedKeyError(CallError):
    """A key of an object, or the name of an argument, that stands twice."""


def once(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """The pairs as a dict. Raises RepeatedKeyError: which of two values is meant, nobody can tell."""
    found: dict[str, Json] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKeyError(f"the key {key[:40]!r} stands twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """A number as a finite float. Raises ValueError where no float is as large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=finite, object_pairs_hook=once)
_SPACE = re.compile(r"\s*")


def read_json(text: str) -> Json:
    """Read strict JSON of bounded depth, with finite numbers and text that can be encoded. Raises CallError."""
    try:
        value = _decoder.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
            raise CallError("it is nested too deeply")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CallError("it holds half of a surrogate pair (\\ud800 to \\udfff)") from error
    except RecursionError as error:
        raise CallError("it is nested too deeply") from error
    except ValueError as error:
        raise CallError(f"it is not valid JSON ({str(error)[:120]})") from error
    return value


def _deeper(value: Json, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_deeper(item, depth - 1) for item in items)


def after_space(text: str, at: int) -> int:
    """The position of the first character from `at` on that is not white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


_CUT = 16  # characters before a text's end at which an error may be that of a value that goes on

_LEAST = 64


def json_end(text: str, at: int, first: int) -> tuple[int, int]:
    """Where the JSON value at `at`, and the white space around it, ends (-1 where none stands there), and how
    many characters were read for that: a few times as many as it has, or as stand before what is wrong with it.

    first: up to where it is read at first, then ever further. An error of `json` costs as much as all that it is given.
    """
    at = after_space(text, at)
    size, read = max(first - at, _LEAST), 0
    while True:
        piece = text[at : at + size]
        read += len(piece)
        last = at + size >= len(text)
        try:
            end = _decoder.raw_decode(piece)[1]
            if last or end < len(piece):
                return after_space(text, at + end), read
        except json.JSONDecodeError as error:
            if last or not (error.msg.startswith("Unterminated") or error.pos > len(piece) - _CUT):
                return -1, read
        except (ValueError, RecursionError, CallError):
            return -1, read
        size *= 2


UNREADABLE = "this tool call cannot be read"
"""How the error of a call begins of which no reader makes a name and arguments."""


def failed(raw: str, why: object, name: str = "") -> ParsedCall:
    """A call that cannot be run. raw: as the model wrote it; why: ends the error that the model reads."""
    return ParsedCall(name, {}, raw, f"{UNREADABLE}: {why}")


def call_of(value: Json, raw: str) -> ParsedCall:
    """A call from `{"name": ..., "arguments": {...}}` (or `parameters`, or arguments as a JSON string)."""
    if not isinstance(value, dict):
        return failed(raw, f"it must be a JSON object with name and arguments, not {_kind(value)}")
    identity = value.get("id", value.get("tool_call_id"))
    if "name" not in value and isinstance(value.get("function"), dict):
        value = value["function"]
    return identified(_call_of(value, raw), identity)


def identified(call: ParsedCall, identity: object) -> ParsedCall:
    """The call with the id that the model wrote, if it wrote one."""
    return replace(call, id=identity) if isinstance(identity, str) and identity else call


def _call_of(value: dict[str, Json], raw: str) -> ParsedCall:
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        return failed(raw, 'it has no "name" of a tool')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except CallError as error:
            return failed(raw, f'"arguments": {error}', name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return failed(raw, f'"arguments" must be a JSON object, not {_kind(arguments)}', name)
    return ParsedCall(name, arguments, raw)


def calls_of_json(body: str, raw: str) -> list[ParsedCall]:
    """The call, or the list of calls, that a JSON text holds."""
    try:
        value = read_json(body)
    except CallError as error:
        return [failed(raw, error)]
    if isinstance(value, list):
        return [call_of(one, raw) for one in value] or [failed(raw, "the list of calls is empty")]
    return [call_of(value, raw)]


def named_json(name: str, body: str, raw: str) -> ParsedCall:
    """A call whose name stands before its JSON arguments."""
    name = name.strip()
    if not name:
        return failed(raw, "it has no name of a tool")
    try:
        value = read_json(body)
    except CallError as error:
        return failed(raw, error, name)
    if not isinstance(value, dict):
        return failed(raw, f"the arguments must be a JSON object, not {_kind(value)}", name)
    return ParsedCall(name, value, raw)


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


class Schemas:
    """What types the tools' parameters have, for formats that write values without quotes."""

    def __init__(self, tools: Sequence[Mapping[str, Json]]) -> None:
        self._types: dict[str, dict[str, frozenset[str]]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            properties = function.get("parameters", {}).get("properties", {})
            self._types[function["name"]] = {key: _types(schema) for key, schema in properties.items()}

    def values(self, tool: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Json]:
        """Arguments written as texts without quotes, by name. Raises RepeatedKeyError."""
        return once((key.strip(), self.value(tool, key.strip(), text)) for key, text in pairs)

    def value(self, tool: str, key: str, text: str) -> Json:
        """The value that an unquoted text means: JSON where the schema allows that type, else the text itself.

        Raises RepeatedKeyError for an object with a key twice where the schema allows no text."""
        types = self._types.get(tool, {}).get(key, frozenset())
        if types == {"string"}:
            return text
        try:
            value = read_json(_PYTHON_WORDS.get(text.strip(), text))
        except CallError as error:
            if isinstance(error, RepeatedKeyError) and "string" not in types:
                raise
            return text
        kind = _kind(value)
        if not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types:
            return value
        return text


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    found = schema.get("type")
    types = (
        {found}
        if isinstance(found, str)
        else {t for t in found if isinstance(t, str)}
        if isinstance(found, list)
        else set()
    )
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(branch)
    if not types and all(isinstance(one, str) for one in schema.get("enum", (0,))):
        types = {"string"}
    return frozenset(types)


def calls_of_python(body: str, raw: str) -> list[ParsedCall]:
    """Calls written as Python: `[name(key='value', other=3)]`. Literals only; nothing is run."""
    if len(body) > _MAX_LITERAL:
        return [failed(raw, f"it is longer than {_MAX_LITERAL} characters")]
    try:
        node = _parsed_python(body)
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        return [_python_call(one, raw) for one in nodes] or [failed(raw, "the list of calls is empty")]
    except CallError as error:
        return [failed(raw, error)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [failed(raw, f"it is not a list of calls such as [name(key='value')] ({str(error)[:80]})")]


_VERBATIM = re.compile(
    r"""(?P<lead>[(,]\s*\w+\s*=\s*)'(?P<text>.*?)"""
    r"""(?:'(?=\s*(?:,\s*[^\W\d]\w*\s*=|\)\s*(?:,\s*[^\W\d][\w.]*\(|\]?\s*\Z)))|(?P<open>\Z))""",
    re.DOTALL,
)
"""A text between quotes as templates write it that escape nothing in it: it ends where the call goes on."""


def _parsed_python(body: str) -> ast.expr:
    """Parse an expression, within limits. Raises what `ast.parse` raises."""
    body = body.strip()
    try:
        return ast.parse(_without_nul(body), mode="eval").body
    except SyntaxError:
        quoted = _VERBATIM.sub(lambda m: m.group() if m["open"] is not None else m["lead"] + repr(m["text"]), body)
        if quoted == body:
            raise
    return ast.parse(_without_nul(quoted), mode="eval").body


def _without_nul(code: str) -> str:
    """Escape null characters, which Python's parser refuses."""
    return code.replace("\0", "\\x00")


def _python_call(node: ast.expr, raw: str) -> ParsedCall:
    if not isinstance(node, ast.Call):
        raise CallError("it must be name(key='value')")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return failed(raw, "arguments must be given by name, as key='value'", name)
    try:
        arguments = once((str(keyword.arg), _literal(keyword.value, 0)) for keyword in node.keywords)
    except RepeatedKeyError as error:
        return failed(raw, error, name)
    return ParsedCall(name, arguments, raw)


def _literal(node: ast.expr | None, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise CallError("it is nested too deeply")
    match node:
        case ast.Constant(value=str() as value):
            return _sound(value)
        case ast.Constant(value=int() | float() | bool() | None as value):
            return _bounded(value)
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)  # a key is None where `**` stands
            return once((str(_literal(k, depth + 1)), _literal(v, depth + 1)) for k, v in pairs)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -_bounded(value)
    raise CallError("arguments must be plain values")


def _bounded(value: object) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        raise CallError("a number is too large")
    return value


def _sound(text: str) -> str:
    """The text with its surrogate pairs, as JSON writes them, made one character each."""
    try:
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise CallError("it holds half of a surrogate pair (\\ud800 to \\udfff)") from error


def tagged_values(
    body: str, at: int, head: re.Pattern[str], tail: re.Pattern[str]
) -> tuple[list[tuple[str, str]], int]:
    """The pairs of a head's text (its first group) and the value up to the next `tail`, in a row from `at` on,
    and where they end. Raises CallError with the head of a value that nothing closes."""
    pairs = []
    while match := head.match(body, at):
        end = tail.search(body, match.end())
        if end is None:
            raise CallError(match.group(1))
        pairs.append((match.group(1), body[match.end() : end.start()]))
        at = end.end()
    return pairs, at


def trimmed(value: str) -> str:
    """A value without the one line break that templates put on either side of it."""
    return value.removeprefix("\n").removesuffix("\n")
