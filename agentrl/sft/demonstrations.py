"""Demonstrations as trajectories: written into a request turn by turn, as if an engine had sampled them.

So the mask that says what is learned, the ids around the turns and the invariants are those of reinforcement learning.
What is learned of a turn is what the chat template writes for it after the generation prompt, up to its stop id.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from random import Random
from time import monotonic
from typing import Any

from agentrl.chat.base import Chat, Seeing
from agentrl.chat.encode import Encoder
from agentrl.chat.template import Template
from agentrl.engine.base import Generation, GenerationFinish
from agentrl.errors import UserError, describe
from agentrl.images import ImageSpan, stored
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.recipe.schema import RolloutSection
from agentrl.rollout.compaction import asked, reopened, threshold
from agentrl.rollout.request import AsyncRolloutRequest, Conversation
from agentrl.trajectory import FinishReason, Trajectory, check_invariants

Summarize = Callable[[Sequence[Message]], str]
"""Writes a summary of what was said."""

OPENING_SECONDS = 60.0  # the deadline that an environment's `create` sees


def demonstration(env: Environment, task: Task, rng: Random, style: str) -> list[Message]:
    """Return `env.demonstrate`. Raises UserError, whatever the environment raises."""
    try:
        return list(env.demonstrate(task, rng, style))
    except UserError:
        raise
    except NotImplementedError as error:
        what = " ".join(str(error).split()) or f"environment {env.name!r} has no demonstrations"
        raise UserError(f"{what}, which `agentrl sft` learns from: give its class `demonstrate`") from error
    except Exception as error:  # the boundary: an environment may raise anything
        why = describe(error, place=False)
        raise UserError(f"environment {env.name!r}: demonstrate({task.id!r}) failed: {why}") from error


def summary(env: Environment, task: Task, messages: Sequence[Message], *, rng: Random, style: str) -> str:
    """Return `env.summarize`. Raises UserError, whatever the environment raises."""
    try:
        text = env.summarize(task, messages, rng, style)
    except NotImplementedError as error:
        raise UserError(f"{error}, which `agentrl sft` learns from: give its class `summarize`") from error
    except Exception as error:  # the boundary: an environment may raise anything
        why = describe(error, place=False)
        raise UserError(f"environment {env.name!r}: summarize({task.id!r}) failed: {why}") from error
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"environment {env.name!r}: summarize({task.id!r}) returned no text")
    return text


def _without_conversation(message: Message) -> Message:
    if "conversation" not in message:
        return message
    plain = message.copy()
    del plain["conversation"]
    return plain


class Demonstrator:
    """Asks the environment to demonstrate tasks, and writes what it says as token ids."""

    def __init__(
        self,
        env: Environment,
        tools: Sequence[Tool],
        chat: Chat,
        template: Template,
        encoder: Encoder,
        limits: RolloutSection | None = None,
    ) -> None:
        """Build a demonstrator. limits: of a recipe whose `compact` conversations are to be demonstrated; None: none is
        compacted."""
        self.env, self.tools, self.chat = env, tools, chat
        self.limits = limits or RolloutSection()
        self.template, self.encoder = template, encoder
        self._contexts: dict[tuple[str, ...], tuple[list[Message], str]] = {}

    async def messages(self, task: Task, rng: Random, style: str) -> tuple[list[Message], list[Message]]:
        """Return the opening messages and the demonstration after them."""
        session = Session(f"demonstrate/{task.id}", task, rng, monotonic() + OPENING_SECONDS)
        try:
            opening = list(await self.env.create(session, **task.create_kwargs))
        finally:
            await self.env.release(session)
        return opening, demonstration(self.env, task, rng, style)

    async def trajectory(self, task: Task, rng: Random, style: str) -> Trajectory:
        """Return one demonstration. Raises UserError where it cannot be written: no assistant turn, or a template that
        rewrites what stands before it."""
        opening, demonstration = await self.messages(task, rng, style)
        request = AsyncRolloutRequest(f"{task.id}/{style}", task, 0, finish=FinishReason.STOP)
        request.tools = offered(task, self.tools, self.env)
        self._open(request, opening)
        self._hold(request, request, demonstration, partial(summary, self.env, task, rng=rng, style=style))
        return self._checked(request)

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the task offers."""
        return self._schemas(offered(task, self.tools, self.env))

    def _schemas(self, tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
        return [tool.schema for tool in tools.values()]

    def _open(self, talk: Conversation, opening: Sequence[Message]) -> None:
        opening = self._shown(opening)
        talk.messages[:] = opening
        talk.opening_messages = talk.opening_messages or tuple(opening)
        ids = array("i", self.chat.render(opening, self._schemas(talk.tools)))
        talk.open_with(ids, self._images_in(ids, opening))

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their images in the store, where the model sees."""
        return list(map(stored, messages)) if isinstance(self.chat, Seeing) else list(messages)

    def _images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> Sequence[ImageSpan]:
        return self.chat.images_in(ids, messages) if isinstance(self.chat, Seeing) else ()

    def _hold(
        self, request: AsyncRolloutRequest, talk: Conversation, said: Sequence[Message], summarize: Summarize
    ) -> None:
        """Write what follows the opening of a conversation."""
        runs = [list(run) for _, run in groupby(said, key=lambda message: message["role"] == "assistant")]
        done: list[Message] = []
        for index, messages in enumerate(runs):
            done += messages
            self._write(request, talk, messages, summarize)
            last = index == len(runs) - 1
            if not last and messages[-1]["role"] != "assistant" and self._summary_due(talk):
                self._compact(request, talk, summarize(done))

    def _write(
        self, request: AsyncRolloutRequest, talk: Conversation, messages: list[Message], summarize: Summarize
    ) -> None:
        """Write one assistant turn, or what follows one."""
        said = messages[0]["role"] == "assistant"
        if said and len(messages) == 1:
            self._say(request, talk, messages[0])
        elif not said and talk.turn_ends:
            for message in messages:
                if conversation := message.get("conversation"):
                    self._branch(request, talk, conversation, summarize)
            messages = self._shown([_without_conversation(message) for message in messages])
            ids = self.chat.bridge(talk.ids[talk.turn_starts[-1] : talk.turn_ends[-1]].tolist(), messages)
            talk.add_bridge(ids, self._images_in(ids, messages))
        else:
            raise UserError(
                f"{self.env.name}: the demonstration of {request.task.id} does not alternate with the assistant"
            )
        talk.messages += messages

    def _branch(
        self,
        request: AsyncRolloutRequest,
        caller: Conversation,
        conversation: Sequence[Message],
        summarize: Summarize,
    ) -> None:
        """Write the conversation of a tool, which offers the tools that hold none themselves."""
        tools = {name: tool for name, tool in caller.tools.items() if not tool.converses}
        talk = Conversation(name=request.branch_name(), tools=tools)
        said = [message["role"] == "assistant" for message in conversation]
        begins = said.index(True) if True in said else len(said)
        self._open(talk, conversation[:begins])
        request.branches.append(talk)
        self._hold(request, talk, conversation[begins:], summarize)

    def _summary_due(self, talk: Conversation) -> bool:
        section, limits = self.limits.compact, self.limits
        return section is not None and len(talk.ids) >= threshold(section, limits.max_tokens)

    def _compact(self, request: AsyncRolloutRequest, talk: Conversation, text: str) -> None:
        """Let a conversation go on from a summary, as the driver does."""
        section = self.limits.compact
        assert section is not None
        start, end = talk.turn_starts[-1], talk.turn_ends[-1]
        replied = max(i for i, message in enumerate(talk.messages) if message["role"] == "assistant") + 1
        talk.messages[replied:] = replies = asked(section, talk.messages[replied:])
        del talk.ids[end:]
        talk.images = [span for span in talk.images if span.start < end]
        ids = self.chat.bridge(talk.ids[start:].tolist(), replies)
        talk.add_bridge(ids, self._images_in(ids, replies))
        self._say(request, talk, {"role": "assistant", "content": text})
        talk.messages.append({"role": "assistant", "content": text})
        request.branches.append(talk.begin_anew(request.branch_name()))
        self._open(talk, reopened(section, talk.opening_messages, text))

    def _say(self, request: AsyncRolloutRequest, talk: Conversation, message: Message) -> None:
        ids = self._turn_ids(talk.messages, message, self._schemas(talk.tools))
        request.begin_turn(talk)
        talk.add_sampled(Generation(ids, [0.0] * len(ids), GenerationFinish.STOP))
        talk.close_turn()

    def _turn_ids(self, before: Sequence[Message], message: Message, schemas: list[dict[str, Json]]) -> list[int]:
        """Return the ids of an assistant turn, the first stop id last."""
        context, prompt = self._context(before, schemas)
        whole = self.template.text([*context, message], schemas, generate=False)
        if not whole.startswith(prompt):
            raise UserError(
                "the chat template writes no assistant turn after its own generation prompt: cannot teach it"
            )
        ids = self.encoder.whole(whole[len(prompt) :])
        stop = next((i for i, token in enumerate(ids) if token in self.chat.stop_ids), None)
        if stop is None:
            raise UserError(
                "the chat template ends an assistant turn with none of the stop ids: cannot teach it to stop"
            )
        return ids[: stop + 1]

    def _context(self, before: Sequence[Message], schemas: list[dict[str, Json]]) -> tuple[list[Message], str]:
        """Return a conversation after which a turn is written as after `before`, and its rendering: the first one seen
        with the same tools and role of the last message, from its last user's message on. Rendering whole histories
        costs far more."""
        key = before[-1]["role"], *(schema["function"]["name"] for schema in schemas)
        if key not in self._contexts:
            first = max((i for i, m in enumerate(before) if m["role"] == "user"), default=0)
            context = list(before[first:])
            self._contexts[key] = context, self.template.text(context, schemas, generate=True)
        return self._contexts[key]

    def _checked(self, request: AsyncRolloutRequest) -> Trajectory:
        if not request.turns:
            raise UserError(f"{self.env.name}: the demonstration of {request.task.id} contains no assistant turn")
        trajectory = request.trajectory()
        check_invariants(trajectory)
        return trajectory
