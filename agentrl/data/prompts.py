"""Which tasks' opening prompts fit. A prompt that does not fit is left out before training, and said; never cut."""

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from time import monotonic

from agentrl.chat.base import Chat, Measuring, Opening, Seeing
from agentrl.errors import UserError, contained, describe
from agentrl.images import stored
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import Message, Session, Task

_log = logging.getLogger("agentrl.data")
AT_ONCE = 64  # openings made together, and measured in one batch
OPENING_SECONDS = 60.0  # the deadline that an environment's `create` sees while prompts are measured


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Tokens of each task's opening prompt, in the order given, and the most that fit."""

    lengths: tuple[int, ...]
    """Tokens of each task's opening prompt, in the order given."""
    limit: int
    """The most tokens that fit."""

    @property
    def fitting(self) -> list[int]:
        """Indices of the tasks whose prompt fits."""
        return [i for i, length in enumerate(self.lengths) if length <= self.limit]

    def report(self, what: str) -> str | None:
        """Return None when all fit; else the line to print. Raises UserError when none fits."""
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
    """Render every task's opening, by the environment's own `create` and `release`, `AT_ONCE` of them together.

    A task whose `create` fails counts as 0 tokens long: its requests will fail too, where that is counted and said.
    """
    schema = cache(lambda tool: tool.schema)  # one object a tool, by which the chat knows openings of one form
    lengths: list[int] = []
    for start in range(0, len(tasks), AT_ONCE):
        some = tasks[start : start + AT_ONCE]
        each = await asyncio.gather(*(_opening(env, task) for task in some), return_exceptions=True)
        openings = [() if isinstance(one, BaseException) else one for one in each]  # it cancelled its own task
        if isinstance(chat, Seeing):
            openings = [_stored(messages) for messages in openings]
        shown = [[schema(tool) for tool in offered(task, tools, env).values()] for task in some]
        lengths += _lengths(chat, list(zip(openings, shown, strict=True)))
    return PromptLengths(tuple(lengths), limit)


def _stored(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with their images in the store; none where an image is broken."""
    try:
        return [stored(message) for message in messages]
    except Exception as error:  # noqa: BLE001 - said and counted when its requests fail alike
        _log.debug("an opening cannot be shown: %s", describe(error))
        return ()


def _lengths(chat: Chat, openings: Sequence[Opening]) -> list[int]:
    """Return tokens of each; 0 where there is no message."""
    real = [opening for opening in openings if opening[0]]
    try:
        counted = iter(chat.lengths(real) if isinstance(chat, Measuring) else [len(chat.render(*one)) for one in real])
    except UserError:
        raise
    except Exception:  # noqa: BLE001 - of messages that are none: which one it was is found out
        counted = iter([_length(chat, one) for one in real])
    return [next(counted) if messages else 0 for messages, _ in openings]


def _length(chat: Chat, opening: Opening) -> int:
    try:
        return len(chat.render(*opening))
    except Exception as error:  # noqa: BLE001 - said and counted when its requests fail alike
        _log.debug("an opening cannot be rendered: %s", describe(error))
        return 0


async def _opening(env: Environment, task: Task) -> Sequence[Message]:
    """Return what `create` returns, released again; nothing where it raises or takes too long."""
    session = Session(f"measure/{task.id}", task, random.Random(0), monotonic() + OPENING_SECONDS)
    messages: Sequence[Message] = ()
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            messages = await env.create(session, **task.create_kwargs)
    except BaseException as error:  # noqa: BLE001 - said and counted when its requests fail alike
        _log.debug("%s: %s.create: %s", task.id, env.name, describe(contained(error)))
    finally:
        await _release(env, session)
    return messages


async def _release(env: Environment, session: Session) -> None:
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            await env.release(session)
    except BaseException as error:  # noqa: BLE001 - one environment's release must not end the run
        _log.warning("%s: %s.release: %s", session.id, env.name, describe(contained(error)))
