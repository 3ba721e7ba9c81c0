"""The names of reward parts that can be known before anything is sampled."""

from collections.abc import Iterable, Mapping

from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool


def declared_parts(plugin: Environment | Tool) -> tuple[str, ...] | None:
    """Its `reward_parts`; None where it does not say, or where a class below the one that says has a `calc_reward` of
    its own."""
    for kind in type(plugin).__mro__:
        if "reward_parts" in vars(kind):
            return plugin.reward_parts
        if "calc_reward" in vars(kind):
            return None
    return None


def known_parts(plugins: Iterable[Environment | Tool], others: Iterable[str]) -> set[str] | None:
    """All that may be given; others: parts that do not come of plugins. None: a plugin does not say."""
    each = [declared_parts(plugin) for plugin in plugins]
    return None if None in each else {*others, *(name for names in each for name in names or ())}


def check_weights(weights: Mapping[str, float], known: set[str] | None) -> None:
    """Raises UserError for a weight of a part that nobody gives. known: as of `known_parts`."""
    if known is not None and (unknown := next((part for part in weights if part not in known), None)):
        said = f"rewards.weights: no environment, tool or function here gives the part {unknown!r}"
        raise UserError(f"{said}{nearest(unknown, known)}")
