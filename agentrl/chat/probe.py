"""What a template does, found once by rendering conversations of sentinels: what ends a turn, what it rewrites."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.chat.encode import Encoder
from agentrl.chat.template import (
    ANSWER,
    CONTENT,
    USER,
    Template,
    TemplateRefusalError,
    call_name,
    call_value,
    probe_result,
    probe_turn,
)
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Message

_SHOWN_AT_MOST = 6  # of what a template leaves out of schemas: a line is for people
_DEEP = 16  # keywords and types of a schema inside of each other
_USER: Message = {"role": "user", "content": USER}
_USER_2: Message = {"role": "user", "content": "Zqu001x"}
_THOUGHT, _THOUGHT_2 = "Zqr000x", "Zqr001x"
_RESULT = "Zqc000x"

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<channel|>"),
)


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """How an assistant turn ends.

    stop_ids: what the engine stops at. eos: those of them that the model declares. inner: how many structural tokens
    stand between a call's arguments and what ends its turn. own: ids that end a turn and belong to it; any other that
    stands there begins the next message (`<|observation|>`).
    """

    stop_ids: tuple[int, ...]
    eos: frozenset[int]
    inner: int
    own: frozenset[int]

    def close(self, pieces: Sequence[tuple[int | None, str]], *, calls: bool) -> int | None:
        """The index in `pieces` (text after a turn's last sentinel, up to the next message) of what ends the
        turn."""
        tokens = [i for i, (token, _) in enumerate(pieces) if token is not None]
        for i in tokens:
            if pieces[i][0] in self.eos or pieces[i][0] in self.own:
                return i
        skip = self.inner if calls else 0
        return tokens[skip] if len(tokens) > skip else None


def after(text: str, sentinel: str) -> str:
    """What follows the first occurrence of a sentinel ('' where it is missing)."""
    return text.partition(sentinel)[2]


def before(text: str, *sentinels: str) -> str:
    """What stands before the first of the sentinels."""
    for sentinel in sentinels:
        text = text.partition(sentinel)[0]
    return text


def find_ends(template: Template, encoder: Encoder, eos: frozenset[int]) -> TurnEnds:
    """What ends a turn, from a last turn, from one before a user's message, and from one before a tool's
    result."""
    ends = TurnEnds((), eos, _inner_tokens(template, encoder), frozenset())
    last = encoder.split(after(_render(template, [_USER, probe_turn(0, CONTENT)]), CONTENT))
    held = _render(template, [_USER, probe_turn(0, CONTENT), _USER_2], generate=True)
    gap = encoder.split(before(after(held, CONTENT), _USER_2["content"] or ""))  # type: ignore[arg-type]
    in_gap, in_last = (_close(ends, pieces, calls=False) for pieces in (gap, last))
    keeps_close = in_gap is not None and (in_last is None or in_gap in [token for token, _ in last])
    stops = [in_gap if keeps_close else in_last]
    own = frozenset(i for i in (in_gap, in_last) if i is not None) if in_last is not None else frozenset()
    ends = replace(ends, own=own)
    called = (_close(ends, tail, calls=True) for tail in _call_tails(template, encoder))
    stops += [next((i for i in called if i is not None), None)]
    found = tuple(dict.fromkeys(i for i in [*stops, *sorted(eos)] if i is not None))
    if not found:
        raise UserError("nothing ends an assistant turn: the tokenizer has no eos_token and the template writes none")
    return replace(ends, stop_ids=found)


def _close(ends: TurnEnds, pieces: Sequence[tuple[int | None, str]], *, calls: bool) -> int | None:
    i = ends.close(pieces, calls=calls)
    return None if i is None else pieces[i][0]


def _call_tails(template: Template, encoder: Encoder) -> list[list[tuple[int | None, str]]]:
    last = _render(template, [_USER, probe_turn(1)])
    held = _render(template, [_USER, probe_turn(1), probe_result(0, _RESULT)], generate=True)
    tails = [after(last, call_value(0)), before(after(held, call_value(0)), call_name(0), _RESULT)]
    return [encoder.split(tail) for tail in tails if tail]


def _inner_tokens(template: Template, encoder: Encoder) -> int:
    """Structural tokens that close each call of a turn: those between two calls that also follow the last."""
    messages = [_USER, probe_turn(2), probe_result(0, _RESULT), probe_result(1, _RESULT)]
    text = _render(template, messages, generate=True)
    between = encoder.split(before(after(text, call_value(0)), call_name(1), call_value(1)))
    gap = encoder.split(before(after(text, call_value(1)), call_name(0), _RESULT))
    count = 0
    for one, other in zip(between, gap, strict=False):
        if one != other:
            break
        count += one[0] is not None
    return count


def _render(template: Template, messages: Sequence[Message], *, generate: bool = False) -> str:
    """Render, '' where the template refuses: it has no such conversations, and the probe learns nothing from them."""
    try:
        return template.text(messages, template.tools, generate=generate)
    except TemplateRefusalError:
        return ""


def generation_prompt(template: Template) -> str:
    """What `add_generation_prompt` adds after a user's message."""
    return after(_render(template, [_USER], generate=True), USER)


def find_rewrites(template: Template) -> str | None:
    """What the template rewrites in turns that are already written, for people; None when nothing was found."""
    calls = 1 if call_value(0) in _render(template, [_USER, probe_turn(1)]) else 0
    turn, result = probe_turn(calls, CONTENT), probe_result(0, _RESULT)
    conversation: list[Message] = [_USER, turn, *([result] if calls else []), probe_turn(0, ANSWER), _USER_2]
    found = [*_changes(template, conversation), *_lost_thoughts(template, calls), *_drifts(template, calls)]
    return "; ".join(dict.fromkeys(found)) or None


def _changes(template: Template, conversation: list[Message]) -> list[str]:
    found = []
    for i in range(1, len(conversation)):
        role, previous = conversation[i]["role"], conversation[i - 1]["role"]
        written = _render(template, conversation[:i], generate=role == "assistant")
        now = _render(template, conversation[: i + 1], generate=role in ("user", "tool"))
        if not written or not now or now.startswith(written):
            continue
        if role == "assistant":
            found.append("an assistant turn does not begin with the generation prompt")
        elif role == "tool":
            found.append("a turn is written otherwise once a tool has answered")
        elif previous == "assistant":
            found.append("a turn is written otherwise once the user has answered")
    return found


def _drifts(template: Template, calls: int) -> list[str]:
    """Whether a later result stands between other tokens than the first one did."""
    if not calls:
        return []
    conversation: list[Message] = [_USER, probe_turn(1), probe_result(0, _RESULT)]
    again: list[Message] = [*conversation, probe_turn(0, ANSWER), _USER_2, *conversation[1:]]
    first, second = (_render(template, messages, generate=True) for messages in (conversation, again))
    if first and second and first.rpartition(call_value(0))[2] != second.rpartition(call_value(0))[2]:
        return ["a later tool result is written otherwise than the first, whose form is kept"]
    return []


def _lost_thoughts(template: Template, calls: int) -> list[str]:
    turn, answer = probe_turn(calls, "", _THOUGHT), probe_turn(0, ANSWER, _THOUGHT_2)
    results = [probe_result(0, _RESULT)] if calls else []
    if calls and _THOUGHT in _render(template, [_USER, turn]):
        if _THOUGHT not in _render(template, [_USER, turn, *results], generate=True):
            return ["thinking is dropped once a tool has answered"]
        if _THOUGHT not in _render(template, [_USER, turn, *results, answer]):
            return ["thinking before a tool call is dropped once the answer is written"]
        if _THOUGHT not in _render(template, [_USER, turn, *results, answer, _USER_2], generate=True):
            return ["thinking is dropped once the user speaks again"]
    if _THOUGHT_2 in _render(template, [_USER, answer]) and _THOUGHT_2 not in _render(
        template, [_USER, answer, _USER_2], generate=True
    ):
        return ["thinking is dropped once the user speaks again"]
    return []


def check_tools(template: Template) -> None:
    """Raise UserError where tools are given and the template shows none, or has no way to write a tool's result."""
    if not template.tools:
        return
    names = [str(tool.get("function", tool).get("name")) for tool in template.tools]
    opening = _render(template, [_USER], generate=True)
    if missing := [name for name in names if name not in opening]:
        raise UserError(
            f"the chat template does not show the model the tools {', '.join(missing)}: it ignores `tools`; "
            "give one that renders them (`model.chat_template`), or leave the tools out"
        )
    for calls in (1, 0):
        content = "" if calls else CONTENT
        try:
            text = template.text(
                [_USER, probe_turn(calls, content), probe_result(0, _RESULT)], template.tools, generate=True
            )
        except TemplateRefusalError as error:
            refusal = str(error)
            continue
        if _RESULT in text:
            return
        refusal = "it leaves the message out"
    raise UserError(
        f"the chat template cannot express a tool's result: {refusal}; give another (`model.chat_template`)"
    )


def find_unshown(template: Template) -> str | None:
    """What the template leaves out of the tools' schemas, for people; None when nothing was found.

    A part is left out when the opening is the same without it. Of each kind of part, the first is tried.
    """
    found: list[str] = []
    tried: dict[tuple[str, ...], bool] = {}
    for tool in template.tools:
        function = tool.get("function", tool)
        opening = _opening_with(template, tool, function)

        def same(without: Mapping[str, Json], tool: dict[str, Json] = tool, opening: str = opening) -> bool:
            return opening != "" and _opening_with(template, tool, without) == opening

        found += _left_out(function, (), str(function.get("name")), same, tried)
    more = f" and {len(found) - _SHOWN_AT_MOST} more" if len(found) > _SHOWN_AT_MOST else ""
    return ", ".join(found[:_SHOWN_AT_MOST]) + more if found else None


def _opening_with(template: Template, tool: dict[str, Json], function: Mapping[str, Json]) -> str:
    shown = {**tool, "function": function} if "function" in tool else dict(function)
    try:
        return template.text([_USER], [shown], generate=True)
    except TemplateRefusalError:
        return ""


def _left_out(
    node: Mapping[str, Json],
    kind: tuple[str, ...],
    place: str,
    same: Callable[[Mapping[str, Json]], bool],
    tried: dict[tuple[str, ...], bool],
) -> Iterator[str]:
    """Keywords of `node` and of what is in it. kind: the keywords and types above it. same: whether the opening
    stays the same with another mapping in place of `node`. tried: by kind, whether it is left out."""
    for key, value in node.items():
        if value in ({}, [], "") or key == "name" or (key == "type" and "properties" in node) or len(kind) > _DEEP:
            continue
        of = (*kind, key, str(node.get("type")))
        if of not in tried:
            tried[of] = same({name: one for name, one in node.items() if name != key})
            if tried[of]:
                yield f"{key} ({place})"
        if not tried[of]:
            yield from _left_out_inside(node, key, of, place, same, tried)


def _left_out_inside(
    node: Mapping[str, Json],
    key: str,
    kind: tuple[str, ...],
    place: str,
    same: Callable[[Mapping[str, Json]], bool],
    tried: dict[tuple[str, ...], bool],
) -> Iterator[str]:
    value = node[key]
    inside: list[tuple[str, Json, Callable[[Json], Json]]]
    if key == "properties" and isinstance(value, Mapping):
        inside = [(f"{place}.{name}", one, partial(_set, value, name)) for name, one in value.items()]
    elif key in ("parameters", "items", "additionalProperties"):
        inside = [(f"{place}[]" if key == "items" else place, value, lambda new: new)]
    elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
        inside = [(place, one, partial(_put, value, i)) for i, one in enumerate(value)]
    else:
        return
    for where, one, back in inside:
        if isinstance(one, Mapping):

            def with_one(new: Mapping[str, Json], back: Callable[[Json], object] = back) -> bool:
                return same({**node, key: back(new)})

            yield from _left_out(one, kind, where, with_one, tried)


def _set(mapping: Mapping[str, Json], name: str, value: object) -> dict[str, Json]:
    return {**mapping, name: value}


def _put(values: list[Json], i: int, value: Json) -> list[Json]:
    return [*values[:i], value, *values[i + 1 :]]
