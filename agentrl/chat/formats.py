"""The ways in which templates write tool calls. Each reader is linear in the text and raises on none."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from agentrl.chat.base import ParsedCall
from agentrl.chat.calls import (
    CallError,
    RepeatedKeyError,
    Schemas,
    after_space,
    calls_of_json,
    calls_of_python,
    failed,
    identified,
    json_end,
    named_json,
    once,
    tagged_values,
    trimmed,
)
from agentrl.chat.gemma import gemma_end, read_gemma_arguments


@dataclass(slots=True)
class Reading:
    """An assistant's text taken apart."""

    content: list[str] = field(default_factory=list)
    """Pieces of text outside of calls and thoughts."""
    calls: list[ParsedCall] = field(default_factory=list)
    """Calls in the order in which they were written."""
    reasoning: list[str] = field(default_factory=list)
    """Pieces of thinking."""


CHANNELS, BARE = "channels", "bare JSON"

BodyReader = Callable[[str, str, Schemas], list[ParsedCall]]
"""(what stands between the tags, the same with its tags, the tools' types) -> calls."""

Reach = Callable[[str, int, int], tuple[int, int]]
"""(text, where a call's body begins, where its closing tag first stands) -> where that tag stands if values may hold it
(-1 where the body's grammar does not tell, the text's length where it stands nowhere), and how many characters were
read to find that."""


@dataclass(frozen=True, slots=True)
class Format:
    """name: for people. marker: what must occur in a text with calls. read: text, whether the turn ended, types.
    dropped: wrappers around all calls, which are no content."""

    name: str
    marker: str
    read: Callable[[str, bool, Schemas], Reading]
    dropped: tuple[str, ...] = ()


_AGAIN = 8
"""How often the characters of a text may be read again, on average."""


@dataclass(slots=True)
class _Bodies:
    """Reads the bodies of a text's calls, each up to the first closing tag with which it is whole.

    left: how many characters may be read a second time, which keeps the whole linear."""

    text: str
    schemas: Schemas
    body: BodyReader
    reach: Reach
    left: int

    def read(self, start: int, inner: int, end: int, closing: int) -> tuple[list[ParsedCall], int]:
        """The calls of the body at `inner`, and where its tag of `closing` characters stands: at `end`, or
        later."""
        calls = self.body(self.text[inner:end], self.text[start : end + closing], self.schemas)
        if not any(call.error for call in calls) or self.left <= 0:
            return calls, end
        later, read = self.reach(self.text, inner, end)
        self.left -= read
        if end < later < len(self.text):
            reread = self.body(self.text[inner:later], self.text[start : later + closing], self.schemas)
            if not any(call.error for call in reread):
                return reread, later
        return calls, end


def _tagged(
    name: str, opening: str, closing: str, body: BodyReader, reach: Reach, *, drop: Iterable[str] = ()
) -> Format:
    """Calls between two tags. `drop`: wrappers around all calls, which are no content."""
    dropped = tuple(drop)

    def read(text: str, closed: bool, schemas: Schemas) -> Reading:
        reading = Reading()
        bodies = _Bodies(text, schemas, body, reach, _AGAIN * len(text))
        at = 0
        while (start := text.find(opening, at)) >= 0:
            reading.content.append(text[at:start])
            inner = start + len(opening)
            end = text.find(closing, inner)
            if end < 0:
                reading.calls.append(failed(text[start:], f"it is not closed by {closing}"))
                at = len(text)
                break
            calls, end = bodies.read(start, inner, end, len(closing))
            reading.calls += calls
            at = end + len(closing)
        reading.content.append(text[at:])
        for wrapper in dropped:
            reading.content = [piece.replace(wrapper, "") for piece in reading.content]
        return reading

    return Format(name, opening, read, dropped)


def _after_json(*leads: str, closing: str, tail: str = "") -> Reach:
    """The closing tag after a JSON value, which stands after the first of `leads` that is found."""

    def reach(text: str, at: int, first: int) -> tuple[int, int]:
        for lead in leads:
            if (found := text.find(lead, at, first)) >= 0:
                at = found + len(lead)
                break
        end, read = json_end(text, at, first)
        if end >= 0 and tail and text.startswith(tail, end):
            end = after_space(text, end + len(tail))
        return end if end >= 0 and text.startswith(closing, end) else -1, read

    return reach


def _after_tags(pattern: str) -> Reach:
    """The closing tag in the first match, which a group of it holds. The pattern also finds where a call that is
    not whole ends and another one begins: that one must not become a value of this one."""
    ends = re.compile(pattern)

    def reach(text: str, at: int, first: int) -> tuple[int, int]:
        match = ends.search(text, at)
        if match is None:
            return len(text), len(text) - at
        return match.start(match.lastindex or 0), match.end() - at

    return reach


_PYTHON_TEXT = r"""'''(?:[^\\]|\\.)*?(?:'''|\Z)|'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?"""


def _outside_of_texts(closing: str) -> Reach:
    """The closing tag that stands in none of Python's texts."""
    pieces = re.compile(f"{_PYTHON_TEXT}|({re.escape(closing)})", re.DOTALL)

    def reach(text: str, at: int, first: int) -> tuple[int, int]:
        found = (match.start() for match in pieces.finditer(text, at) if match.group(1) is not None)
        end = next(found, len(text))
        return end, end - at

    return reach


def _gemma_reach(text: str, at: int, first: int) -> tuple[int, int]:
    opening = text.find("{", at, first)
    end, read = gemma_end(text, opening) if opening >= 0 else (-1, 0)
    end = after_space(text, end) if end >= 0 else -1
    return end if end >= 0 and text.startswith("<tool_call|>", end) else -1, read


def _json_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    return calls_of_json(body.strip(), raw)


def _python_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    return calls_of_python(body, raw)


_FUNCTION = re.compile(r"\s*<function=([^<>]*)>")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>\s*(?:<function=|\Z)|\Z))")


def _function_tags(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """`<function=name>` around `<parameter=key>` value `</parameter>`."""
    calls: list[ParsedCall] = []
    at = max(body.find("<function="), 0)
    while at < len(body) or not calls:
        head = _FUNCTION.match(body, at)
        if head is None or not (name := head.group(1).strip()):
            return [*calls, failed(raw, "it has no <function=name>")]
        try:
            pairs, at = tagged_values(body, head.end(), _PARAMETER, _PARAMETER_END)
        except CallError as error:
            key = str(error)[:40].strip()
            return [*calls, failed(raw, f"the parameter {key!r} is not closed by </parameter>", name)]
        end = _FUNCTION_END.match(body, at)
        if end is None:
            return [*calls, failed(raw, "<function=...> is not closed by </function>", name)]
        at = end.end()
        try:
            found = schemas.values(name, ((key, trimmed(value)) for key, value in pairs))
        except RepeatedKeyError as error:
            return [*calls, failed(raw, error, name)]
        calls.append(ParsedCall(name, found, raw))
    return calls


_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")


def _argument_tags(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """A name, then `<arg_key>` key `</arg_key>` `<arg_value>` value `</arg_value>` by turns."""
    head = body.partition("<arg_key>")[0]
    name = head.strip()
    if not name:
        return [failed(raw, "it has no name of a tool before <arg_key>")]
    try:
        pairs, at = tagged_values(body, len(head), _KEY, _VALUE_END)
        if body[at:].strip():
            raise CallError(body[at:].partition("<arg_key>")[2].partition("</arg_key>")[0])
    except CallError as error:
        why = f"the argument {str(error)[:40].strip()!r} has no closed <arg_key> and <arg_value>"
        return [failed(raw, why, name)]
    try:
        return [ParsedCall(name, schemas.values(name, pairs), raw)]
    except RepeatedKeyError as error:
        return [failed(raw, error, name)]


def _invoke_tags(prefix: str) -> BodyReader:
    """`<invoke name="...">` around `<parameter name="...">` value `</parameter>`, each with a prefix."""
    opening, closing = f"<{prefix}invoke", f"</{prefix}invoke>"
    invoke, invoke_end = re.compile(rf"\s*{opening}\b([^>]*)>"), re.compile(rf"\s*{closing}\s*")
    parameter = re.compile(rf"\s*<{prefix}parameter\b([^>]*)>")
    parameter_end = re.compile(
        rf"</{prefix}parameter>(?=\s*(?:<{prefix}parameter\b|{closing}\s*(?:{opening}\b|\Z)|\Z))"
    )

    def read(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
        calls: list[ParsedCall] = []
        at = body.find(opening)
        if at < 0:
            return [failed(raw, f'it has no {opening} name="...">')]
        while at < len(body):
            head = invoke.match(body, at)
            if head is None or not (name := _attribute(head.group(1))):
                return [*calls, failed(raw, f"{opening} name=...> has no name or is not closed")]
            try:
                pairs, at = tagged_values(body, head.end(), parameter, parameter_end)
                arguments = once(_parameter(name, *pair, schemas) for pair in pairs)
            except RepeatedKeyError as error:
                return [*calls, failed(raw, error, name)]
            except CallError:
                return [*calls, failed(raw, f"a <{prefix}parameter name=...> has no name or is not closed", name)]
            end = invoke_end.match(body, at)
            if end is None:
                return [*calls, failed(raw, f"{opening} name=...> is not closed by {closing}", name)]
            at = end.end()
            calls.append(ParsedCall(name, arguments, raw))
        return calls

    def _parameter(name: str, head: str, value: str, schemas: Schemas) -> tuple[str, object]:
        key = _attribute(head)
        if not key:
            raise CallError(head)
        return key, value if 'string="true"' in head else schemas.value(name, key, value)

    return read


def _invoke_reach(prefix: str, opening: str, closing: str) -> Reach:
    return _after_tags(rf"</{prefix}invoke>\s*({closing})|({closing})\s*{opening}\s*<{prefix}invoke\b")


def _attribute(head: str) -> str:
    value = head.partition("name=")[2].lstrip()
    if value[:1] in ('"', "'"):
        return value[1:].partition(value[0])[0]
    return value.partition(" ")[0]


def _deepseek_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """`function<sep>name` and a fenced JSON, or `name<sep>` and JSON."""
    first, mark, rest = body.partition("<｜tool▁sep｜>")
    if not mark:
        return [failed(raw, "it has no <｜tool▁sep｜>")]
    name, fence, fenced = rest.partition("\n```json\n")
    if fence:
        return [named_json(name, fenced.strip().removesuffix("```"), raw)]
    return [named_json(first, rest, raw)]


def _kimi_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """`functions.name:0<|tool_call_argument_begin|>` and JSON. The id is what the results must name."""
    head, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    if not mark:
        return [failed(raw, "it has no <|tool_call_argument_begin|>")]
    name = head.strip().removeprefix("functions.").rpartition(":")[0] or head.strip()
    return [identified(named_json(name, arguments, raw), head.strip())]


def _gemma_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """`call:name{key:value,...}`."""
    name, mark, _ = body.strip().removeprefix("call:").partition("{")
    if not mark or not name.strip():
        return [failed(raw, "it is not call:name{key:value}")]
    arguments, error = read_gemma_arguments(body.strip().removeprefix("call:")[len(name) :])
    return [failed(raw, error, name.strip()) if error else ParsedCall(name.strip(), arguments, raw)]


def _read_bare(text: str, closed: bool, schemas: Schemas) -> Reading:
    """Read a turn that is one JSON call, perhaps after `<|python_tag|>`, perhaps several with `;` between."""
    stripped = text.strip()
    tagged = stripped.startswith("<|python_tag|>")
    body = stripped.removeprefix("<|python_tag|>").strip()
    if not (body.startswith("{") and (tagged or '"name"' in body[:400])):
        return Reading([text])
    calls: list[ParsedCall] = []
    at = 0
    while (end := json_end(body, at, at)[0]) >= 0 and body.startswith(";", end):
        calls += calls_of_json(body[at:end], body[at:end])
        at = end + 1
    return Reading([], calls + calls_of_json(body[at:].strip(), body[at:] if calls else stripped))


_MISTRAL = "[TOOL_CALLS]"


def _read_mistral(text: str, closed: bool, schemas: Schemas) -> Reading:
    """`[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` once a call, perhaps with
    `[CALL_ID]id`."""
    start = text.find(_MISTRAL)
    reading = Reading([text[:start]] if start >= 0 else [text])
    bodies = _Bodies(text + _MISTRAL, schemas, _mistral_body, _mistral_reach, _AGAIN * len(text))
    while 0 <= start < len(text):
        inner = start + len(_MISTRAL)
        calls, start = bodies.read(start, inner, bodies.text.find(_MISTRAL, inner), 0)
        reading.calls += calls
    return reading


def _mistral_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    inner = body.strip()
    if inner[:1] in ("[", "{") and not inner.startswith("[ARGS]"):
        return calls_of_json(inner, raw)
    head, _, _ = inner.partition("{")
    head, mark, _ = head.partition("[ARGS]")
    name, _, identity = head.partition("[CALL_ID]")
    return [identified(named_json(name, inner[len(head) + len(mark) :], raw), identity.strip())]


def _mistral_reach(text: str, at: int, first: int) -> tuple[int, int]:
    lists = text.startswith("[", after_space(text, at))
    brace = at if lists else text.find("{", at, first)
    end, read = json_end(text, brace, first) if brace >= 0 else (-1, 0)
    return end if end >= 0 and text.startswith(_MISTRAL, end) else -1, read


_muse_body = _invoke_tags("atem:")
START, MESSAGE = "<|start|>assistant", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>", START)
MUSE, _MUSE_END = "<atem:function_calls>", "</atem:function_calls>"
_MUSE_REACH = re.compile(rf"</atem:invoke>\s*{_MUSE_END}")
_MESSAGE_END = re.compile("|".join(map(re.escape, MESSAGE_ENDS)))


def _read_channels(text: str, closed: bool, schemas: Schemas) -> Reading:
    """Messages with headers (`to=`, `<|channel|>`), the first of which stands in the generation prompt."""
    reading = Reading()
    whole, left = text + START, _AGAIN * len(text)
    at = 0
    while at < len(text):
        start = at + len(START) if whole.startswith(START, at) else at
        following = whole.find(START, start)
        mark = whole.find(MESSAGE, start, following)
        if mark < 0:
            reading.content.append(whole[start:following])
            at = following
            continue
        to, thought = recipient(whole[start:mark])
        inner = mark + len(MESSAGE)
        end = _message_end(whole, inner)
        if thought:
            reading.reasoning.append(whole[inner:end])
        elif to in ("", "user") and not _is_muse(whole[inner:end]):
            reading.content.append(whole[inner:end])
        elif end == len(text) and not closed and not _is_muse(whole[inner:end]):
            reading.calls.append(failed(whole[start:end], "it is not finished", to))
        else:
            if to in ("", "user"):
                reading.content.append(whole[inner:end].partition(MUSE)[0])
            bodies = _Bodies(whole, schemas, partial(_message_body, to), _message_reach, left)
            calls, end = bodies.read(start, inner, end, 0)
            reading.calls += calls
            left = bodies.left
        at = whole.find(START, end)
    return reading


def _message_end(text: str, at: int) -> int:
    match = _MESSAGE_END.search(text, at)
    assert match is not None  # the caller put one at the end
    return match.start()


def recipient(head: str) -> tuple[str, bool]:
    """Whom a message is for, and whether it is a thought."""
    to = head.partition("to=")[2].partition("<")[0].strip().partition(" ")[0]
    channel = head.partition("<|channel|>")[2].strip().partition(" ")[0].partition("<")[0]
    return to.removeprefix("functions."), to == "self" or channel == "analysis"


def _is_muse(body: str) -> bool:
    return MUSE in body and not body.lstrip().startswith("{")


def _message_body(to: str, body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    if not _is_muse(body):
        return [named_json(to, body, raw)]
    inner, ended, _ = body.partition(MUSE)[2].rpartition(_MUSE_END)
    return _muse_body(inner, raw, schemas) if ended else [failed(raw, f"it is not closed by {_MUSE_END}", to)]


def _message_reach(text: str, at: int, first: int) -> tuple[int, int]:
    if not _is_muse(text[at:first]):
        end, read = json_end(text, at, first)
    else:
        match = _MUSE_REACH.search(text, at)
        if match is None:
            return len(text), len(text) - at
        end, read = match.end(), match.end() - at
    return end if end >= 0 and _MESSAGE_END.match(text, end) else -1, read


def _json_in(name: str, opening: str, closing: str) -> Format:
    return _tagged(name, opening, closing, _json_body, _after_json(closing=closing))


def _invokes_in(name: str, opening: str, closing: str, prefix: str) -> Format:
    return _tagged(name, opening, closing, _invoke_tags(prefix), _invoke_reach(prefix, opening, closing))


HERMES = _json_in("Hermes JSON in <tool_call>", "<tool_call>", "</tool_call>")
FORMATS = (
    HERMES,
    _tagged(
        "function tags in <tool_call>",
        "<tool_call>",
        "</tool_call>",
        _function_tags,
        _after_tags(
            r"(?:</parameter>|<function=[^<>]*>)\s*</function>\s*(</tool_call>)"
            r"|(</tool_call>)\s*<tool_call>\s*<function="
        ),
    ),
    _tagged(
        "argument tags in <tool_call>",
        "<tool_call>",
        "</tool_call>",
        _argument_tags,
        _after_tags(r"</arg_value>\s*(</tool_call>)|(</tool_call>)\s*<tool_call>[^<]*<(?:arg_key|/tool_call)>"),
    ),
    _tagged("gemma calls", "<|tool_call>", "<tool_call|>", _gemma_body, _gemma_reach, drop=("<|tool_response>",)),
    _tagged(
        "Python calls", "<|tool_call_start|>", "<|tool_call_end|>", _python_body, _outside_of_texts("<|tool_call_end|>")
    ),
    _tagged(
        "DeepSeek calls",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek_body,
        _after_json("\n```json\n", "<｜tool▁sep｜>", closing="<｜tool▁call▁end｜>", tail="```"),
        drop=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    _tagged(
        "Kimi calls",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _kimi_body,
        _after_json("<|tool_call_argument_begin|>", closing="<|tool_call_end|>"),
        drop=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    _invokes_in("MiniMax calls", "<minimax:tool_call>", "</minimax:tool_call>", ""),
    _invokes_in("DSML calls", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    _json_in("JSON in <|START_ACTION|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    _json_in("JSON in <|tool_call|>", "<|tool_call|>", "<|/tool_call|>"),
    _json_in("JSON in <function_call>", "<function_call>", "</function_call>"),
    Format("Mistral calls", _MISTRAL, _read_mistral),
    Format(CHANNELS, MESSAGE, _read_channels),
    Format(BARE, "{", _read_bare),
)
