"""What a run has in place of engine and environment where it learns from conversations and samples nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.engine.base import Engine, EngineError, Generation, OnTokens, Sampling
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json, Message, Session, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Idle(Engine):
    """Samples nothing: no weights are loaded for it."""

    def __init__(self, model: "PreTrainedModel", max_batch: int = 1) -> None:
        self._context = int(model.config.get_text_config().max_position_embeddings)

    @property
    def max_context(self) -> int:
        """The model's context."""
        return self._context

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Raises EngineError."""
        raise EngineError("this run samples nothing: set sft.accuracy=true")


class Conversations(Environment):
    """Has no task."""

    name = "conversations"
    splits = ()

    def __init__(self, source: str = "") -> None:
        pass

    def tasks(self, split: str) -> Sequence[Task]:
        """Nothing."""
        return ()

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        """Nothing: there is no task to open."""
        return ()

    async def calc_reward(self, session: Session, **kwargs: Json) -> float | Mapping[str, float]:
        """0."""
        return 0.0
