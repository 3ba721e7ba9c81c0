"""`ApiChat`: conversations as messages of the OpenAI API, whose endpoint renders prompts and parses calls itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.chat.calls import CallError, read_json
from agentrl.images import ImageSpan, sent_part
from agentrl.plugins.types import Json, Message

CHARACTERS_A_TOKEN = 4  # of English text, to estimate the length of tool results
FILLER = 0  # an id without a meaning


class Ledger:
    """A mapping of ids to pieces of conversations, so that conversations kept as messages can be handled as token ids.

    The first id of a piece stands for its messages; FILLER ids follow, so that the length is the number of tokens.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, Json] = {}
        self._openings: dict[str, int] = {}
        self._next = FILLER + 1

    def add(self, piece: Json, length: int = 1) -> list[int]:
        """Store `piece`; return `length` ids, of which the first stands for it."""
        self._pieces[self._next] = piece
        self._next += 1
        return [self._next - 1] + [FILLER] * (length - 1)

    def opening(self, key: str, piece: Json) -> list[int]:
        """Store an opening; return its id, which is equal for equal keys: the samples of a task share their opening."""
        if key not in self._openings:
            (self._openings[key],) = self.add(piece)
        return [self._openings[key]]

    def find(self, ids: Sequence[int]) -> list[Json]:
        """The pieces that `ids` stand for, in order. Raises KeyError for an unknown id."""
        return [self._pieces[i] for i in ids if i != FILLER]

    def forget(self, ids: Sequence[int]) -> None:
        """Drop the pieces that `ids` stand for, except openings."""
        kept = set(self._openings.values())
        for i in ids:
            if i not in kept:
                self._pieces.pop(i, None)


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of a conversation, in the format of the API."""

    messages: tuple[dict[str, Json], ...]
    """The first messages."""
    tools: tuple[dict[str, Json], ...]
    """The schemas of the tools."""


class ApiChat:
    """The `Chat` of an `OpenAIEngine`, which uses the same ledger. description: the model and its endpoint."""

    stop_ids: tuple[int, ...] = ()
    """No ids: the endpoint ends turns itself."""
    rewrites_history: str | None = None
    """None: earlier messages are never changed."""
    images = True
    """Whether messages may contain images."""

    def __init__(self, ledger: Ledger, description: str) -> None:
        self._ledger, self.description = ledger, description

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        opening = Opening(tuple(map(_plain_message, messages)), tuple(tools))
        return self._ledger.opening(json.dumps([opening.messages, opening.tools], sort_keys=True), opening)

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self._ledger.add(tuple(map(_plain_message, messages)))

    def images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImageSpan]:
        """None: the endpoint has the tokens."""
        return []

    def image_tokens(self, image: object) -> int:
        """0: the endpoint counts them."""
        return 0

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        ((message,),) = self._ledger.find(turn_ids)
        calls = tuple(_call(call) for call in message.get("tool_calls") or ())
        return ParsedTurn(message.get("content") or "", calls)

    def decode(self, ids: Sequence[int]) -> str:
        return "\n".join(json.dumps(_plain(piece), ensure_ascii=False) for piece in self._ledger.find(ids))

    def encode_text(self, text: str) -> list[int]:
        return [0] * -(-len(text) // CHARACTERS_A_TOKEN)


def _call(call: dict[str, Json]) -> ParsedCall:
    name, raw = call["function"]["name"], call["function"].get("arguments") or "{}"
    try:
        arguments = read_json(raw)
    except CallError as error:
        return ParsedCall(name, {}, raw, f"the arguments cannot be read: {error}", call.get("id"))
    if not isinstance(arguments, dict):
        return ParsedCall(name, {}, raw, "the arguments are not a JSON object", call.get("id"))
    return ParsedCall(name, arguments, raw, id=call.get("id"))


def _plain_message(message: Message) -> dict[str, Json]:
    """A message with arguments as JSON text, and without fields that the API does not know
    (`reasoning_content`, `name`)."""
    sent: dict[str, Json] = {key: value for key, value in message.items() if key not in ("reasoning_content", "name")}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
    return sent


def _function(function: Json) -> dict[str, Json]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def outgoing(messages: Sequence[dict[str, Json]], tool_images: str) -> list[dict[str, Json]]:
    """Messages as the API takes them: images as `data:` URLs of PNG files. tool_images: `tool`, where it takes
    those of tools in their messages; `user`: they follow the results of a turn in a message of the user. Raises
    UserError: an image is not stored here."""
    sent: list[dict[str, Json]] = []
    moved: list[dict[str, Json]] = []
    for message in messages:
        if message["role"] != "tool" and moved:
            sent.append({"role": "user", "content": moved})
            moved = []
        content = message.get("content")
        if isinstance(content, list):
            parts = [sent_part(part) for part in content]
            if message["role"] == "tool" and tool_images == "user":
                shown = [part for part in parts if part["type"] == "image_url"]
                moved += shown
                note = {"type": "text", "text": f"[images: {len(shown)}, in the user's next message]"}
                parts = [part for part in parts if part not in shown] + [note] * bool(shown)
            message = {**message, "content": parts}
        sent.append(message)
    return [*sent, {"role": "user", "content": moved}] if moved else sent


def _plain(piece: Json) -> Json:
    return [*piece.messages] if isinstance(piece, Opening) else list(piece)
