"""Our own chat for any template: the opening is rendered, each later stretch is a frame filled in, by ids."""

import json
from collections.abc import Sequence

from agentrl.chat.base import Opening, ParsedTurn
from agentrl.chat.encode import Encoder, Marks, PartialText
from agentrl.chat.forced import Forced, closed
from agentrl.chat.frame import Frame, Shape, content_text, shape_of
from agentrl.chat.frame_maker import MOST_FRAMED, FrameMaker
from agentrl.chat.parse import TurnParser
from agentrl.chat.probe import TurnEnds
from agentrl.chat.stream import TurnStream
from agentrl.chat.template import Template, TemplateRefusalError
from agentrl.constraint import Constraint
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Message

_KEPT = 256  # frames of openings, and of what follows a turn
_FRAMED = 1 << 17  # of tools and system prompts: they are kept with their frame


class BridgeChat:
    """A `Chat` (see base). description: which chat this is and why, for people."""

    images = False

    def __init__(
        self,
        template: Template,
        encoder: Encoder,
        ends: TurnEnds,
        parser: TurnParser,
        rewrites_history: str | None,
        description: str,
    ) -> None:
        self.stop_ids = ends.stop_ids
        self.rewrites_history = rewrites_history
        self.description = description
        self._stops = frozenset(ends.stop_ids)
        self._terminal = ends.own | ends.eos  # after these, anything may follow
        self.template, self._encoder, self._parser = template, encoder, parser
        self.call_format = parser.format.name if parser.format else None
        self._maker = FrameMaker(template, encoder, ends)
        self._forced: Forced | None = None
        self._frames: dict[Shape, Frame] = {}
        self._openings: dict[object, tuple[Frame | None, list[dict[str, Json]]]] = {}

    def stop_at(self, further: Sequence[int]) -> None:
        """Take further ids as ends of a turn."""
        self._terminal |= frozenset(further) - self._stops
        self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, *further]))
        self._stops = self._parser.stops = frozenset(self.stop_ids)

    def whole_ids(self, text: str) -> list[int]:
        """Ids of a rendered text."""
        return self._encoder.whole(text)

    def structural_in(self, messages: Sequence[Message]) -> bool:
        """Whether a content spells a token that has a meaning of its own."""
        return any(self._encoder.structural_in(content_text(message.get("content"))) for message in messages)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        """See `Chat.render`. What users and tools say is plain text, whatever tokens it spells."""
        frame = self._opening(messages, tools)
        if frame is not None and not self._sought(messages):
            return frame.fill(self._encoder, messages)
        return self._rendered(messages, tools)

    def lengths(self, openings: Sequence[Opening]) -> list[int]:
        """See `Measuring.lengths`."""
        found: dict[int, int] = {}
        gaps: list[tuple[int, str]] = []
        for i, (messages, tools) in enumerate(openings):
            frame = self._opening(messages, tools)
            if frame is None or self._sought(messages):
                found[i] = len(BridgeChat.render(self, messages, tools))  # not with what a subclass makes of messages
            else:
                found[i] = frame.fixed
                gaps += [(i, text) for text in frame.texts(messages)]
        for (i, _), length in zip(gaps, self._encoder.plain_lengths([text for _, text in gaps]), strict=True):
            found[i] += length
        return [found[i] for i in range(len(openings))]

    def _opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> Frame | None:
        """The frame of openings like this one, made once: same tools, roles and system prompts."""
        shape_of(messages)
        if len(messages) > MOST_FRAMED:
            return None
        if not all(m["role"] in ("system", "user") and isinstance(m.get("content"), str) for m in messages):
            return None
        said = tuple([(m["role"], m["content"] if m["role"] == "system" else bool(m["content"])) for m in messages])
        key = (said, tuple(map(id, tools)))
        if (known := self._openings.get(key)) is None:
            if len(self._openings) >= _KEPT:
                self._openings.clear()
            fixed = sum(len(str(m["content"])) for m in messages if m["role"] == "system") + len(str(list(tools)))
            if fixed > _FRAMED:
                return None
            known = self._openings[key] = self._opening_frame(messages, tools), list(tools)
        return known[0]

    def _opening_frame(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> Frame | None:
        try:
            return self._maker.opening(messages, tools)
        except TemplateRefusalError:
            return None

    def _sought(self, messages: Sequence[Message]) -> bool:
        """Whether the template would look at what a content says, and not only write it."""
        return (sought := self.template.looks_for) is not None and any(
            sought.search(content_text(message.get("content"))) for message in messages
        )

    def _rendered(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        said = [message for message in messages if message["role"] in ("user", "tool")]
        marks = None
        if self.structural_in(said):
            given = json.dumps([list(messages), list(tools)], ensure_ascii=False, default=str)
            marks = Marks([self.template.source, given])
        marked = [message if marks is None else self._marked(message, marks) for message in messages]
        try:
            text = self.template.text(marked, tools, generate=True)
        except TemplateRefusalError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the chat template cannot express the opening messages ({roles}): {error}") from error
        return self._encoder.marked(text, marks)

    def _marked(self, message: Message, marks: Marks) -> Message:
        content = message.get("content")
        if message["role"] not in ("user", "tool") or content is None:
            return message
        if isinstance(content, str):
            return {**message, "content": self._encoder.mark(content, marks)}
        parts = [{**part, "text": self._encoder.mark(str(part.get("text", "")), marks)} for part in content]
        return {**message, "content": parts}

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Chat.bridge`."""
        shape = shape_of(messages)
        if (frame := self._frames.get(shape)) is None:
            if len(self._frames) >= _KEPT:
                self._frames.clear()
            frame = self._frames[shape] = self._frame(shape)
        last = turn_ids[-1] if len(turn_ids) else -1
        if last in self._stops:
            ids = [] if last in frame.close or (not frame.opener and last in self._terminal) else list(frame.close)
        else:
            ids = [*self._parser.open_thought(turn_ids), *(frame.close or self.stop_ids[:1])]
        if frame.parts is None or self._sought(messages):
            return ids + self._maker.render(frame, messages)
        return ids + frame.fill(self._encoder, messages)

    def _frame(self, shape: Shape) -> Frame:
        roles = [role for role, _ in shape]
        if not roles:
            raise UserError("nothing to add after an assistant turn: there are no messages")
        if unknown := [role for role in roles if role not in ("user", "tool", "system")]:
            raise UserError(f"a message of role {unknown[0]!r} cannot be added after an assistant turn")
        return self._maker.make(shape)

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """See `Chat.parse`."""
        return self._parser.parse(turn_ids)

    def stream(self) -> TurnStream:
        """See `Streaming.stream`."""
        return self._parser.stream(PartialText(self._encoder))

    def constraint(self, schema: str | None, tools: Sequence[dict[str, Json]]) -> Constraint:
        """See `Constraining.constraint`."""
        if self._forced is None:
            ends = [token for token, one in self._encoder.structural.items() if one in self._stops]
            self._forced = Forced(self.template, self._parser.format, ends)
        return self._forced.constraint(schema, tools)

    def strict(self, tools: Sequence[dict[str, Json]]) -> Constraint:
        """See `StrictlyCalling.strict`."""
        shapes = self.constraint(None, [closed(tool) for tool in tools]).shapes
        known = self._encoder.structural
        openers = {next((token for token in known if shape.before.startswith(token)), "") for shape in shapes}
        if openers != {""} and len(openers) == 1:
            return Constraint(shapes, opener=openers.pop())
        raise UserError("calls of this model begin with no special token, from which on they could be held to a schema")

    def decode(self, ids: Sequence[int]) -> str:
        """See `Chat.decode`."""
        return self._encoder.decode(ids)

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """See `Completing.encode_prompt`."""
        return self._encoder.raw(prompt)

    def encode_text(self, text: str) -> list[int]:
        """See `Chat.encode_text`."""
        return self._encoder.plain(text)
