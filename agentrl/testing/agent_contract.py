"""`check_agent`: what training relies on in an agent, tried by letting it do tasks at a real gateway."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

from agentrl.errors import UserError
from agentrl.gateway.server import Gateway
from agentrl.plugins.agent import Agent, AgentClient, FunctionAgent, Outcome, agent_of, make_agent
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.agent import AgentRequest
from agentrl.rollout.conversation_tree import Node
from agentrl.testing.environment import made_environment
from agentrl.testing.hooks import HOOK_SECONDS, made_tool, require, require_no_growth, run_checks
from agentrl.testing.play import Agent as Answers
from agentrl.testing.play import Holder, Stage, for_whole_task, turns_of
from agentrl.trajectory import Trajectory

P = ParamSpec("P")
R = TypeVar("R")

END_SECONDS = 10.0
"""What an agent may take to end once it was refused a call, or was stopped."""


def check_agent(
    agent: Callable[..., object] | Agent | type[Agent] | str | Sequence[str],
    env: Environment | type[Environment] | str,
    answers: Answers,
    *,
    args: Mapping[str, Json] | None = None,
    tools: Sequence[Tool | str] = (),
    tasks: int = 2,
    branches: bool = False,
    deterministic: bool = True,
    limits: Mapping[str, Json] | None = None,
    sessions: int = 8,
) -> None:
    """Raise AssertionError, one line, for the first promise that an agent does not keep.

    agent: a function `solve(task, client)`, an object or class of Agent, an installed name, or the words of a program.
    env, tools: as of a recipe that it is for. answers: what the model says, by which the task is solved: a function
    from the task to its turns (texts; `call(...)` makes a tool call), or from the task and the messages that it is sent
    to the next turn. args: `agent.args`. tasks: how many of `train` it does. branches: whether it may change what was
    said (compaction, sub-agents, several conversations). deterministic: whether the answers alone decide what it sends.
    limits: keys of a recipe's `rollout`. sessions: rollouts at once.

    Checked: the signature; it does its tasks by calls of the model over the gateway, to the model's last answer, and
    they are solved; what the model said comes back as it was said, so that it is trained; the model's calls of tools
    are run; many rollouts at once do not share state; it ends when a call is refused, and when it is stopped; nothing
    is kept of the rollouts that ended.
    """
    __tracebackhide__ = True

    async def work() -> None:
        made, own = made_environment(env), [made_tool(one) for one in tools]
        try:
            contract = _Contract(_made(agent, dict(args or {})), made, own, answers, RolloutSection(**(limits or {})))
            await contract.check(tasks, branches, deterministic, sessions)
        finally:
            for tool in own:
                await tool.close()
            await made.close()

    run_checks(work)


def _made(agent: object, args: dict[str, Json]) -> Agent:
    try:
        if isinstance(agent, str):
            return make_agent(AgentSection(name=agent, args=args))
        if isinstance(agent, Sequence):
            return make_agent(AgentSection(command=tuple(agent), args=args))
        return agent_of(agent, args, getattr(agent, "__name__", type(agent).__name__))
    except UserError as error:
        raise AssertionError(str(error)) from error


class _Watched(Agent):
    """The agent, and how many of its rollouts run: in its threads, too."""

    def __init__(self, agent: Agent) -> None:
        self.name, self.running = agent.name, set[object]()
        self.agent = agent
        if isinstance(agent, FunctionAgent) and not inspect.iscoroutinefunction(agent.function):
            self.agent = replace(agent, function=self._counted(agent.function))

    def _counted(self, function: Callable[P, R]) -> Callable[P, R]:
        def solve(*given: P.args, **args: P.kwargs) -> R:
            self.running.add(mark := object())
            try:
                return function(*given, **args)
            finally:
                self.running.discard(mark)

        return solve

    async def solve(self, task: Task, client: AgentClient) -> Any:
        self.running.add(mark := object())
        try:
            return await self.agent.solve(task, client)
        finally:
            self.running.discard(mark)

    async def release(self, outcome: Outcome) -> None:
        await self.agent.release(outcome)

    async def ended(self) -> bool:
        """Whether all its rollouts end in time."""
        end = asyncio.get_running_loop().time() + END_SECONDS
        while self.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        return not self.running


class _Contract:
    def __init__(
        self, agent: Agent, env: Environment, tools: Sequence[Tool], answers: Answers, limits: RolloutSection
    ) -> None:
        self.agent, self.env, self.tools, self.answers, self.limits = _Watched(agent), env, tools, answers, limits
        self.gateway = Gateway()
        self.what = f"agent {agent.name!r}"

    async def check(self, tasks: int, branches: bool, deterministic: bool, sessions: int) -> None:
        await self.gateway.start()
        try:
            found = self.env.tasks("train")
            await self._check([found[i] for i in range(min(tasks, len(found)))], branches, deterministic, sessions)
        finally:
            await self.agent.agent.close()
            await self.gateway.close()

    async def _check(self, tasks: list[Task], branches: bool, deterministic: bool, sessions: int) -> None:
        alone = [await self.play(task, branches) for task in tasks]

        async def one(i: int) -> None:
            task, before = tasks[i % len(tasks)], alone[i % len(tasks)]
            among = await self.play(task, branches)
            require(
                not deterministic or among.ids.tolist() == before.ids.tolist(),
                f"{self.what}: task {task.id}: among {sessions} rollouts at once it says otherwise than alone: keep "
                f"what is of one rollout in local variables, or say deterministic=False",
            )

        async def many() -> None:
            async with asyncio.TaskGroup() as group:
                for i in range(sessions):
                    group.create_task(one(i))

        try:
            await require_no_growth(self.agent.agent, self.what, many)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        await self.check_refused(max(alone, key=lambda played: len(played.turns)))
        await self.check_stopped(tasks[0])

    def stage(self, seconds: float = HOOK_SECONDS, **section: int) -> Stage:
        return Stage(
            self.env, self.tools, self.limits, changes={"timeout": seconds, "turn_timeout": seconds},
            holder=Holder(self.agent, AgentSection(name=self.agent.name, **section), self.gateway),  # type: ignore[arg-type]
        )  # fmt: skip

    async def play(self, task: Task, branches: bool) -> Trajectory:
        """Let the agent do a task, and check what it did of it."""
        stage, what = self.stage(), f"{self.what}: task {task.id}"
        request = stage.driver.request(task, 0)
        assert isinstance(request, AgentRequest)
        told = self.answers(task) if for_whole_task(self.answers) else None  # type: ignore[call-arg]
        stage.engine.seat(
            request.id, turns_of(self.answers if told is None else lambda task: told, request), branches=True
        )
        played = await stage.driver.drive(request)
        nodes = request.tree.answered
        if not branches:
            self._check_history(nodes, what)
        require(played.failure is None, f"{what}: {played.failure.message if played.failure else ''}")
        released = played.extra.get("release_errors", ())
        require(not released, f"{what}: {'; '.join(released)}")
        require(played.seconds["total"] < HOOK_SECONDS, f"{what}: it did not end within {HOOK_SECONDS:g} seconds")
        self._check_tools(request, played, what)
        count = 1 if isinstance(told, str) else len(told) if told is not None else len(nodes)
        require(
            len(nodes) == count,
            f"{what}: it ended after {len(nodes)} of {count} answers: go on until the model calls no tool",
        )
        require(
            self.env.solved(played.rewards, task),
            f"{what}: the answers did not solve it; its rewards were {dict(played.rewards)}",
        )
        return played

    def _check_history(self, nodes: Sequence[Node], what: str) -> None:
        """Check that each call goes on from the answer before it."""
        for before, node in pairwise(nodes):
            if node.parent is not None and node.branch is node.parent.branch:
                continue
            line = (
                f"{what}: its call {node.index + 1} does not go on from the answer before it: {_change(before, node)}"
            )
            raise AssertionError(f"{line}; send back what was said as it was, or say branches=True")

    def _check_tools(self, request: AgentRequest, played: Trajectory, what: str) -> None:
        called = [
            call["function"]["name"]
            for node in request.tree.answered if node.answer is not None and node.call.tools
            for call in node.answer.get("tool_calls", ())
            if call["function"]["name"] in request.main.tools
        ]  # fmt: skip
        require(
            len(played.tool_uses) >= len(called),
            f"{what}: the model called {called[-1] if called else ''!r}, and the task's tool did not run: "
            f"await client.call_tool(name, arguments), or use the MCP server at client.mcp_url",
        )

    async def check_refused(self, played: Trajectory) -> None:
        """Check that it ends when the gateway refuses a call."""
        if len(played.turns) < 2:
            return
        stage = self.stage(END_SECONDS, max_calls=1)
        ended = await stage.play(played.task, self.answers)
        require(
            ended.seconds["total"] < END_SECONDS and await self.agent.ended(),
            f"{self.what}: it goes on for {END_SECONDS:g} seconds after a call was refused with status 400 "
            f"(agent.max_calls): let the client's error through",
        )

    async def check_stopped(self, task: Task) -> None:
        """Check that it ends when its rollout does, while it waits for the model."""
        stage, waiting = self.stage(), asyncio.Event()

        async def waits(number: int) -> str:
            waiting.set()
            await asyncio.Event().wait()
            return ""

        driven = asyncio.create_task(stage.driver.drive(stage.request(task, waits)))
        await waiting.wait()
        driven.cancel()
        require(
            await self.agent.ended(),
            f"{self.what}: it goes on for {END_SECONDS:g} seconds after its rollout was stopped: let CancelledError "
            f"and the client's errors through",
        )
        await asyncio.wait({driven})


def _change(before: Node, node: Node) -> str:
    """The first message in which a call differs from the conversation before it."""
    if node.call.tools != before.call.tools:
        return "it offers other tools"
    given = node.call.messages
    for i, was in enumerate(before.conversation):
        if i >= len(given):
            return f"message {i + 1}, {_said(was)}, is missing"
        if _said(given[i]) != _said(was):
            return f"message {i + 1} was {_said(was)}, and came back as {_said(given[i])}"
    return "it begins anew"


def _said(message: Message) -> str:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    words = f"{message['role']} {message['content']!r:.80}"
    return f"{words} with the calls {calls!r:.120}" if calls else words
