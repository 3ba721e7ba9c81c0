"""The tool calls of one turn: checked, run concurrently, each under its deadline, each answered by one message.

What the model did wrong comes back as a message that it can act on; nothing here raises for it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.chat.base import Chat, ParsedCall, ParsedTurn, Seeing
from agentrl.containment.deadline import CancelledFromWithinError, DeadlineExceededError, DeadlineTimer
from agentrl.errors import StateChangedError, contained, describe, message_of, nearest
from agentrl.images import STORE, ImageError, hashes, in_image_thread
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import ArgumentError, Converse, InfrastructureError, Json, Message, ToolKwargs, ToolResponse
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.hooks import finite
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.secrets import without_known
from agentrl.trajectory import Boundary, ToolUse

_NAME = 64  # characters of a tool's name, as a model may write it, that are kept
_NOTES = 3  # images of a call of which is said why they cannot be shown
_LINE = 300  # characters of an error line that are kept for the metrics
_DEPTH = 64  # lists and objects in each other that a call's arguments may have
_LARGEST = 1e100  # what a tool's metric may be, so that sums of them stay finite
_WINDOW = 16
"""Characters a token that are looked at: a text of more than this many times its limit is cut unseen."""
_NO_KWARGS = ToolKwargs()
_EMPTY = ToolResponse()
_NONE: Mapping[str, float] = {}  # one for all: thousands of requests keep theirs


@dataclass(slots=True)
class Answer:
    """One call, from its name and arguments (None: it is not to be run) to what it came to.

    text: what the model reads; the rest of `response` is what the tool said besides. late: the turn or the request ran
    out of time, not the tool out of its own. broken: why the tool could not do its work at all.
    """

    call_id: str
    """The id of the call, in the assistant's message and in the tool's."""
    name: str
    text: str = ""
    response: ToolResponse = _EMPTY
    error: str | None = None
    """Whose error it was and what went wrong, `model: ...` or `tool: ...`; None where the call went well."""
    tool: Tool | None = None
    arguments: dict[str, Json] | None = None
    index: int = 0
    """Place of the call in its turn."""
    seconds: float = 0.0
    """Wall time of the call."""
    late: bool = False
    broken: Exception | None = None

    def message(self, text: str) -> Message:
        """The tool's message, with `text` bounded already."""
        images = self.response.images
        parts = [{"type": "text", "text": text}, *({"type": "image", "image": i} for i in images)] if images else text
        return {"role": "tool", "content": parts, "tool_call_id": self.call_id, "name": self.name}


@dataclass(slots=True)
class Answers:
    """What a turn's calls came to. exhausted: more calls than the request may make."""

    messages: list[Message]
    """One message of a tool for each call."""
    done: bool = False
    """True where a tool ended the episode."""
    exhausted: bool = False
    late: bool = False
    """True where the turn or the request ran out of time."""


def call_id(call: ParsedCall, turn: int, index: int) -> str:
    """The id of a call, in the assistant's message and in the tool's: the model's own where it wrote one."""
    return call.id or f"call_{turn}_{index}"


def assistant_message(parsed: ParsedTurn, turn: int) -> Message:
    """What the model said in its `turn`-th turn. Arguments that cannot be read stand there as they were
    written."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(c, turn, i),
                "function": {"name": c.name, "arguments": c.raw if c.error is not None else c.arguments},
            }
            for i, c in enumerate(parsed.calls)
        ]
    return message


def bounded(parsed: ParsedTurn) -> ParsedTurn:
    """`parsed`, with an error for each call whose arguments are nested too deeply for the code that they go
    through."""
    if not any(_may_be_deep(call) for call in parsed.calls):
        return parsed
    return replace(parsed, calls=tuple(_shallow(call) if _may_be_deep(call) else call for call in parsed.calls))


def _may_be_deep(call: ParsedCall) -> bool:
    return len(call.raw) > _DEPTH and call.raw.count("[") + call.raw.count("{") > _DEPTH


def _shallow(call: ParsedCall) -> ParsedCall:
    level: list[Json] = [call.arguments]
    for _ in range(_DEPTH):
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return call
    return replace(call, arguments={}, error=f"the arguments are nested more than {_DEPTH} deep")


def as_text(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages as a model that reads text only gets them: a tool's images are named, not shown."""
    if not any(m["role"] == "tool" and isinstance(m["content"], list) for m in messages):
        return messages
    return [_named_images(m) if m["role"] == "tool" and isinstance(m["content"], list) else m for m in messages]


def _named_images(message: Message) -> Message:
    parts = message["content"]
    assert isinstance(parts, list)
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    count = sum(part["type"] == "image" for part in parts)
    note = f"[{count} {'image' if count == 1 else 'images'}, which you cannot see]"
    return {**message, "content": f"{text}\n{note}" if text else note}


class Conversing(Converse, Protocol):
    """A `Converse` that ends with the call that it was made for."""

    def close(self) -> None:
        """Hold no further conversations."""


MakeConverse = Callable[[AsyncRolloutRequest, Conversation, int, float], Conversing]
"""Makes what a call converses by, from the request, the calling conversation, the call's place in its turn and its
deadline (seconds of time.monotonic)."""


class Caller:
    """Runs the calls of one request's turns, within the limits of the recipe."""

    __slots__ = ("_chat", "_images", "_limits", "_make_converse")

    def __init__(
        self, chat: Chat, limits: RolloutSection, make_converse: "MakeConverse | None" = None, images: bool = False
    ) -> None:
        """Build a caller. make_converse: gives the calls of tools what they hold conversations by. images: whether the
        model sees those of tools, by the hashes that the store gives them."""
        self._images = images
        self._chat = chat
        self._limits = limits
        self._make_converse = make_converse

    async def answer(
        self,
        request: AsyncRolloutRequest,
        conversation: Conversation,
        calls: Sequence[ParsedCall],
        turn_deadline: float,
        timer: DeadlineTimer,
    ) -> Answers:
        """Run the calls of a turn of `conversation` and record them: tool uses, step rewards. `turn_deadline` as
        time.monotonic(). Raises where a tool's step reward is no number, a tool's InfrastructureError, what failed in a
        conversation of a tool, and CancelledFromWithinError."""
        allowed = min(self._limits.max_tool_calls_per_turn, self._limits.max_tool_calls - request.tool_calls)
        accepted = calls[:allowed]
        request.tool_calls += len(accepted)
        turn = request.last_turn(conversation)
        answers = await self._run(request, conversation, accepted, turn, turn_deadline, timer)
        conversation.at = Boundary.INFRASTRUCTURE, "chat"
        total = Answers([])
        refused = calls[allowed:]
        if refused:
            total.exhausted = allowed < self._limits.max_tool_calls_per_turn
            answers.append(self._refusal(refused, call_id(refused[0], turn, allowed), total.exhausted))
        for answer in answers:
            text = bound_text(answer.text, self._limits.max_tool_tokens, self._chat.encode_text)
            cut = text is not answer.text
            if self._images and answer.response.images:
                shown = hashes([*conversation.messages, *total.messages])
                text = await self._show(answer, text, self._limits.max_images - len(shown))
            self._record(request, conversation, answer, turn, cut=cut)
            total.messages.append(answer.message(text))
            total.done = total.done or answer.response.done
            total.late = total.late or answer.late
        request.tool_uses.extend(ToolUse(c.name[:_NAME], turn, 0.0, answers[-1].error) for c in refused[1:])
        return total

    async def _run(
        self,
        request: AsyncRolloutRequest,
        conversation: Conversation,
        calls: Sequence[ParsedCall],
        turn: int,
        turn_deadline: float,
        timer: DeadlineTimer,
    ) -> list[Answer]:
        deadline = min(time.monotonic() + self._limits.tool_timeout, turn_deadline)
        answers = [self._prepare(request, conversation, call, turn, i) for i, call in enumerate(calls)]
        running = [answer for answer in answers if answer.arguments is not None]
        if running:
            conversation.at = Boundary.TOOL, running[0].name
        if len(running) == 1:
            await self._execute(request, conversation, running[0], deadline, timer)
        elif running:
            async with asyncio.TaskGroup() as group:
                for answer in running:
                    group.create_task(self._execute_in_task(request, conversation, answer, deadline))
        if request.broken is not None:
            conversation.at, error = request.broken
            raise error
        for answer in running:
            if answer.broken is not None and not request.aborted_in_tool:
                conversation.at = Boundary.TOOL, f"{answer.name}.execute"
                raise answer.broken
            answer.late = answer.late and deadline == turn_deadline
        return answers

    async def _execute_in_task(
        self, request: AsyncRolloutRequest, conversation: Conversation, answer: Answer, deadline: float
    ) -> None:
        timer = DeadlineTimer(request.own if conversation.is_main else None)  # a tool's is cancelled with the call
        try:
            await self._execute(request, conversation, answer, deadline, timer)
        finally:
            timer.close()

    async def _execute(
        self,
        request: AsyncRolloutRequest,
        conversation: Conversation,
        answer: Answer,
        deadline: float,
        timer: DeadlineTimer,
    ) -> None:
        """Run one call; whatever the tool does, `answer` says it."""
        tool, arguments, started = answer.tool, answer.arguments, time.monotonic()
        assert tool is not None
        assert arguments is not None
        converse: Conversing | None = None
        try:
            if tool.converses:
                converse = self._conversing(request, conversation, answer, deadline)
                arguments = {**arguments, "converse": converse}
            _take(answer, await timer.wait(tool.execute(request.session_of(tool), **arguments), deadline))
        except (InfrastructureError, CancelledFromWithinError, StateChangedError) as error:
            answer.broken = error
        except DeadlineExceededError as error:  # it may have said on its way out what held it up
            if isinstance(error.__cause__, InfrastructureError):
                answer.broken = error.__cause__
            else:
                self._failed(answer, error)
        except BaseException as error:  # noqa: BLE001 - boundary: a tool that raises tells the model
            self._failed(answer, contained(error))
        finally:
            if converse is not None:
                converse.close()
        answer.seconds = time.monotonic() - started

    def _conversing(
        self, request: AsyncRolloutRequest, conversation: Conversation, answer: Answer, deadline: float
    ) -> Conversing:
        if self._make_converse is None:
            raise InfrastructureError("it holds conversations with the model, which the built-in driver alone can give")
        return self._make_converse(request, conversation, answer.index, deadline)

    def _prepare(
        self, request: AsyncRolloutRequest, conversation: Conversation, call: ParsedCall, turn: int, index: int
    ) -> Answer:
        """An answer that says what is wrong with the call, or one that is ready to run."""
        name = call_id(call, turn, index)
        if call.error is not None:
            return _wrong(call, name, call.error)
        tool = conversation.tools.get(call.name)
        if tool is None:
            known = nearest(call.name[:_NAME], conversation.tools)
            return _wrong(call, name, f"there is no tool named {call.name[:_NAME]!r}{known}")
        answer = Answer(name, call.name, index=index)
        try:
            arguments = tool.check(call.arguments)
        except BaseException as error:  # noqa: BLE001 - boundary: a tool that raises tells the model
            self._failed(answer, contained(error))
            return answer
        hidden = request.task.tools_kwargs.get(call.name, _NO_KWARGS).execute_kwargs
        answer.tool, answer.arguments = tool, {**arguments, **hidden} if hidden else arguments
        return answer

    def _failed(self, answer: Answer, error: Exception) -> None:
        """Turn what a tool raised into what the model reads."""
        if isinstance(error, ArgumentError):
            side, what = "model", without_known(message_of(error))
        elif isinstance(error, DeadlineExceededError):
            side, what = "tool", f"it did not answer within {self._limits.tool_timeout:g} seconds"
            answer.late = True
        else:
            side, what = "tool", describe(error, place=False)
        answer.text, answer.response, answer.error = f"Error: {what}", _EMPTY, f"{side}: {_line(what)}"

    def _refusal(self, calls: Sequence[ParsedCall], name: str, exhausted: bool) -> Answer:
        """One message for all the calls that are not run."""
        limits = self._limits
        most = f"{limits.max_tool_calls} in all" if exhausted else f"{limits.max_tool_calls_per_turn} a turn"
        what = "1 call was" if len(calls) == 1 else f"{len(calls)} calls were"
        return _wrong(calls[0], name, f"{what} not run: at most {most}")

    async def _show(self, answer: Answer, text: str, most: int) -> str:
        """Put the images of an answer into the store; return its text, which says which of them cannot be shown, and
        why. most: how many may be shown."""
        keys: list[str] = []
        broken: list[str] = []
        left = 0
        for number, image in enumerate(answer.response.images, 1):
            if len(keys) >= most:
                left += 1
                continue
            try:
                keys.append(await in_image_thread(self._kept, image))
            except ImageError as error:
                answer.error = answer.error or f"tool: image {number}: {_line(str(error))}"
                broken.append(f"[image {number} cannot be shown: {_line(str(error))}]")
        notes = broken[:_NOTES]
        if len(broken) > _NOTES:
            notes.append(f"[{len(broken) - _NOTES} further images cannot be shown]")
        if left:
            what = "1 image" if left == 1 else f"{left} images"
            notes.append(f"[{what} left out: the conversation holds as many images as it may]")
        answer.response = replace(answer.response, images=tuple(keys))
        return "\n".join([*([text] if text else []), *notes])

    def _kept(self, image: object) -> str:
        key = STORE.put(image)
        if isinstance(self._chat, Seeing):
            self._chat.image_tokens(key)
        return key

    def _record(
        self, request: AsyncRolloutRequest, conversation: Conversation, answer: Answer, turn: int, cut: bool
    ) -> None:
        response = answer.response
        request.tool_uses.append(
            ToolUse(answer.name, turn, answer.seconds, answer.error, response.metrics or _NONE, cut)
        )
        if response.reward is not None:
            conversation.at = Boundary.REWARD, f"{answer.name}.execute"
            request.add_step_reward(conversation, finite(response.reward, "step"))


def _take(answer: Answer, result: object) -> None:
    """Take what the tool returned. Raises InfrastructureError for what is no text: a slip of the tool's author, which
    no model can mend; TypeError for metrics that are none."""
    if isinstance(result, str):
        answer.text = without_known(result)
        return
    if not isinstance(result, ToolResponse) or not isinstance(result.text, str):
        kind = type(result.text if isinstance(result, ToolResponse) else result).__name__
        raise InfrastructureError(f"it returned {kind}, not text or a ToolResponse")
    if result.metrics or result.images:
        result = replace(result, metrics=_metrics(result.metrics), images=tuple(result.images or ()))
    answer.text, answer.response = without_known(result.text), result
    if result.error:
        answer.error = f"model: {_line(answer.text)}"


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Numbers that can be added up and written down, by name. Raises TypeError and ValueError."""
    checked = {}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"the name of a metric of the tool is {type(key).__name__}, not text")
        if not isinstance(value, int | float):
            raise TypeError(f"the tool's metric {key!r} is {type(value).__name__}, not a number")
        if not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"the tool's metric {key!r} is not a finite number of at most {_LARGEST:g}")
        checked[key] = value
    return checked


def _line(text: str) -> str:
    text = without_known(text)
    return text[: 4 * _LINE].strip().split("\n", 1)[0][:_LINE]


def _wrong(call: ParsedCall, name: str, what: str) -> Answer:
    return Answer(name, call.name[:_NAME], f"Error: {what}", error=f"model: {_line(what)}")


def bound_text(text: str, limit: int, encode: Callable[[str], Sequence[int]]) -> str:
    """`text`, at most `limit` tokens long: a longer one loses its middle, and a note there says how many
    characters.

    `encode` sees at most _WINDOW x `limit` characters at once, so ten megabytes cost what ten kilobytes cost.
    """
    if len(text) <= limit and len(text.encode("utf-8", "surrogatepass")) <= limit:
        return text  # a token holds at least a byte
    window = _WINDOW * limit
    if len(text) <= window:
        tokens = len(encode(text))
        if tokens <= limit:
            return text
        keep = len(text) * limit // tokens
    else:
        sample = text[: window // 2] + text[-(window - window // 2) :]
        keep = len(sample) * limit // max(1, len(encode(sample)))
    return _cut_text(text, keep, limit, encode)


def _cut_text(text: str, keep: int, limit: int, encode: Callable[[str], Sequence[int]]) -> str:
    keep = min(keep, len(text) - 1)
    while keep > 0:
        tail = keep // 2
        note = f"\n[... {len(text) - keep} characters left out ...]\n"
        shorter = text[: keep - tail] + note + (text[-tail:] if tail else "")
        tokens = len(encode(shorter))
        if tokens <= limit:
            return shorter
        keep = min(keep - 1, keep * limit // tokens)
    return _start_of_text(text, limit, encode)


def _start_of_text(text: str, limit: int, encode: Callable[[str], Sequence[int]]) -> str:
    """Shorten for limits that have no room for a note: the first characters that fit."""
    start = text[:limit]
    while start and len(encode(start)) > limit:
        start = start[:-1]
    return start
