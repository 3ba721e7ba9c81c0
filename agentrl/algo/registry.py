"""Advantage estimators and losses by the names that the literature gives them. A user's come by entry points."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from agentrl.algo.terms import LossTerms, Samples, TokenAdvantages, Tokens
from agentrl.errors import UserError, nearest
from agentrl.plugins.registry import installed, load
from agentrl.recipe.schema import AlgorithmSection, Recipe


class Advantage(Protocol):
    """Samples in, one advantage for each out, float32 [S]; or one for each sampled token, as TokenAdvantages. A
    function that needs a critic's values says so with `wants_values = True`, and gives `returns` back."""

    def __call__(self, samples: Samples, config: AlgorithmSection) -> Tensor | TokenAdvantages: ...


class Loss(Protocol):
    """Tokens in, one loss for each out. A function whose loss has no gradient where the advantage is 0 says so with
    `vanishes_with_advantage = True`: such samples then cost no forward pass."""

    def __call__(self, tokens: Tokens, config: AlgorithmSection) -> LossTerms: ...


F = TypeVar("F", bound=Callable[..., Any])


class Registry:
    """Built-in functions by name; a name that is not built in is looked for among the entry points of `group`."""

    def __init__(self, group: str, kind: str) -> None:
        self.group, self.kind = group, kind
        self.functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def keep(function: F) -> F:
            self.functions[name] = function
            return function

        return keep

    def get(self, name: str) -> Callable[..., Any]:
        """Raises UserError for a name that nobody offers."""
        if name in self.functions:
            return self.functions[name]
        others = {plugin.name for plugin in installed(self.group)}
        if ":" not in name and name not in others:
            raise UserError(f"no {self.kind} {name!r}{nearest(name, {*self.functions, *others})}")
        function: Callable[..., Any] = load(self.group, name)
        return function


advantages = Registry("agentrl.advantages", "advantage")
losses = Registry("agentrl.losses", "loss")


def check_critic(recipe: Recipe) -> None:
    """Raises UserError unless there is a critic where the advantage wants one, and nowhere else."""
    name = recipe.algorithm.advantage
    wanted = getattr(advantages.get(name), "wants_values", False)
    if wanted and recipe.critic is None:
        raise UserError(f"algorithm.advantage {name!r} wants a critic, and the recipe has none: say `critic: {{}}`")
    if recipe.critic is not None and not wanted:
        raise UserError(f"critic: algorithm.advantage {name!r} asks no critic; leave it out, or choose `gae`")
