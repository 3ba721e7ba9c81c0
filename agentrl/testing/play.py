"""`Stage`: an environment and tools under the real driver, with a model that is none: what it says is given."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from agentrl.engine.base import EngineError
from agentrl.gateway.server import Gateway
from agentrl.plugins.agent import Agent as SolvingAgent
from agentrl.plugins.agent import make_agent
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.agent import AgentDriver, AgentRequest
from agentrl.rollout.driver import Driver
from agentrl.rollout.player import gateway_of
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.workspaces import Workspaces
from agentrl.testing.agent import TextChat, TextEngine, Turn, scripted, without_token_limits
from agentrl.trajectory import Trajectory

Agent = Callable[[Task], str | Sequence[str]] | Callable[[Task, Sequence[Message]], str]
"""How to play a task: from the task to the turns (one text is one turn), or from the task and the conversation so far
to the next turn. A turn is text as `agentrl.testing.agent` reads it; `call(name, **arguments)` makes a call's line."""


class Alone(Environment):
    """A conversation without an environment: it says nothing and gives no reward."""

    name = "alone"

    def tasks(self, split: str) -> Sequence[Task]:
        return ()

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        return [{"role": "user", "content": ""}]

    async def execute(self, session: Session, message: Message) -> Reply:
        return Reply(done=True)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the conversations in place of the built-in driver."""

    agent: SolvingAgent
    """Calls the model."""
    section: AgentSection
    """Of a recipe; what is counted in tokens is left out."""
    gateway: Gateway
    """Started already."""


async def holder_of(recipe: Recipe, stack: AsyncExitStack) -> Holder | None:
    """The recipe's agent at a gateway of its own, which `stack` closes; None: the built-in driver plays."""
    if recipe.agent is None:
        return None
    agent, gateway = make_agent(recipe.agent, recipe.workspace is not None), gateway_of(recipe)
    stack.push_async_callback(agent.close)
    await gateway.start()
    stack.push_async_callback(gateway.close)
    return Holder(agent, recipe.agent, gateway)


class Stage:
    """One driver for any number of requests at once."""

    def __init__(
        self,
        environment: Environment,
        tools: Sequence[Tool] = (),
        limits: RolloutSection | None = None,
        scorer: Scorer | None = None,
        changes: Mapping[str, object] | None = None,
        holder: Holder | None = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        """Build a driver. limits: of a recipe, those in tokens left out; `changes` to them go first. holder: calls the
        model in place of the built-in driver. workspaces: where each request's is opened from."""
        self.engine = TextEngine()
        self.chat = TextChat()
        parts: dict[str, Any] = {
            "engine": self.engine,
            "chat": self.chat,
            "environment": environment,
            "tools": tools,
            "limits": without_token_limits(limits or RolloutSection(), **(changes or {})),
            "scorer": scorer,
            "workspaces": workspaces,
        }
        self.driver = Driver(**parts) if holder is None else _agent_driver(holder, parts)

    def request(self, task: Task, turn: Turn, seed: int = 0, sample: int = 0) -> AsyncRolloutRequest:
        """A request whose turns are the agent's."""
        made = self.driver.request(task, sample, seed=seed)
        self.engine.seat(made.id, turn, branches=isinstance(made, AgentRequest))
        return made

    async def play(self, task: Task, agent: Agent, sample: int = 0) -> Trajectory:
        """A task from the first hook to the last."""
        request = self.driver.request(task, sample)
        self.engine.seat(request.id, turns_of(agent, request), branches=isinstance(request, AgentRequest))
        return await self.driver.drive(request)


def _agent_driver(holder: Holder, parts: dict[str, Any]) -> AgentDriver:
    return AgentDriver(agent=holder.agent, section=holder.section, gateway=holder.gateway, **parts)


def asked(request: AsyncRolloutRequest) -> Sequence[Message]:
    """The messages that the model is to answer now."""
    return request.tree.nodes[-1].call.messages if isinstance(request, AgentRequest) else request.main.messages


def for_whole_task(agent: Agent) -> bool:
    """Whether it gives the turns of a task beforehand, not one by one."""
    return len(inspect.signature(agent).parameters) == 1


def turns_of(agent: Agent, request: AsyncRolloutRequest) -> Turn:
    """What `agent` says in a request, turn by turn."""
    task = request.task
    if for_whole_task(agent):
        turns = agent(task)  # type: ignore[call-arg]
        return scripted([turns] if isinstance(turns, str) else turns)

    async def turn(number: int) -> str:
        text = agent(task, tuple(asked(request)))  # type: ignore[call-arg]
        if not isinstance(text, str):
            raise EngineError(f"the agent said {type(text).__name__} in turn {number}, not text")
        return text

    return turn
