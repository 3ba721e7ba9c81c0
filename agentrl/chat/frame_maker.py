"""Frames out of a template: it is rendered once a shape with sentinels as contents, and what it does to them found."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product, takewhile

from agentrl.chat.encode import Encoder, Marks
from agentrl.chat.frame import Frame, Gap, Parts, Shape, Slot, content_text, shape_of
from agentrl.chat.probe import TurnEnds
from agentrl.chat.template import (
    CONTENT,
    USER,
    Template,
    TemplateRefusalError,
    call_id,
    call_name,
    call_value,
    probe_turn,
    shared,
)
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Message

MOST_FRAMED = 64
"""Messages of a frame: what is done to find it grows with their square. More are rendered."""
_NASTY = " \n Zq\"<b>&amp;\\ 'x' é漢\u2028\t{{ y }}{% z %}\n "
_TRANSFORMS: dict[str, Callable[[str], str]] = {
    "same": lambda text: text,
    "strip": str.strip,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "json_strip": lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    "json_ascii": lambda text: json.dumps(text)[1:-1],
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
}


class FrameMaker:
    """Makes frames from a template: one object a run."""

    def __init__(self, template: Template, encoder: Encoder, ends: TurnEnds) -> None:
        self._template, self._encoder, self._ends = template, encoder, ends

    def make(self, shape: Shape) -> Frame:
        """Make the frame of a shape. Raises UserError where the template cannot express messages of this shape after an
        assistant turn."""
        turn, text = self._after_turn(_probes(shape, _contents(shape)))
        tail = self._tail(text, turn)
        pieces = self._encoder.split(tail)
        cut = self._place_of_close(tail, pieces, turn, shape)
        rest = self._rest(tail, pieces, cut, turn)
        for i, (role, empty) in enumerate(shape):
            if not empty and _content(i) not in rest:
                raise UserError(
                    f"the chat template leaves out a message of role {role!r} that follows an assistant turn"
                )
        token = pieces[cut][0] if cut >= 0 else None
        close = () if token is None else (token,)
        frame = Frame(close, token is not None and token not in self._ends.own, cut, None)

        def text_with(contents: Sequence[str]) -> str:
            conversation: list[Message] = [{"role": "user", "content": USER}, turn, *_probes(shape, contents)]
            return self._template.text(conversation, self._template.tools, generate=True)

        parts = self._parts_of(rest, text, shape, text_with, lead=pieces[cut][1] if close else "")
        return replace(frame, parts=parts)

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> Frame | None:
        """A frame for opening prompts that differ from this one in what the users say; None where there is none.

        The messages are system's and users', and text. Raises TemplateRefusalError."""
        shape = shape_of(messages)
        fixed = [message["content"] for message in messages if message["role"] == "system"]
        if _SENTINEL.search(json.dumps([*fixed, *tools], default=str)):
            return None

        def text_with(contents: Sequence[str]) -> str:
            said = zip(messages, _probes(shape, contents), strict=True)
            conversation = [message if message["role"] == "system" else probe for message, probe in said]
            return self._template.text(conversation, tools, generate=True)

        text = text_with(_contents(shape))
        parts = self._parts_of(text, text, shape, text_with, lead="")
        return None if parts is None else Frame((), False, -1, parts)

    def _parts_of(
        self, rest: str, text: str, shape: Shape, text_with: Callable[[Sequence[str]], str], *, lead: str
    ) -> Parts | None:
        """`rest`, a part of `text`, as fixed ids and gaps; None where filling them would not give its ids."""
        transforms = _transforms(shape, text, text_with) if len(shape) <= MOST_FRAMED else None
        if transforms is None or not self._encoder.exact:
            return None
        frame = Frame((), False, -1, self._parts(rest, shape, transforms))
        filled = frame.fill(self._encoder, _probes(shape, _contents(shape)))
        return frame.parts if filled == self._encoder.marked(rest, None, lead) else None

    def render(self, frame: Frame, messages: Sequence[Message]) -> list[int]:
        """The ids after `close`, by rendering the messages themselves: for what no frame can describe."""
        contents = [content_text(message.get("content")) for message in messages]
        names = [str(message.get(field, "")) for message in messages for field in ("name", "tool_call_id")]
        marks = Marks([self._template.source, *contents, *names])
        hidden = [_SENTINEL.sub(lambda match: marks.of(match.group()), content) for content in contents]
        probes = _probes(shape_of(messages), [self._encoder.mark(content, marks) for content in hidden])
        turn, text = self._after_turn(probes)
        tail = self._tail(text, turn)
        pieces = self._encoder.split(tail)
        rest = self._rest(tail, pieces, frame.cut, turn)

        def named(match: re.Match[str]) -> str:
            _, name, number = match.groups()
            if name is None and number is None:
                return match.group()
            field, i = ("name", int(name)) if name is not None else ("tool_call_id", int(number))
            return self._encoder.mark(str(messages[i].get(field) or match.group()), marks)

        lead = pieces[frame.cut][1] if frame.cut >= 0 else ""
        return self._encoder.marked(_SENTINEL.sub(named, rest), marks, lead)

    def _after_turn(self, messages: Sequence[Message]) -> tuple[Message, str]:
        """The probe turn that these messages may follow, and the rendering. A turn of calls shows no content
        where it can: some templates move that behind the result."""
        results = sum(1 for _ in takewhile(lambda message: message["role"] == "tool", messages))
        turns = [probe_turn(0, CONTENT)]
        if messages[0]["role"] == "tool":
            turns = [probe_turn(calls, content) for content in ("", CONTENT) for calls in dict.fromkeys((results, 1))]
        refusal = "it shows nothing of the assistant's turn"
        for turn in turns:
            try:
                text = self._template.text(
                    [{"role": "user", "content": USER}, turn, *messages], self._template.tools, generate=True
                )
            except TemplateRefusalError as error:
                refusal = str(error)
                continue
            if _anchor(text, turn) >= 0:
                return turn, text
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the chat template cannot express {roles} after an assistant turn: {refusal}")

    def _tail(self, text: str, turn: Message) -> str:
        """What follows the turn's last sentinel."""
        return text[_anchor(text, turn) :]

    def _rest(self, tail: str, pieces: Sequence[tuple[int | None, str]], cut: int, turn: Message) -> str:
        """What follows the token that ends the turn; where none does, what follows the turn when it is the
        last."""
        if cut < 0:
            alone = self._template.text([{"role": "user", "content": USER}, turn], self._template.tools, generate=False)
            return tail[shared(tail, self._tail(alone, turn).rstrip()) :]
        at = 0
        for _, piece in pieces[: cut + 1]:
            at = tail.index(piece, at) + len(piece)
        swallows = self._encoder.swallows[pieces[cut][1]][1]
        return tail[at:].lstrip() if swallows else tail[at:]

    def _place_of_close(self, tail: str, pieces: Sequence[tuple[int | None, str]], turn: Message, shape: Shape) -> int:
        """The index in `pieces` of what ends the turn, -1 where nothing does.

        It stands before the first message, whose place is found where that is not empty."""
        filled = tuple([(role, False) for role, _ in shape])
        conversation: list[Message] = [{"role": "user", "content": USER}, turn, *_probes(filled, _contents(filled))]
        try:
            full = self._tail(self._template.text(conversation, self._template.tools, generate=True), turn)
        except TemplateRefusalError:
            full = tail
        first = _SENTINEL.search(tail)
        reach = min(len(tail) if first is None else first.start(), shared(tail, full))
        kept = _up_to(pieces, tail, reach)
        place = self._ends.close(kept, calls="tool_calls" in turn and not turn["content"])
        return -1 if place is None else place

    def _parts(self, rest: str, shape: Shape, transforms: dict[str, str]) -> Parts:
        parts: list[tuple[int, ...] | Gap] = []
        pieces = self._encoder.split(rest)
        swallows = self._encoder.swallows
        for i, (token, text) in enumerate(pieces):
            slots = _slots(text, shape, transforms) if token is None else ()
            if any(isinstance(slot, Slot) for slot in slots):
                left = i > 0 and swallows[pieces[i - 1][1]][1]
                right = i + 1 < len(pieces) and swallows[pieces[i + 1][1]][0]
                parts.append(Gap(slots, left, right))
                continue
            ids = (token,) if token is not None else tuple(self._encoder.plain(text))
            if parts and isinstance(parts[-1], tuple):
                parts[-1] = (*parts[-1], *ids)
            else:
                parts.append(ids)
        return tuple(parts)


_SENTINEL = re.compile(r"Zqc(\d{3,})x|zqn(\d{3,})x|zqID(\d{5})")


def _content(i: int) -> str:
    return f"Zqc{i:03d}x"


def _contents(shape: Shape) -> list[str]:
    return [_content(i) for i in range(len(shape))]


def _transforms(shape: Shape, text: str, text_with: Callable[[Sequence[str]], str]) -> dict[str, str] | None:
    """What the template does to contents, by role; None where it is none of what we know."""
    roles = sorted({role for role, empty in shape if not empty})
    try:
        shown = text_with([_NASTY] * len(shape))
    except TemplateRefusalError:
        return None
    for names in product(_TRANSFORMS, repeat=len(roles)):
        chosen = dict(zip(roles, names, strict=True))
        expected = text
        for i, (role, empty) in enumerate(shape):
            if not empty:
                expected = expected.replace(_content(i), _TRANSFORMS[chosen[role]](_NASTY))
        if expected == shown:
            return chosen
    return None


def _probes(shape: Shape, contents: Sequence[str]) -> list[Message]:
    probes = []
    for i, (role, empty) in enumerate(shape):
        probe: Message = {"role": role, "content": "" if empty else contents[i]}  # type: ignore[typeddict-item]
        if role == "tool":
            probe["name"], probe["tool_call_id"] = call_name(i), call_id(i)
        probes.append(probe)
    return probes


def _anchor(text: str, turn: Message) -> int:
    """Where the turn's last sentinel ends; -1 where the rendering shows none."""
    shown = [call_value(i) for i in range(len(turn.get("tool_calls", ())))]
    if turn["content"]:
        shown.append(CONTENT)
    ends = [text.find(sentinel) + len(sentinel) for sentinel in shown if sentinel in text]
    return max(ends, default=-1)


def _up_to(pieces: Sequence[tuple[int | None, str]], tail: str, reach: int) -> list[tuple[int | None, str]]:
    """The pieces that begin before `reach` in the text that was cut into them."""
    kept, at = [], 0
    for token, piece in pieces:
        at = tail.index(piece, at)
        if at >= reach:
            break
        kept.append((token, piece))
        at += len(piece)
    return kept


def _slots(text: str, shape: Shape, transforms: dict[str, str]) -> tuple[str | Slot, ...]:
    pieces: list[str | Slot] = []
    at = 0
    for match in _SENTINEL.finditer(text):
        if match.start() > at:
            pieces.append(text[at : match.start()])
        content, name, number = match.groups()
        if content is not None:
            name_of = transforms[shape[int(content)][0]]
            pieces.append(Slot(int(content), "content", None if name_of == "same" else _TRANSFORMS[name_of]))
        elif name is not None:
            pieces.append(Slot(int(name), "name", None, "tool"))
        else:
            pieces.append(Slot(int(number), "tool_call_id", None, match.group()))
        at = match.end()
    if at < len(text):
        pieces.append(text[at:])
    return tuple(pieces)
