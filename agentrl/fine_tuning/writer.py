"""`Writer`: conversations that somebody else held, as token ids, as if an engine had sampled the assistant's turns.

So the ids around the turns and the mask that says what is learned are those of rollouts. What is learned of a turn is
what the chat template writes for it after the generation prompt, up to its stop id. Where the template writes none, as
GLM's, that is the token with which the next message begins.
"""

import json
from array import array
from collections.abc import Sequence

from agentrl.chat.base import Chat, Seeing, images_in
from agentrl.chat.encode import Encoder
from agentrl.chat.template import (
    CONTENT,
    USER,
    Template,
    TemplateRefusalError,
    call_value,
    probe_result,
    probe_turn,
)
from agentrl.engine.base import Generation, GenerationFinish
from agentrl.errors import UserError
from agentrl.images import stored
from agentrl.plugins.types import Json, Message
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.request import AsyncRolloutRequest

_KEPT = 256


class Writer:
    """Writes openings, assistant turns and what follows them into conversations."""

    def __init__(self, chat: Chat, template: Template, encoder: Encoder) -> None:
        self.chat, self.template, self.encoder = chat, template, encoder
        self._contexts: dict[tuple[str, str], tuple[list[Message], str]] = {}
        self._ends: dict[bool, int | None] = {}

    def open(self, conversation: Conversation, opening: Sequence[Message], schemas: Sequence[dict[str, Json]]) -> None:
        """Begin a conversation. Raises UserError: the template cannot express the messages."""
        opening = self._shown(opening)
        conversation.messages[:] = opening
        conversation.opening_messages = conversation.opening_messages or tuple(opening)
        ids = array("i", self.chat.render(opening, schemas))
        conversation.open_with(ids, images_in(self.chat, ids, opening))

    def say(
        self,
        request: AsyncRolloutRequest,
        conversation: Conversation,
        message: Message,
        schemas: Sequence[dict[str, Json]],
    ) -> list[int]:
        """Write an assistant's turn; return its ids. The caller adds the message to `conversation.messages`."""
        ids = self.turn(conversation.messages, message, schemas)
        request.begin_turn(conversation)
        conversation.add_sampled(Generation(ids, [0.0] * len(ids), GenerationFinish.STOP))
        conversation.close_turn()
        return ids

    def reply(self, conversation: Conversation, messages: Sequence[Message]) -> None:
        """Write what follows an assistant's turn. Raises UserError: the chat cannot go on with such messages."""
        self.bridge(
            conversation, conversation.ids[conversation.turn_starts[-1] : conversation.turn_ends[-1]].tolist(), messages
        )

    def bridge(self, conversation: Conversation, turn: Sequence[int], messages: Sequence[Message]) -> None:
        """Write what follows a turn of these ids."""
        messages = self._shown(messages)
        ids = self.chat.bridge(turn, messages)
        conversation.add_bridge(ids, images_in(self.chat, ids, messages))

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their images in the store, where the model sees."""
        return list(map(stored, messages)) if isinstance(self.chat, Seeing) else list(messages)

    def turn(
        self, before: Sequence[Message], message: Message, schemas: Sequence[dict[str, Json]], *, whole: bool = False
    ) -> list[int]:
        """The ids of an assistant's turn after the messages `before`, the first stop id last. whole: render all
        of `before`, of which a template may make something else as it goes on. Raises UserError."""
        try:
            if whole:
                context, prompt = list(before), self.template.text(before, schemas, generate=True)
            else:
                context, prompt = self._context(before, schemas)
            written = self.template.text([*context, message], schemas, generate=False)
        except TemplateRefusalError as error:
            raise UserError(f"the chat template cannot express an assistant turn: {error}") from error
        if not written.startswith(prompt):
            raise UserError(
                "the chat template writes no assistant turn after its own generation prompt: cannot teach it"
            )
        ids = self.encoder.whole(written[len(prompt) :])
        stop = next((i for i, token in enumerate(ids) if token in self.chat.stop_ids), None)
        return [*ids, self._next_role(bool(message.get("tool_calls")))] if stop is None else ids[: stop + 1]

    def _next_role(self, calls: bool) -> int:
        """The stop id with which the message after a turn begins, where nothing else ends that. calls: whether
        the turn holds calls. Raises UserError: there is none."""
        if calls not in self._ends:
            turn = probe_turn(int(calls), "" if calls else CONTENT)
            user: Message = {"role": "user", "content": USER}
            conversation: list[Message] = [user, turn, probe_result(0, "Zqc000x") if calls else user]
            try:
                text = self.template.text(conversation, self.template.tools, generate=True)
            except TemplateRefusalError:
                text = ""
            tail = text.partition(call_value(0) if calls else CONTENT)[2]
            pieces = (token for token, _ in self.encoder.split(tail))
            self._ends[calls] = next((token for token in pieces if token in self.chat.stop_ids), None)
        if (end := self._ends[calls]) is None:
            raise UserError(
                "the chat template ends an assistant turn with none of the stop ids: cannot teach it to stop"
            )
        return end

    def _context(self, before: Sequence[Message], schemas: Sequence[dict[str, Json]]) -> tuple[list[Message], str]:
        """A conversation after which a turn is written as after `before`, and its rendering: the first one seen
        with the same tools and role of the last message, from its last user's message on. Rendering whole histories
        costs far more."""
        key = before[-1]["role"], json.dumps(schemas, sort_keys=True, default=str)
        if key not in self._contexts:
            if len(self._contexts) >= _KEPT:
                self._contexts.clear()
            first = max((i for i, m in enumerate(before) if m["role"] == "user"), default=0)
            context = list(before[first:])
            self._contexts[key] = context, self.template.text(context, schemas, generate=True)
        return self._contexts[key]
