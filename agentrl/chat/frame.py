"""Frames: the ids between an assistant turn and the next one, as fixed ids and slots to fill in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.chat.encode import Encoder
from agentrl.errors import UserError
from agentrl.plugins.types import Message

Shape = tuple[tuple[str, bool], ...]
"""For each message its role and whether its content is empty: a frame holds for all messages of a shape."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one field of a message."""

    index: int
    """The message, by its position among those that the frame holds."""
    field: str
    """The message's key whose text is filled in."""
    transform: Callable[[str], str] | None
    """What the template does to the text, or None."""
    default: str = ""
    """The text where the message lacks the field."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of plain text with slots in it, encoded as one text."""

    pieces: tuple[str | Slot, ...]
    """Fixed texts and slots, in order."""
    left: bool = False
    """The token before the gap absorbs spaces at its start."""
    right: bool = False
    """The token after the gap absorbs spaces at its end."""


Parts = tuple[tuple[int, ...] | Gap, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The ids between an assistant turn and the next one, for all messages of one shape."""

    close: tuple[int, ...]
    """Ids that end the turn where it was cut off."""
    opener: bool
    """Whether `close` begins the next message, so that a turn that stopped at another id still needs it."""
    cut: int
    """Position of `close` among the tokens after the turn's last sentinel; -1: none."""
    parts: Parts | None
    """Fixed ids and gaps to fill; None: no frame describes this shape, so it is rendered each time."""

    def fill(self, encoder: Encoder, messages: Sequence[Message]) -> list[int]:
        """The ids with the texts of `messages` filled in."""
        ids: list[int] = []
        for part in self.parts or ():
            ids += encoder.plain(_filled(part, messages)) if isinstance(part, Gap) else part
        return ids

    def texts(self, messages: Sequence[Message]) -> list[str]:
        """The texts that `fill` encodes."""
        return [_filled(part, messages) for part in self.parts or () if isinstance(part, Gap)]

    @property
    def fixed(self) -> int:
        """The number of fixed ids that `fill` returns."""
        return sum(len(part) for part in self.parts or () if not isinstance(part, Gap))


def _filled(gap: Gap, messages: Sequence[Message]) -> str:
    text = "".join([piece if isinstance(piece, str) else _value(piece, messages[piece.index]) for piece in gap.pieces])
    if gap.left:
        text = text.lstrip()
    return text.rstrip() if gap.right else text


def _value(slot: Slot, message: Message) -> str:
    value = message.get(slot.field) or slot.default
    if not isinstance(value, str):
        value = content_text(value)
    return slot.transform(value) if slot.transform is not None else value


def content_text(content: object) -> str:
    """The text of a content: text, nothing, or a list of text parts. Raises UserError for other parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UserError(
                f"a message holds a part of type {kind!r}: this chat takes text only; images want a model that sees"
            )
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def shape_of(messages: Sequence[Message]) -> Shape:
    """The shape of messages: of each its role, and whether its content is empty."""
    try:
        return tuple([(message["role"], not message.get("content")) for message in messages])
    except KeyError as error:
        raise UserError("a message has no role: it must be one of system, user, assistant, tool") from error
