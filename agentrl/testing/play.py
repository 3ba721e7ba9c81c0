"""`Stage`: an environment and tools under the real driver, with agents that are no models."""

import inspect
from collections.abc import Callable, Mapping, Sequence

from agentrl.engine.base import EngineError
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task
from agentrl.recipe.schema import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.scorer import Scorer
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


class Stage:
    """One driver for any number of requests at once."""

    def __init__(
        self,
        environment: Environment,
        tools: Sequence[Tool] = (),
        limits: RolloutSection | None = None,
        scorer: Scorer | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> None:
        """Build a driver. limits: of a recipe, those in tokens left out; `changes` to them go first."""
        self.engine = TextEngine()
        self.chat = TextChat()
        self.driver = Driver(
            engine=self.engine,
            chat=self.chat,
            environment=environment,
            tools=tools,
            limits=without_token_limits(limits or RolloutSection(), **(changes or {})),
            scorer=scorer,
        )

    def request(self, task: Task, turn: Turn, seed: int = 0, sample: int = 0) -> AsyncRolloutRequest:
        """Return a request whose turns are the agent's."""
        made = self.driver.request(task, sample, seed=seed)
        self.engine.seat(made.id, turn)
        return made

    async def play(self, task: Task, agent: Agent, sample: int = 0) -> Trajectory:
        """Return a task from the first hook to the last."""
        request = self.driver.request(task, sample)
        self.engine.seat(request.id, _turns(agent, task, request.messages))
        return await self.driver.drive(request)


def _turns(agent: Agent, task: Task, messages: Sequence[Message]) -> Turn:
    if len(inspect.signature(agent).parameters) == 1:
        told = agent(task)  # type: ignore[call-arg]
        return scripted([told] if isinstance(told, str) else told)

    async def turn(number: int) -> str:
        text = agent(task, tuple(messages))  # type: ignore[call-arg]
        if not isinstance(text, str):
            raise EngineError(f"the agent said {type(text).__name__} in turn {number}, not text")
        return text

    return turn
