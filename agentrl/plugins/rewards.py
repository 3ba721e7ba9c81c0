"""The reward functions of a recipe: classes by name or import path, and plain functions, behind one interface."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins.registry import construct, load
from agentrl.plugins.reward import GroupReward, Reward, Sample
from agentrl.recipe.schema import RewardSection, RewardsSection

MODEL = "model"
"""The part that `rewards.model` fills."""


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
        made = _make(one, f"rewards.functions.{i}.args")
        part = one.part or made.name
        if part in samples or part in groups:
            raise UserError(f"rewards.functions: two of them fill the part {part!r}; name them apart by `part`")
        if isinstance(made, Reward):
            samples[part] = made
        else:
            groups[part] = made
    return Rewards(samples, groups, dict(section.weights))


def _make(section: RewardSection, where: str) -> Reward | GroupReward:
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
        self.name, self._function, self._args = function.__name__, function, args

    async def score(self, sample: Sample) -> float:
        return await _call(self._function, sample, self._args)


class _GroupFunction(GroupReward):
    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self.name, self._function, self._args = function.__name__, function, args

    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        return await _call(self._function, samples, self._args)


async def _call(function: Callable[..., Any], first: Any, args: Mapping[str, Any]) -> Any:
    """An async function is awaited; any other runs in a thread, so that a slow one holds nobody up."""
    if inspect.iscoroutinefunction(function):
        return await function(first, **args)
    return await asyncio.to_thread(function, first, **args)
