"""What an agent's call is, whatever dialect it came in, and what it is answered with."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from agentrl.plugins.types import Content, Json, Message

if TYPE_CHECKING:
    from agentrl.chat.base import PartialTurn, Said


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request for a completion."""

    messages: tuple[Message, ...]
    """The whole conversation in the shape of the Chat Completions API. Contents are text, or texts and images of the
    store where there are images."""
    tools: tuple[dict[str, Json], ...] = ()
    """Schemas of the tools that are offered, as `Tool.schema`."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Of tools that are offered in groups: the name of its group by that of the tool (Responses API)."""
    may_call: bool = True
    """Whether the model may call them (`tool_choice`): else they stay in the prompt, and calls are text."""
    prompt: str | tuple[int, ...] | None = None
    """In place of messages: the prompt as it stands, text or token ids. Then the answer is text, whatever it says."""
    max_tokens: int | None = None
    """Limit of the answer that the agent asked for; None: the recipe's."""
    stream: bool = False
    """Whether the answer is sent as server-sent events."""
    usage_in_stream: bool = False
    """Whether a stream of the Chat Completions API ends with the token counts."""
    schema: str | None = None
    """The JSON schema that an answer without calls must fit, as JSON text; None: any text will do."""
    must_call: tuple[str, ...] = ()
    """Names of tools of which the answer must call one; empty: the model chooses whether it calls any."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, which is shown up to the first of them."""
    logprobs: bool = False
    """Whether log-probs of the sampled tokens are wanted."""
    token_ids: bool = False
    """Whether the ids of the sampled tokens are wanted."""
    model: str = ""
    """The model's name as the agent wrote it, which the answer repeats."""
    asked: Mapping[str, Json] = field(default_factory=dict)
    """Sampling parameters that the agent asked for and the recipe decides, such as the temperature."""
    one_call: bool = False
    """Whether the answer ends with its first call of a tool."""
    ignored: tuple[str, ...] = ()
    """Names of fields that were ignored, since they change nothing of the answer."""
    earlier: "Call | None" = None
    """A call of the same key whose messages and tools are the first of this one's, found by its bytes."""
    retry: int = 0
    """How often the client's SDK has sent this request before."""
    fresh: int = 0
    """Bytes of its body that no earlier call held."""
    named: int = 0
    """Characters of what it names in place of sending it: conversations, items."""
    size: int = 0
    """Bytes of its body, and what it names."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a call came."""

    digest: bytes = b""
    """Of the request as it came, by which a retry is known."""
    retry: int = 0
    """How often the client's SDK has sent this request before."""
    key: str = ""
    """The client's own name of the call, the same each time that it is sent (`Idempotency-Key`); empty: it has none."""
    train: bool | None = None
    """Whether the answer is to be trained (`X-Agentrl-Train`); None: as the recipe says."""
    role: str = ""
    """The seat that the agent calls for (`X-Agentrl-Role`), such as `judge`; empty: the rollout's own."""


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended its turn."""
    LENGTH = "length"
    """A limit of tokens was reached."""
    TOOLS = "tool_calls"
    """The model ended its turn with tool calls."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a call."""

    id: str
    """Unique within a run; without the prefix that a dialect puts before it."""
    message: Message
    """The assistant's message; arguments of its calls are objects, or text that is no JSON object."""
    finish: Finish
    """Why it ended."""
    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Sampled tokens."""
    tokens: Sequence[tuple[str, float]] = ()
    """Text and natural log-prob of each sampled token."""
    ids: Sequence[int] = ()
    """The sampled tokens."""
    stop: str | None = None
    """The string of `Call.stop` that ended it."""


class Feed:
    """The way from the engine to the stream of one call. The engine's side only keeps ids; `take` reads them."""

    def __init__(self) -> None:
        self.completion_id = ""
        """See `Completion.id`."""
        self.prompt_tokens = 0
        """Tokens of the prompt."""
        self._turn: PartialTurn | None = None
        self._ids: list[int] = []
        self._news = asyncio.Event()

    def begin(self, completion_id: str, prompt_tokens: int, turn: "PartialTurn") -> None:
        """Note what is being sampled. turn: reads it."""
        self.completion_id, self.prompt_tokens, self._turn = completion_id, prompt_tokens, turn

    def add(self, ids: Sequence[int]) -> None:
        """Take sampled ids; see `OnTokens`."""
        self._ids += ids
        self._news.set()

    def wake(self) -> None:
        """End a `wait`, also where nothing came."""
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """Wait until something came, `seconds` at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    def take(self) -> "list[Said]":
        """What has become certain."""
        self._news.clear()
        ids, self._ids = self._ids, []
        return self._turn.add(ids) if self._turn is not None else []


class GatewayError(Exception):
    """A call that cannot be served; it is answered in the dialect's own form."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


class Endpoint(Protocol):
    """Who serves the calls of one key: a rollout, or a model that is served to people."""

    @property
    def images(self) -> bool:
        """Whether contents may hold images."""
        ...

    @property
    def context(self) -> int:
        """The most tokens of a conversation."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Json]]:
        """Schemas of the tools that the key may call by MCP."""
        ...

    async def call_tool(self, name: str, arguments: Mapping[str, Json] | str) -> Content:
        """Run one of the tools; return what the model reads, images as `data:` URLs."""
        ...

    async def complete(self, call: Call, origin: Origin, feed: Feed | None = None) -> Completion:
        """The answer; each call runs in a task of its own. Raises GatewayError.

        feed: is given what is sampled as it comes, as far as the engine and the chat can do that."""
        ...

    def count(self, call: Call) -> int:
        """The number of prompt tokens of a call. Raises GatewayError."""
        ...

    def previous(self, completion_id: str) -> tuple[Message, ...]:
        """The conversation that ends with the answer `completion_id`. Raises GatewayError."""
        ...

    def too_long(self, why: str) -> GatewayError:
        """The error of a call for which there is no room."""
        ...

    def lost(self, completion: Completion) -> None:
        """Note that nobody was there any more to receive an answer."""
        ...
