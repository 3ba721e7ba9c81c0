"""Demonstrations as trajectories: written into a request turn by turn (`writer.py`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from random import Random
from time import monotonic

from agentrl.chat.base import Chat
from agentrl.chat.encode import Encoder
from agentrl.chat.template import Template
from agentrl.errors import UserError, describe
from agentrl.fine_tuning.writer import Writer
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.compaction import asked, reopened, threshold
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trajectory import FinishReason, Trajectory, check_invariants

Summarize = Callable[[Sequence[Message]], str]
"""Writes a summary of what was said."""

OPENING_SECONDS = 60.0  # the deadline that an environment's `create` sees


def demonstration(env: Environment, task: Task, rng: Random, style: str) -> list[Message]:
    """`env.demonstrate`. Raises UserError, whatever the environment raises."""
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
    """`env.summarize`. Raises UserError, whatever the environment raises."""
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
        self.writer = Writer(chat, template, encoder)

    async def messages(self, task: Task, rng: Random, style: str) -> tuple[list[Message], list[Message]]:
        """The opening messages and the demonstration after them."""
        session = Session(f"demonstrate/{task.id}", task, rng, monotonic() + OPENING_SECONDS)
        try:
            opening = list(await self.env.create(session, **task.create_kwargs))
        finally:
            await self.env.release(session)
        return opening, demonstration(self.env, task, rng, style)

    async def trajectory(self, task: Task, rng: Random, style: str) -> Trajectory:
        """One demonstration. Raises UserError where it cannot be written: no assistant turn, or a template that
        rewrites what stands before it."""
        opening, demonstration = await self.messages(task, rng, style)
        request = AsyncRolloutRequest(f"{task.id}/{style}", task, 0, finish=FinishReason.STOP)
        request.main.tools = offered(task, self.tools, self.env)
        self._open(request.main, opening)
        self._hold(request, request.main, demonstration, partial(summary, self.env, task, rng=rng, style=style))
        return self._checked(request)

    def schemas(self, task: Task) -> list[dict[str, Json]]:
        """The schemas of the tools that the task offers."""
        return self._schemas(offered(task, self.tools, self.env))

    def _schemas(self, tools: Mapping[str, Tool]) -> list[dict[str, Json]]:
        return [tool.schema for tool in tools.values()]

    def _open(self, conversation: Conversation, opening: Sequence[Message]) -> None:
        self.writer.open(conversation, opening, self._schemas(conversation.tools))

    def _hold(
        self, request: AsyncRolloutRequest, conversation: Conversation, said: Sequence[Message], summarize: Summarize
    ) -> None:
        """Write what follows the opening of a conversation."""
        runs = [list(run) for _, run in groupby(said, key=lambda message: message["role"] == "assistant")]
        done: list[Message] = []
        for index, messages in enumerate(runs):
            done += messages
            self._write(request, conversation, messages, summarize)
            last = index == len(runs) - 1
            if not last and messages[-1]["role"] != "assistant" and self._summary_due(conversation):
                self._compact(request, conversation, summarize(done))

    def _write(
        self, request: AsyncRolloutRequest, conversation: Conversation, messages: list[Message], summarize: Summarize
    ) -> None:
        """Write one assistant turn, or what follows one."""
        said = messages[0]["role"] == "assistant"
        if said and len(messages) == 1:
            self.writer.say(request, conversation, messages[0], self._schemas(conversation.tools))
        elif not said and conversation.turn_ends:
            for message in messages:
                if held := message.get("conversation"):
                    self._branch(request, conversation, held, summarize)
            self.writer.reply(conversation, [_without_conversation(message) for message in messages])
        else:
            raise UserError(
                f"{self.env.name}: the demonstration of {request.task.id} does not alternate with the assistant"
            )
        conversation.messages += messages

    def _branch(
        self, request: AsyncRolloutRequest, caller: Conversation, messages: Sequence[Message], summarize: Summarize
    ) -> None:
        """Write the conversation of a tool, which offers the tools that hold none themselves."""
        tools = {name: tool for name, tool in caller.tools.items() if not tool.converses}
        conversation = Conversation(name=request.branch_name(), tools=tools)
        said = [message["role"] == "assistant" for message in messages]
        begins = said.index(True) if True in said else len(said)
        self._open(conversation, messages[:begins])
        request.branches.append(conversation)
        self._hold(request, conversation, messages[begins:], summarize)

    def _summary_due(self, conversation: Conversation) -> bool:
        section, limits = self.limits.compact, self.limits
        return section is not None and len(conversation.ids) >= threshold(section, limits.max_tokens)

    def _compact(self, request: AsyncRolloutRequest, conversation: Conversation, text: str) -> None:
        """Let a conversation go on from a summary, as the driver does."""
        section = self.limits.compact
        assert section is not None
        start, end = conversation.turn_starts[-1], conversation.turn_ends[-1]
        replied = max(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant") + 1
        conversation.messages[replied:] = replies = asked(section, conversation.messages[replied:])
        del conversation.ids[end:]
        conversation.images = [span for span in conversation.images if span.start < end]
        self.writer.bridge(conversation, conversation.ids[start:].tolist(), replies)
        self.writer.say(
            request, conversation, {"role": "assistant", "content": text}, self._schemas(conversation.tools)
        )
        conversation.messages.append({"role": "assistant", "content": text})
        request.branches.append(conversation.begin_anew(request.branch_name()))
        self._open(conversation, reopened(section, conversation.opening_messages, text, conversation.messages))

    def _checked(self, request: AsyncRolloutRequest) -> Trajectory:
        if not request.turns:
            raise UserError(f"{self.env.name}: the demonstration of {request.task.id} contains no assistant turn")
        trajectory = request.trajectory()
        check_invariants(trajectory)
        return trajectory
