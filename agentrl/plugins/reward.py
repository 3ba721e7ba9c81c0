"""Reward functions besides the environment's and the tools' own: of one sample, or of all samples of a task at once.

A reward that raises is never a 0: its sample is FAILED with boundary `reward`, is tried again, or is left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.plugins.types import Message, Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished conversation as a reward sees it.

    rewards: the parts so far, by name, before they are weighted. finish: the `FinishReason` as text. turns: assistant
    turns; tokens: sampled ones. ids: all token ids of the conversation, those of tools and environment included.
    """

    task: Task
    messages: Sequence[Message]
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish: str = "stop"
    turns: int = 1
    tokens: int = 0
    ids: "Sequence[int] | npt.NDArray[np.int32]" = ()

    @property
    def answer(self) -> str:
        """The text of the last assistant turn; empty where there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                content = message["content"]
                return content if isinstance(content, str) else ""
        return ""


class Reward(ABC):
    """Scores one finished sample. One object serves a whole run and all samples at once.

    `name` is the part that it fills. Entry point group `agentrl.rewards`. A plain function `f(sample, **args)`, async
    or not, does as well.
    """

    name: str

    @abstractmethod
    async def score(self, sample: Sample) -> float:
        """A finite number."""

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what the whole run held, once, when the run ends."""


class GroupReward(ABC):
    """Scores all valid samples of a task together, once they are finished (a ranking, a diversity bonus).

    A plain function whose first parameter is called `samples` does as well.
    """

    name: str

    @abstractmethod
    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        """A finite number for each of `samples`, in their order."""

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what the whole run held, once, when the run ends."""
