"""`check_environment`: what training and evaluation rely on in an environment, tried by playing its tasks."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agentrl.gateway.server import Gateway
from agentrl.images import stored
from agentrl.plugins.agent import make_agent
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.env import EnvSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.rollout.workspaces import workspaces_of
from agentrl.testing.hooks import (
    hook,
    made_tool,
    number,
    require,
    require_hooks,
    require_no_growth,
    require_schema,
    run_checks,
    session,
)
from agentrl.testing.play import Agent, Holder, Stage
from agentrl.trajectory import FinishReason, Trajectory

LOOK = 64
"""Tasks of a split that are looked at, at most."""

_ROLES = ("system", "user", "assistant", "tool")


def check_environment(
    env: Environment | type[Environment] | str,
    gold: Agent | None,
    wrong: Agent,
    *,
    tools: Sequence[Tool | str] = (),
    tasks: int = 4,
    disjoint: bool = True,
    limits: Mapping[str, Json] | None = None,
    sessions: int = 16,
    workspace: str | None = None,
    agent: AgentSection | None = None,
) -> None:
    """Raise AssertionError, one line, for the first promise that an environment does not keep.

    env: an object, a class that needs no argument, or an installed name. gold, wrong: how to play a task well and
    badly: a function from the task to the turns (texts; `call(...)` makes a tool call), or from the task and the
    messages so far to the next turn. gold: None where nobody knows how to play well, and nothing is compared. tools:
    what a recipe would list besides the environment's own. tasks: how many of each split are played. workspace: the
    provider of workspaces, such as `bwrap`. disjoint: held-out tasks must not stand in `train`. limits: keys of a
    recipe's `rollout`. agent: who holds the conversations, as a recipe says it.

    Checked: async hooks; tasks with unique ids, data that JSON can hold, the same at a second look and from a second
    object, held-out ones apart from `train`; openings that a chat can render, equal for the samples of a task; gold is
    solved with a higher reward than wrong, which is not; rewards are finite, of the parts that `reward_parts` names
    where it names any, and the same at every play, also when
    many requests run at once; `release` after a failed and a cancelled request; nothing is kept of those released.
    """
    __tracebackhide__ = True
    run_checks(lambda: _check(env, gold, wrong, tools, tasks, disjoint, dict(limits or {}), sessions, workspace, agent))


async def _check(
    env: Environment | type[Environment] | str,
    gold: Agent | None,
    wrong: Agent,
    tools: Sequence[Tool | str],
    tasks: int,
    disjoint: bool,
    limits: dict[str, Json],
    sessions: int,
    workspace: str | None,
    agent: AgentSection | None,
) -> None:
    made, second = made_environment(env), None if isinstance(env, Environment) else made_environment(env)
    own = [made_tool(one) for one in tools]
    async with AsyncExitStack() as stack:
        for one in (second, made):
            if one is not None:
                stack.push_async_callback(one.close)
        for tool in own:
            stack.push_async_callback(tool.close)
        section = WorkspaceSection(provider=workspace) if workspace is not None else None
        if (workspaces := await workspaces_of(section, made, own, agent)) is not None:
            stack.push_async_callback(workspaces.close)
        holder = None if agent is None else await _holder(agent, workspaces is not None, stack)
        stage = Stage(made, own, RolloutSection(**limits), holder=holder, workspaces=workspaces)
        contract = _Contract(made, stage, own, tasks)
        require_hooks(made, contract.what)
        contract.check_tasks(second)
        contract.check_tools()
        await contract.check_openings(disjoint)
        await contract.check_plays(gold, wrong, sessions)
        await contract.check_failures()


async def _holder(section: AgentSection, inside: bool, stack: AsyncExitStack) -> Holder:
    """A recipe's agent at a gateway of its own, until the stack closes. inside: as of `make_agent`."""
    agent, gateway = make_agent(section, inside), Gateway()
    stack.push_async_callback(agent.close)
    await gateway.start()
    stack.push_async_callback(gateway.close)
    return Holder(agent, section, gateway)


def made_environment(env: Environment | type[Environment] | str) -> Environment:
    """An object, a class that needs no argument, or an installed name, as an environment."""
    if isinstance(env, str):
        return make_environment(EnvSection(name=env))
    made: object = env() if isinstance(env, type) else env
    require(isinstance(made, Environment), f"{env!r} is not an environment: derive it from agentrl.Environment")
    assert isinstance(made, Environment)
    return made


class _Contract:
    """An environment on its stage, and the tasks to play: some of each split."""

    def __init__(self, env: Environment, stage: Stage, tools: Sequence[Tool], count: int) -> None:
        self.env = env
        self.stage = stage
        self.what = f"environment {getattr(env, 'name', type(env).__name__)!r}"
        name = getattr(env, "name", None)
        require(isinstance(name, str) and name, f"{self.what}: its class sets no `name`")
        require(
            not isinstance(env.splits, str) and "train" not in env.splits,
            f"{self.what}: `splits` must be a tuple of the held-out splits, without 'train', got {env.splits!r}",
        )
        self.looked = {split: self.look(env, split) for split in ("train", *env.splits)}
        self.played = [task for tasks in self.looked.values() for task in tasks[:count]]

    def look(self, env: Environment, split: str) -> list[Task]:
        tasks = env.tasks(split)
        require(len(tasks) > 0, f"{self.what}: its split {split!r} has no task")
        return [tasks[i] for i in range(min(LOOK, len(tasks)))]

    def check_tasks(self, second: Environment | None) -> None:
        """Check that tasks are well-formed, and the same whenever and by whomever they are asked for."""
        for split, tasks in self.looked.items():
            plain = [self.plain(task, split) for task in tasks]
            ids = [task.id for task in tasks]
            if len(set(ids)) < len(ids):
                twice = next(i for i in ids if ids.count(i) > 1)
                raise AssertionError(f"{self.what}: two tasks of {split!r} have the id {twice!r}")
            for other, how in ((self.env, "asked for twice"), (second, "made anew")):
                if other is not None and [self.plain(task, split) for task in self.look(other, split)] != plain:
                    raise AssertionError(
                        f"{self.what}: the tasks of {split!r} are not the same when {how}: draw them from a fixed seed"
                    )

    def plain(self, task: Any, split: str) -> tuple[str, str]:
        require(isinstance(task, Task), f"{self.what}: `tasks({split!r})` must hold agentrl.Task objects, got {task!r}")
        require(
            isinstance(task.id, str) and task.id, f"{self.what}: a task of {split!r} has the id {task.id!r}, not text"
        )
        try:
            return task.id, json.dumps(dict(task.data), allow_nan=False, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{self.what}: task {task.id}: its data cannot be written as JSON: {error}") from None

    def check_tools(self) -> None:
        own = list(self.env.tools())
        again = list(self.env.tools())
        require(
            len(own) == len(again) and all(a is b for a, b in zip(own, again, strict=True)),
            f"{self.what}: `tools()` must return the same objects at every call: make them in __init__",
        )
        for tool in own:
            require(isinstance(tool, Tool), f"{self.what}: `tools()` must hold agentrl.Tool objects, got {tool!r}")
            require_hooks(tool, f"{self.what}, tool {getattr(tool, 'name', '?')!r}")
            require_schema(tool)

    async def check_openings(self, disjoint: bool) -> None:
        """Check that openings are messages, equal for the samples of a task; those of held-out tasks are not trained
        on."""
        train: dict[str, str] = {}
        for split, tasks in self.looked.items():
            for task in tasks:
                seen = await self.opening(task)
                if split == "train":
                    train.setdefault(seen, task.id)
                elif disjoint and len(train) > 1 and seen in train:
                    raise AssertionError(
                        f"{self.what}: task {task.id} of {split!r} opens like {train[seen]} of 'train': hold it out"
                    )
        for task in self.played:
            require(
                await self.opening(task) == await self.opening(task),
                f"{self.what}: task {task.id} opens otherwise the second time: draw from session.rng or from the task",
            )

    async def opening(self, task: Task) -> str:
        begun = session(task, 0)
        messages = await hook(self.env.create(begun, **task.create_kwargs), f"{self.what}: `create` of task {task.id}")
        await hook(self.env.release(begun), f"{self.what}: `release` of task {task.id} before its first token")
        good = isinstance(messages, Sequence) and len(messages) > 0 and all(_is_message(m) for m in messages)
        require(
            good,
            f"{self.what}: `create` of task {task.id} must return messages with role and content, got {messages!r}",
        )
        return json.dumps([[m["role"], m["content"]] for m in map(stored, messages)], default=str)

    async def check_plays(self, gold: Agent | None, wrong: Agent, sessions: int) -> None:
        best = [] if gold is None else [await self.play(task, gold, "gold") for task in self.played]
        worst = [await self.play(task, wrong, "wrong") for task in self.played]
        if gold is None:
            await self.check_together(wrong, wrong, worst, worst, sessions)
            return
        for good, bad in zip(best, worst, strict=True):
            task, how = good.task, f"its rewards were {dict(good.rewards)}"
            require(self.env.solved(good.rewards, task), f"{self.what}: task {task.id}: gold is not `solved`; {how}")
            require(
                not self.env.solved(bad.rewards, task),
                f"{self.what}: task {task.id}: wrong counts as `solved`; its rewards were {dict(bad.rewards)}",
            )
            require(
                good.reward > bad.reward,
                f"{self.what}: task {task.id}: gold gets {good.reward:g}, no more than {bad.reward:g} of wrong",
            )
        await self.check_together(gold, wrong, best, worst, sessions)

    async def check_together(
        self, gold: Agent, wrong: Agent, best: list[Trajectory], worst: list[Trajectory], sessions: int
    ) -> None:
        """Check that many requests at once get what each got alone."""
        count = len(self.played)

        async def one(i: int) -> None:
            task, alone, agent = self.played[i % count], (best, worst)[i % 2][i % count], (gold, wrong)[i % 2]
            together = await self.play(task, agent, ("gold", "wrong")[i % 2])
            require(
                dict(together.rewards) == dict(alone.rewards),
                f"{self.what}: task {task.id}: the rewards were {dict(alone.rewards)} alone and "
                f"{dict(together.rewards)} among others: keep what is per request in session.state",
            )

        async def many() -> None:
            await asyncio.gather(*(one(i) for i in range(max(sessions, count))))

        await require_no_growth(self.env, self.what, many)

    async def play(self, task: Task, agent: Agent, who: str) -> Trajectory:
        played = await self.stage.play(task, agent)
        failure = played.failure
        require(failure is None, f"{self.what}: task {task.id}, played by {who}: {failure.message if failure else ''}")
        released = played.extra.get("release_errors", ())
        require(not released, f"{self.what}: task {task.id}, played by {who}: {'; '.join(released)}")
        require(
            played.finish is not FinishReason.ABORTED and played.turns,
            f"{self.what}: task {task.id}, played by {who}: it said nothing",
        )
        for part, value in played.rewards.items():
            number(value, f"{self.what}: task {task.id}: the reward {part!r}")
        return played

    async def check_failures(self) -> None:
        """Check that requests that fail or are cancelled in their first turn are released all the same."""
        task = self.played[0]

        async def fails(number: int) -> str:
            raise RuntimeError("the engine is gone")

        request = self.stage.request(task, fails)
        failed = await self.stage.driver.drive(request)
        released = failed.extra.get("release_errors", ())
        require(not released, f"{self.what}: after a request that failed: {'; '.join(released)}")
        waiting = asyncio.Event()

        async def waits(number: int) -> str:
            waiting.set()
            await asyncio.Event().wait()
            return ""

        request = self.stage.request(task, waits)
        driven = asyncio.create_task(self.stage.driver.drive(request))
        await waiting.wait()
        driven.cancel()
        await asyncio.wait({driven})
        released = request.extra.get("release_errors", ())
        require(not released, f"{self.what}: after a request that was cancelled: {'; '.join(released)}")


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str | list)
    )
