"""The hooks around the turns: `create` before the first token, `calc_reward` after the last, `release` always.

A hook that fails is the machinery's fault: it raises here, and the driver makes the request FAILED.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.containment.deadline import GRACE, DeadlineExceededError, DeadlineTimer, OwnedTask, leave_behind
from agentrl.errors import PlainError, UserError, contained, describe
from agentrl.plugins.environment import Environment, declared_parts
from agentrl.plugins.span import span
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Message, Session, Task, ToolKwargs
from agentrl.rollout.conversation import nth
from agentrl.rollout.request import AsyncRolloutRequest, Created
from agentrl.rollout.workspaces import CHANGES, WAIT, Workspaces
from agentrl.trajectory import STEP, Boundary
from agentrl.workspace.patch import patch_of

RELEASE_SECONDS = 10.0
"""How long one plugin's `release` may take before it is cancelled."""

LARGEST = 1e15
"""What a reward may be, and the sum of a sample's: the squares of larger ones do not fit the numbers of a GPU."""

TAMPERING = "tampering"
"""The key of a trajectory's `extra` for what an agent left that would have decided for its grader, as `kind: path`."""
_TAMPERING_LINES = 100  # that are kept
METRICS = "metrics"
"""The key of a trajectory's `extra` for an environment's own numbers (`Session.metrics`)."""
_METRICS = 64  # that a rollout may have
SEATS = "seats"
"""The key under which an environment's rewards hold those of seats (`X-Agentrl-Role`), a number each."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that messages of an environment may have."""

_PLUGIN_SEEDS = 1 << 32  # apart from the seeds of turns, which count from 0
_NO_KWARGS = ToolKwargs()
_log = logging.getLogger("agentrl.rollout")


class PluginError(PlainError):
    """A hook returned what its contract does not allow."""


async def create_all(
    request: AsyncRolloutRequest,
    environment: Environment,
    timer: DeadlineTimer,
    checked: "Checked | None" = None,
    workspaces: Workspaces | None = None,
) -> None:
    """Create the environment, whose messages open the conversation, then the tools that the task offers. checked: in
    place of `checked_messages`. workspaces: where the request's is opened from, first of all."""
    task = request.task
    if workspaces is not None:
        request.main.at = Boundary.ENVIRONMENT, f"{environment.name}.prepare"
        await timer.wait(_open(request, workspaces), request.main.deadline)
    session = _created(request, environment, {}, {})
    request.main.at = Boundary.ENVIRONMENT, f"{environment.name}.create"
    opening = await timer.wait(environment.create(session, **task.create_kwargs), request.main.deadline)
    what = "opening messages"
    request.main.messages.extend(checked_messages(opening, what) if checked is None else await checked(opening, what))
    if not request.main.messages:
        raise PluginError("it returned no opening messages")
    for name, tool in request.main.tools.items():
        kwargs = task.tools_kwargs.get(name, _NO_KWARGS)
        session = _created(request, tool, kwargs.calc_reward_kwargs, kwargs.release_kwargs)
        request.main.at = Boundary.TOOL, f"{name}.create"
        await timer.wait(tool.create(session, **kwargs.create_kwargs), request.main.deadline)


async def _open(request: AsyncRolloutRequest, workspaces: Workspaces) -> None:
    with span(WAIT):
        request.workspace = workspace = await workspaces.open(request.task)
    request.cleanups.append((f"workspace {workspace.id}", workspace.close))


async def end_workspace(request: AsyncRolloutRequest, timer: DeadlineTimer, seconds: float) -> None:
    """End the processes of the request's workspace, before its rewards are computed, and keep what it changed."""
    workspace = request.workspace
    if workspace is None:
        return
    request.main.at = Boundary.WORKSPACE, f"workspace {workspace.id}"
    await timer.wait(workspace.end_processes(), time.monotonic() + seconds)
    patch = await timer.wait(patch_of(workspace), time.monotonic() + seconds)
    request.extra[CHANGES] = patch.json()


Checked = Callable[[object, str], Awaitable["list[Message]"]]
"""The messages of an environment, or raises; see `checked_messages`."""


def checked_messages(given: object, what: str = "messages") -> "list[Message]":
    """The messages of an environment. Raises PluginError unless these are messages, each with its role and content."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise PluginError(f"it returned no {what} but {type(given).__name__}")
    messages = list(given)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PluginError(f"it returned no {what}: one has no role")
        if message["role"] not in ROLES:
            raise PluginError(f"a message has the role {message['role']!r:.40}; expected one of {', '.join(ROLES)}")
        if "content" not in message and not message.get("tool_calls"):
            raise PluginError(f"a message of the {message['role']} has no content")
        if not isinstance(message.get("content"), str | list | None):
            kind = type(message["content"]).__name__
            raise PluginError(
                f"a message of the {message['role']} has a content of type {kind}; expected a text or parts"
            )
    return messages


def _created(
    request: AsyncRolloutRequest,
    plugin: Environment | Tool,
    reward: Mapping[str, object],
    release: Mapping[str, object],
) -> Session:
    rng = random.Random(nth(request.seed, _PLUGIN_SEEDS + len(request.created)))
    environment = request.created[0].session if request.created else None
    session = Session(
        request.id, request.task, rng, request.main.deadline, request.main.messages, environment=environment,
        workspace=request.workspace,
    )  # fmt: skip
    request.created.append(Created(plugin, session, reward, release))
    return session


async def calc_rewards(request: AsyncRolloutRequest, timer: DeadlineTimer, seconds: float) -> dict[str, float]:
    """Every plugin's reward by name, each hook within `seconds`. A plain number goes under the plugin's name,
    parts of one name add up, and the turns' step rewards are `step`. Raises for a value that is no finite number."""
    rewards: dict[str, float] = {}
    for created in request.created:
        name = created.plugin.name
        request.main.at = Boundary.REWARD, f"{name}.calc_reward"
        work = created.plugin.calc_reward(created.session, **created.calc_reward_kwargs)
        value = await timer.wait(work, time.monotonic() + seconds)
        if value is None and isinstance(created.plugin, Tool):
            continue
        declared = declared_parts(created.plugin)
        parts = value.items() if isinstance(value, Mapping) else ((name, value),)
        for part, number in parts:
            if not isinstance(part, str):
                raise PluginError(f"a reward's name is {type(part).__name__}, not text")
            if part == SEATS and isinstance(number, Mapping) and created.plugin is request.created[0].plugin:
                request.seats = _seats(number)
                continue
            if declared is not None and part not in declared:
                raise PluginError(f"the reward part {part!r:.60} is none of its `reward_parts`: {', '.join(declared)}")
            rewards[part] = rewards.get(part, 0.0) + finite(number, part)
        if created.session.metrics and created.plugin is request.created[0].plugin:
            request.extra[METRICS] = _metrics(created.session.metrics)
        if created.session.tampering:
            request.extra[TAMPERING] = [str(line) for line in created.session.tampering[:_TAMPERING_LINES]]
    if step := request.step_reward:
        rewards[STEP] = rewards.get(STEP, 0.0) + step
    return rewards


def _seats(given: Mapping[Any, object]) -> dict[str, float]:
    """The rewards of seats as numbers by name. Raises PluginError."""
    for name in given:
        if not isinstance(name, str) or not name:
            raise PluginError(f"the name of a seat is {name!r:.40}, not text")
    return {str(name): finite(value, f"of seat {name}") for name, value in given.items()}


def _metrics(given: object) -> dict[str, float]:
    """An environment's own numbers by name. Raises PluginError."""
    if not isinstance(given, Mapping):
        raise PluginError(f"`session.metrics` is {type(given).__name__}, not numbers by name")
    if len(given) > _METRICS:
        raise PluginError(f"`session.metrics` has {len(given)} names; at most {_METRICS}")
    return {str(name)[:80]: finite(value, f"metric {name}") for name, value in given.items()}


def finite(value: object, what: str) -> float:
    """`value` as a float. Raises PluginError unless it is a finite number of at most LARGEST."""
    try:
        if isinstance(value, str | bytes):  # of which `float` would make a number
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except Exception:  # noqa: BLE001 - boundary: a plugin's own type may do anything here
        raise PluginError(f"the reward {what!r} is {type(value).__name__}, not a number") from None
    if not -LARGEST <= number <= LARGEST:
        more = f", beyond {LARGEST:g}" if math.isfinite(number) else ""
        raise PluginError(f"the reward {what!r} is {number:g}{more}")
    return number


def check_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> None:
    """Raise PluginError where the parts, each of which may be fine, add up to what is not."""
    finite(sum(value * weights.get(part, 1.0) for part, value in rewards.items()), "in all")


async def release_all(request: AsyncRolloutRequest) -> None:
    """Release what was created, last first, then make the other clean-ups, each exactly once. It goes on when its
    caller is cancelled, whose cancellation is raised again afterwards. A release that fails is logged and kept in
    `extra["release_errors"]`; one that even ignores its cancellation is left behind."""
    if not request.created and not request.cleanups:
        return
    created, request.created = request.created, []
    task = asyncio.create_task(_release(request, created))
    end = time.monotonic() + (RELEASE_SECONDS + 2 * GRACE) * (len(created) + len(request.cleanups))
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := end - time.monotonic()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        leave_behind(task)
        request.extra.setdefault("release_errors", []).append("a release ignores its cancellation, and was left behind")
    if cancelled is not None:
        raise cancelled


async def _release(request: AsyncRolloutRequest, created: list[Created]) -> None:
    timer = DeadlineTimer(OwnedTask())
    try:
        for name, release in [*((one.plugin.name, one.release) for one in reversed(created)), *request.cleanups]:
            try:
                await timer.wait(release(), time.monotonic() + RELEASE_SECONDS)
            except DeadlineExceededError:
                _release_error(request, name, f"took longer than {RELEASE_SECONDS:g} s")
            except BaseException as error:  # noqa: BLE001 - the next plugin is still to be released
                _release_error(request, name, describe(contained(error), place=False))
    finally:
        timer.close()


def _release_error(request: AsyncRolloutRequest, name: str, what: str) -> None:
    line = f"{name}.release: {what}"
    request.extra.setdefault("release_errors", []).append(line)
    _log.warning("%s: %s", request.id, line)


async def opening_of(env: Environment, task: Task, seconds: float, seed: int) -> list[Message]:
    """The opening messages of a task outside of any rollout, as one would have them: `create`, then `release`.

    seconds: the deadline of each hook. Raises UserError: what a hook raised, or that it ignores its cancellation.
    """
    session = Session(f"opening/{task.id}", task, random.Random(seed), time.monotonic() + seconds)
    own = OwnedTask()

    async def created() -> list[Message]:
        timer = DeadlineTimer(own)
        messages: list[Message] = []
        wrong: UserError | None = None
        for name, hook in (("create", env.create), ("release", env.release)):
            kwargs = task.create_kwargs if name == "create" else {}
            try:
                given = await timer.wait(hook(session, **kwargs), time.monotonic() + seconds)
                messages = checked_messages(given, "opening messages") if name == "create" else messages
            except BaseException as error:  # noqa: BLE001 - boundary: an environment may raise anything
                why = describe(contained(error))
                wrong = wrong or UserError(f"environment {env.name!r}: {name} of task {task.id}: {why}")
        timer.close()
        if wrong is not None:
            raise wrong
        return messages

    found = await own.run(created(), 2 * seconds, 1.0)
    if not found.done():
        raise UserError(f"environment {env.name!r}: create() of task {task.id} ignores its cancellation")
    return found.result()
