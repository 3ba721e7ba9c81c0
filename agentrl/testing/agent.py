"""An agent that is no model: its turns are texts, written beforehand or typed, and the real driver plays them.

A turn is text. A line `/name {"argument": 1}` of it calls a tool (`/name` alone: without arguments; `//` at the start
of a line stands for a slash), the other lines are what the agent says. Ids are code points: nothing is tokenized.
"""

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.engine.base import Engine, EngineError, Generation, GenerationFinish, OnTokens, Sampling
from agentrl.plugins.types import Content, Json, Message
from agentrl.recipe.sections.rollout import RolloutSection

Turn = Callable[[int], Awaitable[str | None]]
"""From a turn's number, counted from 0, to its text. None: the agent leaves, and the request is ABORTED."""

END = 0x110000  # the first id that is no code point
NO_LIMIT = 1 << 30
"""In place of a limit in tokens."""
_CALL = re.compile(r"/([A-Za-z_][\w.-]*)(?:\s+(.*))?$")


def call(name: str, /, **arguments: Json) -> str:
    """The line that calls a tool."""
    return f"/{name} {json.dumps(arguments, ensure_ascii=False)}"


def plain_text(text: str) -> str:
    """`text` as lines of a turn that call nothing."""
    return "\n".join(f"/{line}" if line.startswith("/") else line for line in text.split("\n"))


def without_token_limits(limits: RolloutSection, **changes: object) -> RolloutSection:
    """`limits` without those in tokens: only what is counted in tokens has no meaning for code points."""
    endless: dict[str, Json] = {"max_tokens": NO_LIMIT, "max_turn_tokens": NO_LIMIT, "max_tool_tokens": NO_LIMIT}
    endless |= {"max_total_tokens": NO_LIMIT, "compact": None}
    return limits.model_copy(update={**endless, **changes})


class TextChat:
    """Messages as code points."""

    stop_ids: tuple[int, ...] = (END,)
    images = True
    rewrites_history: str | None = None
    description = "text, as it is typed"

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        """See `Chat.render`."""
        return self._messages(messages)

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Chat.bridge`."""
        return self._messages(messages)

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """See `Chat.parse`."""
        words: list[str] = []
        calls: list[ParsedCall] = []
        for line in self.decode(turn_ids).split("\n"):
            if line.startswith("//"):
                words.append(line[1:])
            elif match := _CALL.fullmatch(line.strip()):
                calls.append(_parsed(match.group(1), match.group(2) or "{}", line))
            else:
                words.append(line)
        return ParsedTurn("\n".join(words).strip("\n"), tuple(calls))

    def decode(self, ids: Sequence[int]) -> str:
        """See `Chat.decode`."""
        return "".join(chr(i) for i in ids if i < END)

    def encode_text(self, text: str) -> list[int]:
        """See `Chat.encode_text`."""
        return [ord(character) for character in text]

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        return [i for m in messages for i in (*self.encode_text(f"{m['role']}: {_text(m['content'])}"), END)]


def _text(content: Content | None) -> str:
    """A content as text, in which an image is its name."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part["text"]) if "text" in part else f"[{part['type']}]" for part in content)


def _parsed(name: str, body: str, line: str) -> ParsedCall:
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ParsedCall(name, {}, line, f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ParsedCall(name, {}, line, "the arguments should be an object")
    return ParsedCall(name, arguments, line)


ANSWER = "(the model's answer)"
"""What conversations that a tool holds come to."""


class TextEngine(Engine):
    """Says what the agent of each request says, and ANSWER in conversations of tools. `seat` comes before the request
    is driven."""

    max_context = NO_LIMIT

    def __init__(self) -> None:
        self._agents: dict[str, Turn] = {}
        self._branching: set[str] = set()
        self._turns: Counter[str] = Counter()

    def seat(self, request_id: str, agent: Turn, *, branches: bool = False) -> None:
        """Let `agent` answer for the request `request_id`. branches: on whatever branch of it."""
        self._agents[request_id] = agent
        if branches:
            self._branching.add(request_id)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        whole = request_id.rpartition("/")[0]
        seat = whole if request_id not in self._agents and whole in self._branching else request_id
        number = self._turns[seat]
        self._turns[seat] += 1
        agent = self._agents.get(seat)
        text = ANSWER if agent is None else await agent(number)
        if text is None:
            return Generation([], [], GenerationFinish.ABORT)
        answer = [*map(ord, text), END]
        return Generation(answer, [0.0] * len(answer), GenerationFinish.STOP)

    def finish(self, request_id: str) -> None:
        self._agents.pop(request_id, None)
        self._branching.discard(request_id)
        self._turns.pop(request_id, None)


def scripted(turns: Sequence[str]) -> Turn:
    """The agent that says these turns, one after the other; wanted more often, it fails with a clear line."""

    async def turn(number: int) -> str:
        if number >= len(turns):
            count = "1 reply" if len(turns) == 1 else f"{len(turns)} replies"
            raise EngineError(f"the script has {count}, and the conversation needs another one")
        return turns[number]

    return turn
