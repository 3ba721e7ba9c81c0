"""`Talk`: the environment of a person who talks with a model, and the recipe of a model apart from its tasks."""

from collections.abc import Awaitable, Callable, Sequence

from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Content, Json, Message, Reply, Session, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import RewardsSection
from agentrl.recipe.sections.rollout import RolloutSection

ENDLESS = 1 << 30
"""Stands for no bound, in `max_turns`, `max_tool_calls` and `max_tokens`."""
PATIENCE = 1e6
"""Seconds allowed for a person, instead of `rollout.timeout` and `rollout.turn_timeout`."""


class Talk(Environment):
    """One conversation after the other. Its `create` hears the first words, its `execute` the others.

    listen: what the person says next, text or parts with images; None: the conversation is over. system: a system
    message, where it is not empty.
    """

    name = "talk"
    splits = ()
    reward_parts = ()

    def __init__(self, listen: Callable[[], Awaitable[Content | None]], system: str = "") -> None:
        self._listen, self._system = listen, system

    def tasks(self, split: str) -> Sequence[Task]:
        return ()

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": await self._listen() or ""}]

    async def execute(self, session: Session, message: Message) -> Reply:
        said = await self._listen()
        return Reply(done=True) if said is None else Reply(messages=({"role": "user", "content": said},))

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        return {}


async def nobody() -> None:
    """Say nothing."""


def apart_from_tasks(recipe: Recipe, **changes: object) -> Recipe:
    """The recipe without its agent and rewards, which belong to its tasks."""
    return recipe.model_copy(update={"agent": None, "rewards": RewardsSection(), **changes})


def unhurried(limits: RolloutSection) -> RolloutSection:
    """The limits of a conversation that is as long as the model's context, and takes what time it takes."""
    counts = dict.fromkeys(("max_turns", "max_tool_calls", "max_tokens"), ENDLESS)
    return limits.model_copy(update={**counts, "timeout": PATIENCE, "turn_timeout": PATIENCE})
