"""What stands between an assistant turn and the next one, as fixed ids and places to fill in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.chat.encode import Encoder
from agentrl.errors import UserError
from agentrl.plugins.types import Message

Shape = tuple[tuple[str, bool], ...]
"""For each message its role and whether its content is empty: a frame holds for all messages of a shape."""


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


Parts = tuple[tuple[int, ...] | Gap, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """close: the ids that end the turn where it was cut off. opener: `close` begins the next message, so a turn that
    stopped at another id still needs it. cut: its place among the tokens after the turn's last sentinel (-1: none).
    parts: fixed ids, and gaps to fill; None: no frame describes it, it is to be rendered each time."""

    close: tuple[int, ...]
    opener: bool
    cut: int
    parts: Parts | None

    def fill(self, encoder: Encoder, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for part in self.parts or ():
            ids += encoder.plain(_filled(part, messages)) if isinstance(part, Gap) else part
        return ids

    def texts(self, messages: Sequence[Message]) -> list[str]:
        """The texts that `fill` encodes."""
        return [_filled(part, messages) for part in self.parts or () if isinstance(part, Gap)]

    @property
    def fixed(self) -> int:
        """How many ids `fill` always puts."""
        return sum(len(part) for part in self.parts or () if not isinstance(part, Gap))


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
    try:
        return tuple([(message["role"], not message.get("content")) for message in messages])
    except KeyError as error:
        raise UserError("a message has no role: it must be one of system, user, assistant, tool") from error
