"""Which tasks' opening prompts fit. A prompt that does not fit is left out before training, and said; never cut."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from agentrl.chat.base import Chat
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Session, Task

OPENING_SECONDS = 60.0  # the deadline that an environment's `create` sees while prompts are measured


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Tokens of each task's opening prompt, in the order given, and the most that fit."""

    lengths: tuple[int, ...]
    limit: int

    @property
    def fitting(self) -> list[int]:
        return [i for i, length in enumerate(self.lengths) if length <= self.limit]

    def report(self, what: str) -> str | None:
        """None when all fit; else the line to print. Raises UserError when none fits."""
        fit = len(self.fitting)
        if fit == len(self.lengths):
            return None
        line = (
            f"{len(self.lengths) - fit} of {len(self.lengths)} {what} prompts are longer than the {self.limit} tokens "
            f"that fit (longest: {max(self.lengths)})"
        )
        if fit == 0:
            raise UserError(f"{line}: none is left; raise rollout.max_tokens or take a model with a longer context")
        return line + ": left out"


async def measure_prompts(
    env: Environment, tools: Sequence[Tool], chat: Chat, tasks: Sequence[Task], limit: int
) -> PromptLengths:
    """Render every task's opening, by the environment's own `create` and `release`."""
    lengths = []
    for task in tasks:
        session = Session(f"measure/{task.id}", task, random.Random(0), monotonic() + OPENING_SECONDS)
        try:
            messages = await env.create(session, **task.create_kwargs)
        finally:
            await env.release(session)
        offered = [t.schema for t in tools if task.tools is None or t.name in task.tools]
        lengths.append(len(chat.render(messages, offered)))
        if len(lengths) % 64 == 0:
            await asyncio.sleep(0)
    return PromptLengths(tuple(lengths), limit)
