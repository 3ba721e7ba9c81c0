"""Messages to token ids and back. What was sampled is never tokenized again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, cast, runtime_checkable

from agentrl.constraint import Constraint
from agentrl.images import ImageSize, ImageSpan
from agentrl.plugins.types import Json, Message


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call of an assistant turn."""

    name: str
    """The tool's name as the model wrote it."""
    arguments: dict[str, Json]
    """By name; empty where they cannot be read."""
    raw: str
    """The call as the model wrote it."""
    error: str | None = None
    """Why it cannot be run (bad JSON, unclosed, not an object), or None."""
    id: str | None = None
    """The id that the model wrote, where its format has one: the result must carry it."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn as people and plugins see it."""

    content: str
    """Text without calls and without thinking."""
    calls: tuple[ParsedCall, ...] = ()
    """Tool calls in the order in which they were written."""
    reasoning: str | None = None
    """Thinking, or None where there is none."""


class Said(NamedTuple):
    """A piece of what an assistant says while its turn is sampled."""

    kind: str
    """`content` or `reasoning`, as in `ParsedTurn`."""
    text: str
    """Follows the pieces of the same kind before it."""


class Chat(Protocol):
    """The format of conversations of one model family. One object serves a run; every method is pure."""

    stop_ids: tuple[int, ...]
    """Ids that end an assistant turn: given to the engine, and kept as the last id of a turn."""
    rewrites_history: str | None
    """What the template rewrites in earlier turns (reported at the start of a run), or None."""
    description: str
    """Which implementation serves, and why: one line for people."""
    images: bool
    """Whether contents may hold images."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        """The ids of the opening prompt, generation prompt included. tools: as `Tool.schema`."""
        ...

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The ids between the sampled assistant turn `turn_ids` and the next sampled token.

        They close the turn where it was cut off or where the template puts something after the stop id, hold `messages`
        (tool results, user or environment messages) and end with the generation prompt. Costs O(turn + messages), never
        O(history). Raises UserError when the template cannot express them.
        """
        ...

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """Parse an assistant turn (stop id included or not). Raises on nothing that a model may write."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people, special tokens included."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text without interpreting special tokens in it; used to limit tool results by tokens."""
        ...


@runtime_checkable
class Constraining(Protocol):
    """A chat that can say what a turn must look like which is forced."""

    def constraint(self, schema: str | None, tools: Sequence[dict[str, Json]]) -> Constraint:
        """What a turn must be: JSON of this schema (JSON text; None: no such answer), or a call of one of these
        tools. Raises UserError: the model writes calls in a format whose arguments are no JSON."""
        ...


@runtime_checkable
class StrictlyCalling(Protocol):
    """A chat that can say what calls must look like in a turn that is not forced."""

    def strict(self, tools: Sequence[dict[str, Json]]) -> Constraint:
        """What holds the calls of a turn, wherever it has any, to these tools and their schemas. Raises UserError, also
        where calls of this model begin with no token of their own."""
        ...


Opening = tuple[Sequence[Message], Sequence[dict[str, Json]]]
"""The arguments of `Chat.render`: messages, and the schemas of the tools."""


@runtime_checkable
class Measuring(Protocol):
    """A chat that counts the tokens of many openings faster than by rendering each."""

    def lengths(self, openings: Sequence[Opening]) -> list[int]:
        """`len(render(*opening))` of each opening, exactly."""
        ...


@runtime_checkable
class Seeing(Protocol):
    """A chat whose messages may hold images of the store, by hash (`{"type": "image", "image": hash}`)."""

    def images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImageSpan]:
        """Where the images of `messages` stand in `ids`, which `render` or `bridge` made of them."""
        ...

    def image_tokens(self, image: str | ImageSize) -> int:
        """The tokens of an image, by its hash or by its size alone. Raises ImageError: the model does not take
        it."""
        ...


@cache
def _sees(kind: type) -> bool:
    """Whether it is `Seeing`: once, as looking at what a protocol asks for takes as long as a short turn's bridge."""
    return issubclass(kind, Seeing)


def sees(chat: Chat) -> bool:
    """Whether a chat is `Seeing`."""
    return _sees(type(chat))


def images_in(chat: Chat, ids: Sequence[int], messages: Sequence[Message]) -> list[ImageSpan]:
    """What `Seeing.images_in` does; nothing for a chat that does not see."""
    return cast(Seeing, chat).images_in(ids, messages) if sees(chat) else []


@runtime_checkable
class Completing(Protocol):
    """A chat whose model takes prompts as they stand."""

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt, with nothing added; in a text, special tokens mean what they say. Raises
        UserError: it holds ids that the vocabulary lacks, or placeholders of images."""
        ...


class PartialTurn(Protocol):
    """What is certain of a turn while it is sampled."""

    def add(self, ids: Sequence[int]) -> list[Said]:
        """What is certain now and was not before. ids: sampled since the last call.

        The pieces of a kind are, joined, the beginning of what `Chat.parse` makes of all ids of the turn."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A chat that reads turns while they are sampled."""

    def stream(self) -> PartialTurn | None:
        """A reader for one turn; None: this model's turns can be read whole only."""
        ...
