"""The reward functions of a recipe: classes by name or import path, and plain functions, behind one interface."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins.registry import construct, load
from agentrl.plugins.reward import GroupReward, Reward, Sample
from agentrl.recipe.schema import RewardSection, RewardsSection
from agentrl.threads import Abandoned, DaemonThreads

MODEL = "model"
"""The part that `rewards.model` fills."""

_THREADS = 32  # calls of a synchronous function at once
_REMEDY = "give it a time-out of its own, write it `async def`, or run it in processes (`processes: 2` beside its name)"


@dataclass(frozen=True, slots=True)
class Rewards:
    """samples, groups: by the part that they fill. weights: of named parts, 1 where a part is not named."""

    samples: Mapping[str, Reward]
    groups: Mapping[str, GroupReward]
    weights: Mapping[str, float]

    async def close(self) -> None:
        functions: list[Reward | GroupReward] = [*self.samples.values(), *self.groups.values()]
        for function in functions:
            await function.close()


NO_REWARDS = Rewards({}, {}, {})


def make_rewards(section: RewardsSection) -> Rewards:
    """Raises UserError: one line, for an unknown name, arguments that do not fit, a part that is filled twice."""
    samples: dict[str, Reward] = {}
    groups: dict[str, GroupReward] = {}
    for i, one in enumerate(section.functions):
        made = make_reward(one, f"rewards.functions.{i}.args")
        if one.processes:
            made = _apart(made, one, f"rewards.functions.{i}.args")
        part = one.part or made.name
        if part in samples or part in groups:
            raise UserError(f"rewards.functions: two of them fill the part {part!r}; name them apart by `part`")
        if isinstance(made, Reward):
            samples[part] = made
        else:
            groups[part] = made
    return Rewards(samples, groups, dict(section.weights))


def _apart(made: Reward | GroupReward, section: RewardSection, where: str) -> Reward | GroupReward:
    from agentrl.plugins.reward_process import ProcessGroupReward, ProcessReward

    if isinstance(made, Reward):
        return ProcessReward(made, section, where)
    return ProcessGroupReward(made, section, where)


def make_reward(section: RewardSection, where: str) -> Reward | GroupReward:
    """The reward that a section names, in this process. `where`: of its arguments, as an error says it."""
    found = load("rewards", section.name)
    if isinstance(found, type) and issubclass(found, Reward | GroupReward):
        made = construct(found, section.args, where)
    elif inspect.isroutine(found):
        made = _of_function(found, section, where)
    else:
        raise UserError(f"reward {section.name!r} is no Reward or GroupReward class and no function")
    if not isinstance(made, Reward | GroupReward):
        raise UserError(f"reward {section.name!r} made something that is no Reward")
    if not isinstance(getattr(made, "name", None), str) or not made.name:
        raise UserError(f"reward {section.name!r}: its class sets no `name`")
    return made


def _of_function(function: Callable[..., Any], section: RewardSection, where: str) -> Reward | GroupReward:
    """The function called with `args` for every sample or group; its first parameter says which."""
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise UserError(f"reward {section.name!r} takes no argument; wants `sample`, or `samples` for a whole group")

    def bind(**args: Any) -> dict[str, Any]:
        return args

    bind.__name__ = function.__name__
    bind.__signature__ = _without_first(function)  # type: ignore[attr-defined]
    bind.__annotations__ = {k: v for k, v in function.__annotations__.items() if k not in (parameters[0], "return")}
    args = construct(bind, section.args, where)
    made = _GroupFunction if parameters[0] == "samples" else _SampleFunction
    return made(function, args)


def _without_first(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _SampleFunction(Reward):
    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.name, self._function = function.__name__, _Function(function, args)

    async def score(self, sample: Sample) -> float:
        found: float = await self._function(sample)
        return found

    async def close(self) -> None:
        self._function.close()


class _GroupFunction(GroupReward):
    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.name, self._function = function.__name__, _Function(function, args)

    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        found: Sequence[float] = await self._function(samples)
        return found

    async def close(self) -> None:
        self._function.close()


class _Function:
    """An async function is awaited; any other runs in threads of its own, so that a slow one holds nobody up."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self._function, self._args = function, args
        self._threads: DaemonThreads | None = None
        if not inspect.iscoroutinefunction(function):
            self._threads = DaemonThreads(f"reward-{function.__name__}", _THREADS, Abandoned("reward", _REMEDY))

    async def __call__(self, first: Any) -> Any:
        if self._threads is None:
            return await self._function(first, **self._args)
        return await self._threads.call(self._function, first, **self._args)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
