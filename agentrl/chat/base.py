"""Messages to token ids and back. What was sampled is never tokenized again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentrl.plugins.types import Message


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call of an assistant turn. `error` says why it cannot be run (bad JSON, unclosed, not an object).
    `id` is the id that the model itself wrote, where its format has one: the result must carry it."""

    name: str
    arguments: dict[str, Any]
    raw: str
    error: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn as people and plugins see it. `content` is without calls and without thinking."""

    content: str
    calls: tuple[ParsedCall, ...] = ()
    reasoning: str | None = None


class Chat(Protocol):
    """One model family's way of writing a conversation. One object serves a run; every method is pure.

    stop_ids: the ids that end an assistant turn (given to the engine, and kept as the last id of a turn).
    rewrites_history: None, or what the template rewrites in earlier turns (said at start-up).
    description: which way serves, and why, in a line for people. images: whether contents may hold images.
    """

    stop_ids: tuple[int, ...]
    rewrites_history: str | None
    description: str
    images: bool

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The opening prompt, generation prompt included. `tools` as in `Tool.schema`."""
        ...

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The ids between the sampled assistant turn `turn_ids` and the next sampled token.

        They close the turn where it was cut off or where the template puts something after the stop id, hold `messages`
        (tool results, user or environment messages) and end with the generation prompt. Costs O(turn + messages), never
        O(history). Raises UserError when the template cannot express them.
        """
        ...

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """The assistant turn (stop id included or not). Never raises on what a model may write."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people, special tokens included."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text (special tokens in it are not interpreted), to bound what tools return, in tokens."""
        ...


Opening = tuple[Sequence[Message], Sequence[dict[str, Any]]]
"""What `Chat.render` takes: the messages, and the schemas of the tools."""


@runtime_checkable
class Measuring(Protocol):
    """A chat that counts the tokens of many openings faster than by rendering each."""

    def lengths(self, openings: Sequence[Opening]) -> list[int]:
        """For each, exactly `len(render(*opening))`."""
        ...
