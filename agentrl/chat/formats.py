"""The ways in which templates write tool calls. Each reader is linear in the text and raises on none."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agentrl.chat.base import ParsedCall
from agentrl.chat.calls import (
    Schemas,
    calls_of_json,
    calls_of_python,
    failed,
    named_json,
    tagged_pairs,
    trimmed,
)
from agentrl.chat.gemma import read_gemma_arguments


@dataclass(slots=True)
class Reading:
    """An assistant's text taken apart."""

    content: list[str] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)


BodyReader = Callable[[str, str, Schemas], list[ParsedCall]]
"""(what stands between the tags, the same with its tags, the tools' types) -> calls."""


@dataclass(frozen=True, slots=True)
class Format:
    """name: for people. marker: what must occur in a text with calls. read: text, whether the turn ended, types."""

    name: str
    marker: str
    read: Callable[[str, bool, Schemas], Reading]


def _tagged(name: str, opening: str, closing: str, body: BodyReader, *, drop: Iterable[str] = ()) -> Format:
    """Calls between two tags. `drop`: wrappers around all calls, which are no content."""
    dropped = tuple(drop)

    def read(text: str, closed: bool, schemas: Schemas) -> Reading:
        reading = Reading()
        at = 0
        while (start := text.find(opening, at)) >= 0:
            reading.content.append(text[at:start])
            inner = start + len(opening)
            end = text.find(closing, inner)
            if end < 0:
                reading.calls.append(failed(text[start:], f"it is not closed by {closing}"))
                at = len(text)
                break
            at = end + len(closing)
            reading.calls += body(text[inner:end], text[start:at], schemas)
        reading.content.append(text[at:])
        for wrapper in dropped:
            reading.content = [piece.replace(wrapper, "") for piece in reading.content]
        return reading

    return Format(name, opening, read)


def _json_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    return calls_of_json(body.strip(), raw)


def _python_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    return calls_of_python(body, raw)


def _function_tags(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """`<function=name>` around `<parameter=key>` value `</parameter>`."""
    start = body.find("<function=")
    end = body.find(">", start)
    if start < 0 or end < 0 or not (name := body[start + 10 : end].strip()):
        return [failed(raw, "it has no <function=name>")]
    if body.find("</function>", end) < 0:
        return [failed(raw, "<function=...> is not closed by </function>", name)]
    arguments = {}
    for pair, closed in tagged_pairs(body[end:], "<parameter=", "</parameter>"):
        key, mark, value = pair.partition(">")
        if not closed or not mark:
            return [failed(raw, f"the parameter {key[:40].strip()!r} is not closed by </parameter>", name)]
        arguments[key.strip()] = schemas.value(name, key.strip(), trimmed(value))
    return [ParsedCall(name, arguments, raw)]


def _argument_tags(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """A name, then `<arg_key>` key `</arg_key>` `<arg_value>` value `</arg_value>` by turns."""
    name = body.partition("<arg_key>")[0].strip()
    if not name:
        return [failed(raw, "it has no name of a tool before <arg_key>")]
    arguments = {}
    for chunk in body.split("<arg_key>")[1:]:
        key, mark, rest = chunk.partition("</arg_key>")
        _, opened, value = rest.partition("<arg_value>")
        value, ended, _ = value.partition("</arg_value>")
        if not (mark and opened and ended):
            return [failed(raw, f"the argument {key[:40].strip()!r} has no closed <arg_key> and <arg_value>", name)]
        arguments[key.strip()] = schemas.value(name, key.strip(), trimmed(value))
    return [ParsedCall(name, arguments, raw)]


def _invoke_tags(prefix: str) -> BodyReader:
    """`<invoke name="...">` around `<parameter name="...">` value `</parameter>`, each with a prefix."""

    def read(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
        calls = []
        for invoke, closed in tagged_pairs(body, f"<{prefix}invoke", f"</{prefix}invoke>"):
            head, mark, inner = invoke.partition(">")
            name = _attribute(head)
            if not closed or not mark or not name:
                calls.append(failed(raw, f"<{prefix}invoke name=...> has no name or is not closed", name))
                continue
            calls.append(_parameters(name, inner, raw, schemas))
        return calls or [failed(raw, f'it has no <{prefix}invoke name="...">')]

    def _parameters(name: str, inner: str, raw: str, schemas: Schemas) -> ParsedCall:
        arguments = {}
        for pair, closed in tagged_pairs(inner, f"<{prefix}parameter", f"</{prefix}parameter>"):
            head, mark, value = pair.partition(">")
            key = _attribute(head)
            if not closed or not mark or not key:
                return failed(raw, f"a <{prefix}parameter name=...> has no name or is not closed", name)
            text = 'string="true"' in head
            arguments[key] = value if text else schemas.value(name, key, value)
        return ParsedCall(name, arguments, raw)

    return read


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
    call = named_json(name, arguments, raw)
    return [ParsedCall(call.name, call.arguments, call.raw, call.error, head.strip())]


def _gemma_body(body: str, raw: str, schemas: Schemas) -> list[ParsedCall]:
    """`call:name{key:value,...}`."""
    name, mark, _ = body.strip().removeprefix("call:").partition("{")
    if not mark or not name.strip():
        return [failed(raw, "it is not call:name{key:value}")]
    arguments, error = read_gemma_arguments(body.strip().removeprefix("call:")[len(name) :])
    return [failed(raw, error, name.strip()) if error else ParsedCall(name.strip(), arguments, raw)]


def _read_bare(text: str, closed: bool, schemas: Schemas) -> Reading:
    """The whole turn is a JSON call, perhaps after `<|python_tag|>`, perhaps several with `;` between."""
    stripped = text.strip()
    tagged = stripped.startswith("<|python_tag|>")
    body = stripped.removeprefix("<|python_tag|>").strip()
    if not (body.startswith("{") and (tagged or '"name"' in body[:400])):
        return Reading([text])
    calls = calls_of_json(body, stripped)
    if calls[0].error and ";" in body:
        calls = [call for part in body.replace("};", "}\0").split("\0") for call in calls_of_json(part.strip(), part)]
    return Reading([], calls)


def _read_mistral(text: str, closed: bool, schemas: Schemas) -> Reading:
    """`[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` once a call."""
    first, *rest = text.split("[TOOL_CALLS]")
    reading = Reading([first])
    for body in rest:
        raw, inner = "[TOOL_CALLS]" + body, body.strip()
        if inner[:1] in "[{":
            reading.calls += calls_of_json(inner, raw)
            continue
        mark = "[ARGS]" if "[ARGS]" in inner else "{"
        name, found, arguments = inner.partition(mark)
        arguments = arguments if mark == "[ARGS]" else found + arguments
        reading.calls.append(named_json(name.partition("[CALL_ID]")[0], arguments, raw))
    return reading


_muse_body = _invoke_tags("atem:")


def _read_channels(text: str, closed: bool, schemas: Schemas) -> Reading:
    """Messages with headers (`to=`, `<|channel|>`), the first of which stands in the generation prompt."""
    reading = Reading()
    messages = text.removeprefix("<|start|>assistant").split("<|start|>assistant")
    for i, message in enumerate(messages):
        head, mark, body = message.partition("<|message|>")
        if not mark:
            reading.content.append(message)
            continue
        ended = closed or i + 1 < len(messages)
        for end in ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>"):
            if end in body:
                body, ended = body.partition(end)[0], True
        _read_message(head, body, "<|start|>assistant" + message, ended, schemas, reading)
    return reading


def _read_message(head: str, body: str, raw: str, ended: bool, schemas: Schemas, reading: Reading) -> None:
    to = head.partition("to=")[2].partition("<")[0].strip().partition(" ")[0]
    channel = head.partition("<|channel|>")[2].strip().partition(" ")[0].partition("<")[0]
    if to == "self" or channel == "analysis":
        reading.reasoning.append(body)
    elif "<atem:function_calls>" in body:
        inner = body.partition("<atem:function_calls>")[2]
        if "</atem:function_calls>" in inner:
            reading.calls += _muse_body(inner, raw, schemas)
        else:
            reading.calls.append(failed(raw, "it is not closed by </atem:function_calls>", to))
    elif to and to != "user":
        name = to.removeprefix("functions.")
        reading.calls.append(named_json(name, body, raw) if ended else failed(raw, "it is not finished", name))
    else:
        reading.content.append(body)


HERMES = _tagged("Hermes JSON in <tool_call>", "<tool_call>", "</tool_call>", _json_body)
FORMATS = (
    HERMES,
    _tagged("function tags in <tool_call>", "<tool_call>", "</tool_call>", _function_tags),
    _tagged("argument tags in <tool_call>", "<tool_call>", "</tool_call>", _argument_tags),
    _tagged("gemma calls", "<|tool_call>", "<tool_call|>", _gemma_body, drop=("<|tool_response>",)),
    _tagged("Python calls", "<|tool_call_start|>", "<|tool_call_end|>", _python_body),
    _tagged(
        "DeepSeek calls",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek_body,
        drop=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    _tagged(
        "Kimi calls",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _kimi_body,
        drop=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    _tagged("MiniMax calls", "<minimax:tool_call>", "</minimax:tool_call>", _invoke_tags("")),
    _tagged("DSML calls", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _invoke_tags("｜DSML｜")),
    _tagged("JSON in <|START_ACTION|>", "<|START_ACTION|>", "<|END_ACTION|>", _json_body),
    _tagged("JSON in <|tool_call|>", "<|tool_call|>", "<|/tool_call|>", _json_body),
    _tagged("JSON in <function_call>", "<function_call>", "</function_call>", _json_body),
    Format("Mistral calls", "[TOOL_CALLS]", _read_mistral),
    Format("channels", "<|message|>", _read_channels),
    Format("bare JSON", "{", _read_bare),
)
