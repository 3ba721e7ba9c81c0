"""The reward functions of a recipe, by the reward part that each fills, and the weights of all parts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import Environment, declared_parts
from agentrl.plugins.reward import GroupReward, Reward, make_reward
from agentrl.plugins.reward_process import in_processes
from agentrl.plugins.tool import Tool
from agentrl.recipe.sections.env import RewardsSection

MODEL = "model"
"""The part that `rewards.model` fills."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """samples, groups: by the part that they fill. weights: of named parts, 1 where a part is not named."""

    samples: Mapping[str, Reward]
    groups: Mapping[str, GroupReward]
    weights: Mapping[str, float]

    async def close(self) -> None:
        """Close every function, once, when the run ends."""
        functions: list[Reward | GroupReward] = [*self.samples.values(), *self.groups.values()]
        for function in functions:
            await function.close()


NO_REWARDS = Rewards({}, {}, {})


def make_rewards(section: RewardsSection) -> Rewards:
    """Make the reward functions of a recipe. Raises UserError: one line, for an unknown name, arguments that do not
    fit, a part that is filled twice."""
    samples: dict[str, Reward] = {}
    groups: dict[str, GroupReward] = {}
    for i, one in enumerate(section.functions):
        made = make_reward(one, f"rewards.functions.{i}.args")
        if one.processes:
            made = in_processes(made, one, f"rewards.functions.{i}.args")
        part = one.part or made.name
        if part in samples or part in groups:
            raise UserError(f"rewards.functions: two of them fill the part {part!r}; name them apart by `part`")
        if isinstance(made, Reward):
            samples[part] = made
        else:
            groups[part] = made
    return Rewards(samples, groups, dict(section.weights))


def known_parts(plugins: Iterable[Environment | Tool], others: Iterable[str]) -> set[str] | None:
    """The reward parts that may be given, or None where a plugin does not declare its own. others: parts that
    come from elsewhere."""
    each = [declared_parts(plugin) for plugin in plugins]
    return None if None in each else {*others, *(name for names in each for name in names or ())}


def check_weights(weights: Mapping[str, float], known: set[str] | None) -> None:
    """Raise UserError for a weight of a part that no plugin gives. known: from `known_parts`."""
    if known is not None and (unknown := next((part for part in weights if part not in known), None)):
        line = f"rewards.weights: no environment, tool or function here gives the part {unknown!r}"
        raise UserError(f"{line}{nearest(unknown, known)}")
