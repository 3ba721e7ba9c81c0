"""What a template puts between an assistant turn and the next one, found once a shape and then only filled in."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from agentrl.chat.encode import Encoder
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
)
from agentrl.errors import UserError
from agentrl.plugins.types import Message

Shape = tuple[tuple[str, bool], ...]
"""For each message its role and whether its content is empty: templates look at no more than that."""

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


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one field of message `index`. `default` stands where the message lacks it."""

    index: int
    field: str
    transform: Callable[[str], str] | None
    default: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of plain text with slots in it, encoded in one go: `left` and `right` tell what tokens swallow."""

    pieces: tuple[str | Slot, ...]
    left: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """close: the ids that end the turn where it was cut off. opener: `close` begins the next message, so a turn that
    stopped at another id still needs it. cut: its place among the tokens after the turn's last sentinel (-1: none).
    parts: fixed ids, and gaps to fill; None: no frame describes it, it is to be rendered each time."""

    close: tuple[int, ...]
    opener: bool
    cut: int
    parts: tuple[tuple[int, ...] | Gap, ...] | None

    def fill(self, encoder: Encoder, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for part in self.parts or ():
            ids += encoder.plain(_filled(part, messages)) if isinstance(part, Gap) else part
        return ids


def _filled(gap: Gap, messages: Sequence[Message]) -> str:
    text = "".join([piece if isinstance(piece, str) else _value(piece, messages[piece.index]) for piece in gap.pieces])
    if gap.left:
        text = text.lstrip()
    return text.rstrip() if gap.right else text


def _value(slot: Slot, message: Message) -> str:
    value = message.get(slot.field) or slot.default
    if not isinstance(value, str):
        value = text_of(value)
    return slot.transform(value) if slot.transform is not None else value


def text_of(content: object) -> str:
    """The text of a content: text, nothing, or a list of parts that are all text. Raises UserError on other parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UserError(f"a message holds a part of type {kind!r}: this chat takes text only")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def shape_of(messages: Sequence[Message]) -> Shape:
    return tuple([(message["role"], not message["content"]) for message in messages])


class FrameMaker:
    """Makes frames from a template: one object a run."""

    def __init__(self, template: Template, encoder: Encoder, ends: TurnEnds) -> None:
        self._template, self._encoder, self._ends = template, encoder, ends

    def make(self, shape: Shape) -> Frame:
        """Raises UserError where the template cannot express messages of this shape after an assistant turn."""
        turn, text = self._opening(_probes(shape, [_content(i) for i in range(len(shape))]))
        tail = text[_anchor(text, turn) :]
        pieces = self._encoder.split(tail)
        cut = self._place_of_close(tail, pieces, turn)
        rest = _after_piece(tail, pieces, cut, self._encoder)
        for i, (role, empty) in enumerate(shape):
            if not empty and _content(i) not in rest:
                raise UserError(
                    f"the chat template leaves out a message of role {role!r} that follows an assistant turn"
                )
        token = pieces[cut][0] if cut >= 0 else None
        close = () if token is None else (token,)
        frame = Frame(close, token is not None and token not in self._ends.own, cut, None)
        transforms = self._transforms(shape, turn, text)
        if transforms is None:
            return frame
        whole = replace(frame, parts=self._parts(rest, shape, transforms))
        return whole if self._agrees(whole, rest, shape, pieces[cut][1] if close else "") else frame

    def _agrees(self, frame: Frame, rest: str, shape: Shape, lead: str) -> bool:
        """Whether filling the frame gives the ids of the text encoded whole."""
        probes = _probes(shape, [_content(i) for i in range(len(shape))])
        return self._encoder.exact and frame.fill(self._encoder, probes) == self._encoder.marked(rest, (), lead)

    def render(self, frame: Frame, messages: Sequence[Message]) -> list[int]:
        """The ids after `close`, by rendering the messages themselves: for what no frame can describe."""
        table: list[str] = []
        probes = _probes(shape_of(messages), [self._marked(message["content"], table) for message in messages])
        turn, text = self._opening(probes)
        tail = text[_anchor(text, turn) :]
        pieces = self._encoder.split(tail)
        rest = _after_piece(tail, pieces, frame.cut, self._encoder)

        def named(match: re.Match[str]) -> str:
            _, name, number = match.groups()
            if name is None and number is None:
                return match.group()
            field, i = ("name", int(name)) if name is not None else ("tool_call_id", int(number))
            return self._marked(messages[i].get(field) or match.group(), table)

        lead = pieces[frame.cut][1] if frame.cut >= 0 else ""
        return self._encoder.marked(_SENTINEL.sub(named, rest), table, lead)

    def _marked(self, content: object, table: list[str]) -> str:
        return self._encoder.mark(text_of(content), table)

    def _opening(self, messages: Sequence[Message]) -> tuple[Message, str]:
        """The probe turn that these messages may follow, and the rendering. A turn of calls shows no content where it
        can: some templates move that behind the result."""
        results = sum(1 for message in messages if message["role"] == "tool")
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

    def _place_of_close(self, tail: str, pieces: Sequence[tuple[int | None, str]], turn: Message) -> int:
        """The index in `pieces` of what ends the turn, -1 where nothing does."""
        first = _SENTINEL.search(tail)
        kept = pieces if first is None else _up_to(pieces, tail, first.start())
        place = self._ends.close(kept, calls="tool_calls" in turn and not turn["content"])
        return -1 if place is None else place

    def _transforms(self, shape: Shape, turn: Message, text: str) -> dict[str, str] | None:
        """What the template does to contents, by role; None where it is none of what we know."""
        roles = sorted({role for role, empty in shape if not empty})
        nasty = _probes(shape, [_NASTY] * len(shape))
        try:
            shown = self._template.text(
                [{"role": "user", "content": USER}, turn, *nasty], self._template.tools, generate=True
            )
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

    def _parts(self, rest: str, shape: Shape, transforms: dict[str, str]) -> tuple[tuple[int, ...] | Gap, ...]:
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


_SENTINEL = re.compile(r"Zqc(\d{3})x|zqn(\d{3})x|zqID(\d{5})")


def _content(i: int) -> str:
    return f"Zqc{i:03d}x"


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


def _after_piece(tail: str, pieces: Sequence[tuple[int | None, str]], i: int, encoder: Encoder) -> str:
    at = 0
    for _, piece in pieces[: i + 1]:
        at = tail.index(piece, at) + len(piece)
    rest = tail[at:]
    return rest.lstrip() if encoder.swallows[pieces[i][1]][1] else rest


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
