"""Rows of somebody's own conversations: read in the forms that people have them in, and laid out as the driver would.

A row that cannot be expressed is refused with its place and the reason (`Refusal`); one that is no conversation at all
is an error.
"""

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import cast

import numpy as np

from agentrl.chat.base import Chat, Seeing
from agentrl.chat.frame import content_text
from agentrl.chat.image_chat import moved
from agentrl.data.media import Images
from agentrl.errors import UserError
from agentrl.fine_tuning.writer import Writer
from agentrl.images import ImageSpan, check_count, hashes, stored
from agentrl.plugins.types import Json, Message, Task
from agentrl.recipe.sections.sft import SftSection
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trajectory import FinishReason, Segment, Trajectory, Turn, check_invariants

ROLES = {"developer": "system", "function": "tool"}
"""Further roles of OpenAI's form, and what they are here."""
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "function_call": "call",
    "observation": "tool", "tool": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
"""Speakers of ShareGPT's form, and their roles; `call`: an assistant's turn that is the JSON of its calls."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("weight", "train")


_IMAGES = Images()


class Refusal(UserError):  # noqa: N818 - it is what becomes of a row
    """A row that cannot be learned from, and why."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as it was read."""

    messages: tuple[Message, ...]
    """Its messages."""
    flags: tuple[bool | None, ...]
    """For each message whether it says that it is to be learned; None: it does not say."""
    tools: tuple[dict[str, Json], ...] | None
    """Schemas of the tools that it offers; None: it does not say."""


def read_row(
    row: Mapping[str, Json], form: str, *, sparse: bool = False, images: Images = _IMAGES, folder: Path | None = None
) -> Talk:
    """The conversation of a row. form: `openai` or `sharegpt`. sparse: fields that are null were not there, as
    in tables, where all rows have all fields. images: how rows bring images. folder: of the row's file. Raises
    UserError: it is none; Refusal: its images do not fit its messages."""
    if sparse:
        row = _without_nulls(row)
    given = _parsed(row.get("messages" if form == "openai" else "conversations"))
    if not isinstance(given, list) or not given:
        raise UserError(_no_messages(row, form))
    said = [message_of(each, i) if form == "openai" else _sharegpt(each, i) for i, each in enumerate(given, 1)]
    system = row.get("system") if form == "sharegpt" else None
    if isinstance(system, str) and system and said[0]["role"] != "system":
        said, given = [{"role": "system", "content": system}, *said], [{}, *given]
    try:
        said = images.placed(said, row, folder)
    except UserError as error:
        raise Refusal(str(error)) from error
    return Talk(tuple(said), tuple(map(_flag, given)), schemas_of(row.get("tools")))


def _no_messages(row: Mapping[str, Json], form: str) -> str:
    wanted, other, theirs = ("messages", "conversations", "sharegpt")
    if form != "openai":
        wanted, other, theirs = "conversations", "messages", "openai"
    if other in row:
        return f"has no list `{wanted}`, but `{other}`: set sft.format={theirs}"
    return f"has no list `{wanted}` with a message in it; its fields are {', '.join(map(str, row)) or 'none'}"


def _without_nulls(value: object) -> Json:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parsed(value: object) -> Json:
    """What JSON text says, as tables hold what has no type; anything else as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _flag(message: Json) -> bool | None:
    given = next((message[key] for key in FLAGS if message.get(key) is not None), None)
    return None if given is None else bool(given)


def message_of(given: Json, number: int) -> Message:
    """A message in OpenAI's form as the chat has it. number: of the message. Raises UserError: it is none."""
    if not isinstance(given, Mapping) or not isinstance(role := given.get("role"), str):
        raise UserError(f"message {number} is not an object with a `role`")
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise UserError(f"message {number} has the role {role!r}: expected system, user, assistant or tool")
    content = given.get("content")
    if not isinstance(content, str | list | None):
        raise UserError(f"message {number}: its content is neither text nor a list of parts")
    message: dict[str, Json] = {"role": role, "content": "" if content is None else content}
    for key in ("tool_call_id", "name"):
        if isinstance(given.get(key), str):
            message[key] = given[key]
    if role == "assistant":
        if thought := next((given[key] for key in THOUGHTS if given.get(key)), None):
            message["reasoning_content"] = str(thought)
        if calls := given.get("tool_calls") or ([given["function_call"]] if given.get("function_call") else []):
            message["tool_calls"] = _calls(_parsed(calls), number)
    return cast(Message, message)


def _sharegpt(given: Json, number: int) -> Message:
    if not isinstance(given, Mapping):
        raise UserError(f"message {number} is not an object")
    speaker = given.get("from", given.get("role"))
    text = given.get("value", given.get("content"))
    role = SHAREGPT.get(str(speaker))
    if role is None:
        raise UserError(f"message {number} is from {speaker!r}: expected {', '.join(SHAREGPT)}")
    if not isinstance(text, str):
        raise UserError(f"message {number}: its `value` is no text")
    if role != "call":
        return cast(Message, {"role": role, "content": text})
    calls = _parsed(text)
    if isinstance(calls, str):
        raise UserError(f"message {number}: a function_call that is not JSON: {text!r:.60}")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": _calls(calls, number)}


def _calls(given: Json, number: int) -> Json:
    found = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"message {number}: a tool call without the `name` of its function")
        arguments = _parsed(function.get("arguments", {})) or {}
        if not isinstance(arguments, dict):
            raise UserError(
                f"message {number}: the arguments of {function['name']} are no JSON object: {arguments!r:.60}"
            )
        made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        found.append({**made, "id": call["id"]} if isinstance(call.get("id"), str) else made)
    return found


def schemas_of(given: object) -> tuple[dict[str, Json], ...] | None:
    """The schemas of the tools that a row offers; None: it does not say. Raises UserError."""
    given = _parsed(given)
    if given is None or given == "":
        return None
    found = []
    for tool in given if isinstance(given, list) else [given]:
        tool = _parsed(tool)
        schema = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str):
            raise UserError(f"`tools` holds what is no schema of a function with a `name`: {tool!r:.60}")
        found.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(schema)})
    return tuple(found)


def images_of(section: SftSection) -> Images:
    """How the rows of a recipe's section bring images."""
    return Images(section.images, section.image_folder, section.image_urls)


class Layout:
    """Lays out conversations as trajectories.

    tools: schemas that a conversation offers which does not say. limit: most tokens of a path. max_images: most images
    of a conversation.
    """

    def __init__(
        self,
        section: SftSection,
        writer: Writer,
        tools: Sequence[dict[str, Json]],
        limit: int,
        max_images: int = sys.maxsize,
    ) -> None:
        self.section, self.writer, self.tools, self.limit = section, writer, list(tools), limit
        self.max_images = max_images
        self.images = images_of(section)

    @property
    def chat(self) -> Chat:
        """The chat that it writes by."""
        return self.writer.chat

    def trajectory(self, conversation: Talk, name: str) -> Trajectory:
        """A conversation as a trajectory whose task is called `name`. Raises Refusal."""
        schemas = self.tools if conversation.tools is None else list(conversation.tools)
        learned = self._learned(conversation)
        try:
            messages = tuple(map(_plain, self._shown(conversation.messages)))
            lay = self._paths if self.section.history == "template" else self._conversation
            made = lay(messages, learned, schemas, Task(name, {}))
        except Refusal:
            raise
        except UserError as error:
            raise Refusal(str(error)) from error
        made = replace(made, tools=tuple(str(schema["function"]["name"]) for schema in schemas))
        return fitting(made, self.limit)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their images in the store. Raises UserError: the model sees none, one cannot be
        shown, or there are too many."""
        if not isinstance(self.chat, Seeing):
            if images := len(hashes(messages)):
                raise Refusal(f"it shows {images} {'image' if images == 1 else 'images'}, and the model reads text")
            return list(messages)
        check_count(messages, self.max_images)
        fetched = self.images.fetched(messages) if self.images.urls != "refuse" else messages
        return list(map(stored, fetched))

    def _learned(self, conversation: Talk) -> list[bool]:
        """For each message whether it is learned."""
        turns = [message["role"] == "assistant" for message in conversation.messages]
        if self.section.learn == "flagged":
            found = [turn and flag is True for turn, flag in zip(turns, conversation.flags, strict=True)]
        else:
            found = [turn and flag is not False for turn, flag in zip(turns, conversation.flags, strict=True)]
        if self.section.learn == "last":
            last = max((i for i, turn in enumerate(turns) if turn), default=-1)
            found = [each and i == last for i, each in enumerate(found)]
        if not any(found):
            raise Refusal("no assistant turn in it is to be learned")
        return found

    def _conversation(
        self, messages: Sequence[Message], learned: Sequence[bool], schemas: list[dict[str, Json]], task: Task
    ) -> Trajectory:
        """Lay out one path, on which every turn stays as it was said."""
        request = AsyncRolloutRequest(task.id, task, 0, finish=FinishReason.STOP)
        last = max(i for i, each in enumerate(learned) if each)
        runs = [list(run) for _, run in groupby(messages[: last + 1], key=lambda m: m["role"] == "assistant")]
        if runs[0][0]["role"] == "assistant":
            raise Refusal("it begins with an assistant's message; sft.history=template may lay it out")
        self.writer.open(request.main, runs[0], schemas)
        for run in runs[1:]:
            if run[0]["role"] != "assistant":
                self.writer.reply(request.main, run)
            elif len(run) > 1:
                raise Refusal("two assistant's messages follow each other; sft.history=template may lay it out")
            else:
                self._check(run[0], self.writer.say(request, request.main, run[0], schemas))
            request.main.messages += run
        made = request.trajectory()
        wanted = [each for each, message in zip(learned, messages, strict=True) if message["role"] == "assistant"]
        return trained(made, wanted[: len(made.turns)])

    def _paths(
        self, messages: Sequence[Message], learned: Sequence[bool], schemas: list[dict[str, Json]], task: Task
    ) -> Trajectory:
        """Lay out a path for each learned turn, with what is before it as the template writes it by then."""
        ids, turns, segments, told = array("i"), list[Turn](), list[Segment](), list[tuple[Message, ...]]()
        spans: list[ImageSpan] = []
        for i in (i for i, each in enumerate(learned) if each):
            if not i:
                raise Refusal("it begins with an assistant's message that is to be learned")
            start = len(ids)
            prompt = self.chat.render(messages[:i], schemas)
            if isinstance(self.chat, Seeing):
                spans += moved(self.chat.images_in(prompt, messages[:i]), start)
            ids.extend(prompt)
            said = self.writer.turn(messages[:i], messages[i], schemas, whole=True)
            self._check(messages[i], said)
            turns.append(Turn(len(ids), len(ids) + len(said)))
            ids.extend(said)
            segments.append(Segment(start, len(ids)))
            told.append(tuple(messages[: i + 1]))
        sampled = np.zeros(len(ids), np.bool_)
        for turn in turns:
            sampled[turn.start : turn.end] = True
        several = len(segments) > 1
        made = Trajectory(
            request_id=task.id, task=task, sample=0, ids=np.array(ids, np.int32), loss_mask=sampled.astype(np.uint8),
            logprobs=np.zeros(len(ids), np.float32), weight_version=np.where(sampled, 0, -1).astype(np.int32),
            prompt_length=turns[0].start, turns=tuple(turns), messages=told[-1], rewards={}, finish=FinishReason.STOP,
            segments=tuple(segments) if several else (), branches=tuple(told) if several else (), images=tuple(spans),
        )  # fmt: skip
        check_invariants(made)
        return made

    def _check(self, message: Message, ids: Sequence[int]) -> None:
        """Raise Refusal where the ids of a turn do not say what its message says: the template leaves a part of it out,
        or a text ends the turn."""
        written = _dense(self.chat.decode(ids))
        for what, text in (("content", content_text(message["content"])), ("thinking", _thought(message))):
            if _dense(text) not in written:
                raise Refusal(f"the chat template leaves out a part of an assistant's {what}")
        wanted = [
            (call["function"]["name"], set(call["function"]["arguments"])) for call in message.get("tool_calls", ())
        ]
        found = [(call.name, set(call.arguments)) for call in self.chat.parse(ids).calls] if wanted else []
        if found != wanted:
            raise Refusal("the chat template writes no tool calls that are read back as such")


def _plain(message: Message) -> Message:
    """The message; an assistant's parts, which many templates do not take, as one text. Raises UserError: a
    part is no text."""
    if message["role"] != "assistant" or isinstance(message["content"], str):
        return message
    return {**message, "content": content_text(message["content"])}


def _thought(message: Message) -> str:
    return message.get("reasoning_content", "")


def _dense(text: str) -> str:
    return "".join(text.split())


def trained(trajectory: Trajectory, which: Sequence[bool]) -> Trajectory:
    """The trajectory with these of its turns trained."""
    turns = tuple(replace(turn, trained=bool(one)) for turn, one in zip(trajectory.turns, which, strict=True))
    mask = np.zeros_like(trajectory.loss_mask)
    for turn in turns:
        mask[turn.start : turn.end] = turn.trained
    made = replace(trajectory, turns=turns, loss_mask=mask)
    check_invariants(made)
    return made


def fitting(trajectory: Trajectory, limit: int) -> Trajectory:
    """The trajectory. Raises Refusal: one of its paths has more tokens than `limit`."""
    tokens = max(map(len, trajectory.paths()))
    if tokens > limit:
        raise Refusal(f"it has {tokens} tokens, more than the {limit} that fit")
    return trajectory
