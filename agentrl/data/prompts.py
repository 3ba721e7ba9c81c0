"""Which tasks' opening prompts fit. A prompt that does not fit is left out before training, and said; never cut."""

import asyncio
import logging
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import monotonic

from agentrl.chat.base import Chat, Measuring, Opening, Seeing
from agentrl.containment.threads import in_thread
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError, check_settings, contained, describe, torch_settings
from agentrl.images import STORE, ImageError, check_count, hashes, in_image_thread, sized
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import offered
from agentrl.plugins.types import Message, Session, Task

_log = logging.getLogger("agentrl.data")
AT_ONCE = 64  # openings made together, and measured in one batch
OPENING_SECONDS = 60.0  # the deadline that an environment's `create` sees while prompts are measured


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Tokens of each task's opening prompt, in the order given, the most that fit, and what cannot be shown."""

    lengths: tuple[int, ...]
    """Tokens of each task's opening prompt, in the order given."""
    limit: int
    """The most tokens that fit."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """By index the tasks with an image that cannot be shown, and why."""

    @property
    def fitting(self) -> list[int]:
        """Indices of the tasks whose prompt fits and can be shown."""
        return [i for i, length in enumerate(self.lengths) if length <= self.limit and i not in self.broken]

    def report(self, what: str) -> str | None:
        """None when all fit; else the line to print. Raises UserError when none fits."""
        fit, said = len(self.fitting), []
        if self.broken:
            first = next(iter(self.broken.values()))
            count = f"{len(self.broken)} of {len(self.lengths)} {what} prompts"
            said.append(f"{count} hold images that cannot be shown (the first: {first})")
        if long := sum(length > self.limit for length in self.lengths):
            said.append(
                f"{long} of {len(self.lengths)} {what} prompts are longer than the {self.limit} tokens that fit "
                f"(longest: {max(self.lengths)})"
            )
        line = "; ".join(said)
        if said and fit == 0:
            mend = "; raise rollout.max_tokens or take a model with a longer context" if long else ""
            raise UserError(f"{line}: none is left{mend}")
        return line + ": left out" if said else None


async def drawn(sampler: TaskSampler, count: int, playable: Callable[[int], Awaitable[bool]]) -> list[int]:
    """The indices of the next `count` tasks that can be played. Raises what `playable` raises."""
    found: list[int] = []
    while len(found) < count:
        new = sampler.draw(count - len(found))
        shown = await asyncio.gather(*map(playable, new))
        found += [index for index, can in zip(new, shown, strict=True) if can]
    return found


async def showable(sampler: TaskSampler, env: Environment, chat: Chat, tasks: Sequence[Task], index: int) -> bool:
    """Whether the images of a task that was drawn can be shown, which only decoding them says. Where not, the
    task is excluded, and that is said. Raises UserError: no task is left."""
    if not isinstance(chat, Seeing) or (why := await unseen(env, chat, task := tasks[index])) is None:
        return True
    _leave_out(sampler, index, task, why)
    return False


async def fits(
    sampler: TaskSampler,
    tasks: Sequence[Task],
    index: int,
    measure: Callable[[Sequence[Task]], Awaitable[PromptLengths]],
) -> bool:
    """Whether the prompt of a task that an `Order` drew fits, which is measured once: which ones it draws, nobody knows
    before. Where not, the task is excluded, and that is said. Raises UserError: no task is left."""
    if index in sampler.fitting:
        return True
    found = await measure([tasks[index]])
    if found.fitting:
        sampler.fitting.add(index)
        return True
    long = f"its prompt has {found.lengths[0]} tokens, and {found.limit} fit (rollout.max_tokens)"
    _leave_out(sampler, index, tasks[index], found.broken.get(0, long))
    return False


def _leave_out(sampler: TaskSampler, index: int, task: Task, why: str) -> None:
    if index in sampler.excluded:  # it was drawn twice at the same time
        return
    sampler.excluded |= {index}
    _log.warning("task %s is left out: %s", task.id, why)
    if len(sampler.excluded) >= sampler.size:
        raise UserError(f"no task is left that can be played (the last: {task.id}: {why})")


async def unseen(env: Environment, chat: Chat, task: Task) -> str | None:
    """Why an image of a task's opening cannot be shown, once it is decoded; None: all of them can. Raises
    UserError: the environment fails to give them, or takes longer than OPENING_SECONDS."""
    if not isinstance(chat, Seeing):
        return None
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            images = await in_thread(_images_of, env, task)
        await in_image_thread(_decode, chat, images)
    except ImageError as error:
        return f"an image cannot be shown: {error}"
    except TimeoutError as error:
        late = f"images({task.id!r}) did not return within {OPENING_SECONDS:g} seconds"
        raise UserError(f"environment {env.name!r}: {late}") from error
    return None


def _images_of(env: Environment, task: Task) -> list[object]:
    """The images that the environment gives, which may have to be fetched. Raises ImageError as it does, and
    UserError for anything else that it raises."""
    try:
        return list(env.images(task))
    except ImageError:
        raise
    except BaseException as error:
        failure = contained(error)
        raise UserError(f"environment {env.name!r}: images({task.id!r}) failed: {describe(failure)}") from error


def _decode(chat: Seeing, images: Sequence[object]) -> None:
    for image in images:
        chat.image_tokens(STORE.put(image))


async def measure_prompts(
    env: Environment,
    tools: Sequence[Tool],
    chat: Chat,
    tasks: Sequence[Task],
    limit: int,
    max_images: int = sys.maxsize,
) -> PromptLengths:
    """Render every task's opening, by the environment's own `create` and `release`, `AT_ONCE` of them together. limit:
    the most tokens that fit. max_images: the most images.

    A task whose `create` fails counts as 0 tokens long: its requests will fail too, where that is counted and said.
    Of images the sizes are read, and whether their files are whole; none is decoded or kept, however many tasks come.
    """
    schema = cache(lambda tool: tool.schema)  # one object a tool, by which the chat knows openings of one form
    lengths: list[int] = []
    broken: dict[int, str] = {}
    for start in range(0, len(tasks), AT_ONCE):
        some = tasks[start : start + AT_ONCE]
        each = await asyncio.gather(*(_opening(env, task) for task in some), return_exceptions=True)
        openings = [() if isinstance(one, BaseException) else one for one in each]  # it cancelled its own task
        for i, one in enumerate(openings):
            if isinstance(one, ImageError):
                broken[start + i], openings[i] = f"{some[i].id}: {one}", ()
            elif isinstance(chat, Seeing):
                openings[i] = _sized(chat, one, some[i], start + i, broken, max_images)
        shown = [[schema(tool) for tool in offered(task, tools, env).values()] for task in some]
        lengths += _lengths(chat, list(zip(openings, shown, strict=True)))
    return PromptLengths(tuple(lengths), limit, broken)


def _sized(
    chat: Seeing, messages: Sequence[Message], task: Task, index: int, broken: dict[int, str], most: int
) -> Sequence[Message]:
    """The messages with the sizes of their images; none where one cannot be shown, or there are more than
    `most`, which `broken` is told."""
    try:
        check_count(messages, most)
        found = [sized(message) for message in messages]
        for size in hashes(found):
            chat.image_tokens(size)
    except ImageError as error:
        broken[index] = f"{task.id}: {error}"
    except Exception as error:  # noqa: BLE001 - said and counted when its requests fail alike
        _log.debug("an opening cannot be shown: %s", describe(error))
    else:
        return found
    return ()


def _lengths(chat: Chat, openings: Sequence[Opening]) -> list[int]:
    """Tokens of each; 0 where there is no message."""
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


async def _opening(env: Environment, task: Task) -> Sequence[Message] | ImageError:
    """What `create` returns, released again, or the ImageError that it raises; nothing where it raises anything
    else or takes too long."""
    session = Session(f"measure/{task.id}", task, random.Random(0), monotonic() + OPENING_SECONDS)
    messages: Sequence[Message] | ImageError = ()
    settings = torch_settings()
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            messages = await env.create(session, **task.create_kwargs)
        check_settings(settings)
    except ImageError as error:
        messages = error
    except BaseException as error:  # noqa: BLE001 - said and counted when its requests fail alike
        _log.debug("%s: %s.create: %s", task.id, env.name, describe(contained(error)))
    finally:
        await _release(env, session)
    return messages


async def _release(env: Environment, session: Session) -> None:
    settings = torch_settings()
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            await env.release(session)
        check_settings(settings)
    except BaseException as error:  # noqa: BLE001 - one environment's release must not end the run
        _log.warning("%s: %s.release: %s", session.id, env.name, describe(contained(error)))
