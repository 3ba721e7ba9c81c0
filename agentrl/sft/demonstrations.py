"""Demonstrations as trajectories: written into a request turn by turn, as if an engine had sampled them.

So the mask that says what is learned, the ids around the turns and the invariants are those of reinforcement learning.
What is learned of a turn is what the chat template writes for it after the generation prompt, up to its stop id.
"""

from array import array
from collections.abc import Sequence
from itertools import groupby
from random import Random
from time import monotonic
from typing import Any

from agentrl.chat.base import Chat
from agentrl.chat.encode import Encoder
from agentrl.chat.template import Template
from agentrl.engine.base import Generation, GenerationFinish
from agentrl.errors import UserError, describe
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trajectory import FinishReason, Trajectory, check_invariants

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


class Demonstrator:
    """Asks the environment to demonstrate tasks, and writes what it says as token ids."""

    def __init__(
        self, env: Environment, tools: Sequence[Tool], chat: Chat, template: Template, encoder: Encoder
    ) -> None:
        self.env, self.tools, self.chat = env, tools, chat
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
        request = AsyncRolloutRequest(f"{task.id}/{style}", task, 0, 0, finish=FinishReason.STOP)
        request.messages = [*opening]
        schemas = self.schemas(task)
        request.open_with(array("i", self.chat.render(opening, schemas)))
        for said, run in groupby(demonstration, key=lambda message: message["role"] == "assistant"):
            messages = list(run)
            if said and len(messages) == 1:
                self._say(request, messages[0], schemas)
            elif not said and request.turns:
                last = request.turns[-1]
                request.add_bridge(self.chat.bridge(request.ids[last.start : last.end].tolist(), messages))
            else:
                raise UserError(
                    f"{self.env.name}: the demonstration of {task.id} does not alternate with the assistant"
                )
            request.messages += messages
        return self._checked(request)

    def schemas(self, task: Task) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the task offers."""
        return [tool.schema for tool in offered(task, self.tools, self.env).values()]

    def _say(self, request: AsyncRolloutRequest, message: Message, schemas: list[dict[str, Json]]) -> None:
        ids = self._turn_ids(request.messages, message, schemas)
        request.add_sampled(Generation(ids, [0.0] * len(ids), GenerationFinish.STOP))
        request.close_turn()

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
