"""Reward functions besides the environment's and the tools' own: of one sample, or of all samples of a task at once.

A reward that raises is never a 0: its sample is FAILED with boundary `reward`, is tried again, or is left out.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.containment.threads import Abandoned, DaemonThreads
from agentrl.errors import UserError
from agentrl.plugins.registry import check_named, construct, load
from agentrl.plugins.types import Json, Message, Task, answer_of
from agentrl.recipe.sections.env import RewardSection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_THREADS = 32  # calls of a synchronous function at once
_REMEDY = "give it a time-out of its own, write it `async def`, or run it in processes (`processes: 2` beside its name)"


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished conversation as a reward sees it.

    rewards: the parts so far, by name, before they are weighted. finish: the `FinishReason` as text. turns: assistant
    turns; tokens: sampled ones. ids: all token ids of the conversation, those of tools and environment included.
    """

    task: Task
    """The task of the conversation."""
    messages: Sequence[Message]
    """The whole conversation, opening included."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish: str = "stop"
    turns: int = 1
    tokens: int = 0
    ids: "Sequence[int] | npt.NDArray[np.int32]" = ()
    keyed: "npt.NDArray[np.int64] | None" = None
    """Of a conversation with images `ids`, whose placeholders say their image (`agentrl.images.keyed`)."""

    @property
    def answer(self) -> str:
        """The text of the last assistant turn; empty where there is none."""
        return answer_of(self.messages)


class Reward(ABC):
    """Scores one finished sample. One object serves a whole run and all samples at once.

    `name` is the part that it fills. Entry point group `agentrl.rewards`. A plain function `f(sample, **args)`, async
    or not, does as well.
    """

    name: str

    @abstractmethod
    async def score(self, sample: Sample) -> float:
        """The reward of a sample: a finite number."""

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


def make_reward(section: RewardSection, where: str) -> Reward | GroupReward:
    """The reward that a section names, in this process. `where`: of its arguments, as an error says it."""
    found = load("rewards", section.name)
    if isinstance(found, type) and issubclass(found, Reward | GroupReward):
        made = construct(found, section.args, where)
    elif inspect.isroutine(found):
        made = _of_function(found, section, where)
    else:
        raise UserError(f"reward {section.name!r} is not a Reward or GroupReward class, nor a function")
    if not isinstance(made, Reward | GroupReward):
        raise UserError(f"reward {section.name!r} made something that is not a Reward")
    check_named(made, f"reward {section.name!r}")
    return made


def _of_function(function: Callable[..., object], section: RewardSection, where: str) -> Reward | GroupReward:
    """The function called with `args` for every sample or group; its first parameter says which."""
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise UserError(f"reward {section.name!r} takes no argument; expected `sample`, or `samples` for a whole group")

    def bind(**args: object) -> dict[str, Any]:
        return args

    bind.__name__ = function.__name__
    bind.__wrapped__ = function  # type: ignore[attr-defined]  # its module resolves annotations that are texts
    bind.__signature__ = _without_first(function)  # type: ignore[attr-defined]
    bind.__annotations__ = {k: v for k, v in function.__annotations__.items() if k not in (parameters[0], "return")}
    args = construct(bind, section.args, where)
    made = _GroupFunction if parameters[0] == "samples" else _SampleFunction
    return made(function, args)


def _without_first(function: Callable[..., object]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Function:
    """A plain function as a reward. An async one is awaited; any other runs in threads of its own."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Json]) -> None:
        self.name, self._function, self._args = function.__name__, function, args
        self._threads: DaemonThreads | None = None
        if not inspect.iscoroutinefunction(function):
            self._threads = DaemonThreads(f"reward-{self.name}", _THREADS, Abandoned("reward", _REMEDY))

    async def score(self, given: Any) -> Any:
        if self._threads is None:
            return await self._function(given, **self._args)
        return await self._threads.call(self._function, given, **self._args)

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()


class _SampleFunction(_Function, Reward):
    """A function whose first parameter is one sample."""


class _GroupFunction(_Function, GroupReward):
    """A function whose first parameter is called `samples`."""
