"""Advantage estimators and policy losses by the names that the literature gives them, and users' own.

A function of the user's is named in a recipe by its import path or by an entry point. Where it has properties that the
learner must know of, it is registered:

    from agentrl.algo import advantages

    @advantages.register("mine", needs_values=True)
    def mine(samples, config): ...
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from agentrl.algo.terms import LossTerms, Samples, TokenAdvantages, Tokens
from agentrl.errors import UserError, nearest
from agentrl.plugins.registry import installed, load
from agentrl.recipe.schema import AlgorithmSection, Recipe


class Advantage(Protocol):
    """Computes one advantage for each sample, float32 [S], or one for each sampled token, as TokenAdvantages."""

    def __call__(self, samples: Samples, config: AlgorithmSection) -> Tensor | TokenAdvantages: ...


class Loss(Protocol):
    """Computes one loss for each token."""

    def __call__(self, tokens: Tokens, config: AlgorithmSection) -> LossTerms: ...


@dataclass(frozen=True, slots=True)
class AdvantageEntry:
    """A registered advantage estimator."""

    function: Advantage
    needs_values: bool = False
    """It reads a critic's `Samples.values`, and returns `TokenAdvantages.returns` for the critic to learn."""


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A registered policy loss."""

    function: Loss
    vanishes_with_advantage: bool = False
    """It has no gradient where the advantage is 0: such samples then cost no forward pass."""


F = TypeVar("F", bound=Callable[..., Any])
Entry = TypeVar("Entry", bound=AdvantageEntry | LossEntry)


class Registry(Generic[Entry]):
    """Entries by name; a name that is not registered is looked up among the entry points of `group`.

    entry: makes an entry of a function and its flags. flag: the entry's. attribute: what functions were marked with
    before there were flags.
    """

    def __init__(self, group: str, kind: str, entry: Callable[..., Entry], flag: str, attribute: str) -> None:
        self.group, self.kind = group, kind
        self._entry, self._flag, self._attribute = entry, flag, attribute
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, **flags: bool) -> Callable[[F], F]:
        """Register the decorated function as `name`. flags: those of the entry (`needs_values` of an advantage,
        `vanishes_with_advantage` of a loss). Raises ValueError for a name that another module has taken."""

        def keep(function: F) -> F:
            known = self._entries.get(name)
            if known is not None and getattr(known.function, "__module__", None) != function.__module__:
                raise ValueError(f"there is a {self.kind} {name!r} already; give yours another name")
            self._entries[name] = self._entry(function, **flags)
            return function

        return keep

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The registered functions by name, those of agentrl among them."""
        return {name: entry.function for name, entry in self._entries.items()}

    def get(self, name: str) -> Entry:
        """Return the entry of a registered name, an entry point or an import path `module:attribute`.

        Raises UserError for a name that is unknown.
        """
        if name in self._entries:
            return self._entries[name]
        others: set[str] = {plugin.name for plugin in installed(self.group)}
        if ":" not in name and name not in others:
            raise UserError(f"no {self.kind} {name!r}{nearest(name, {*self._entries, *others})}")
        function = load(self.group, name)
        return next((e for e in self._entries.values() if e.function is function), None) or self._unregistered(function)

    def _unregistered(self, function: Any) -> Entry:
        marked = bool(getattr(function, self._attribute, False))
        if marked:
            warnings.warn(
                f"{self.kind}: mark {getattr(function, '__name__', function)} by `register(name, {self._flag}=True)` "
                f"instead of the attribute {self._attribute!r}, which is read until 0.3.0",
                FutureWarning,
                stacklevel=3,
            )
        return self._entry(function, **{self._flag: marked})


advantages = Registry("agentrl.advantages", "advantage", AdvantageEntry, "needs_values", "wants_values")
losses = Registry("agentrl.losses", "loss", LossEntry, "vanishes_with_advantage", "vanishes_with_advantage")


def check_critic(recipe: Recipe) -> None:
    """Raise UserError unless the recipe has a critic where its advantage needs one, and only there."""
    name = recipe.algorithm.advantage
    needed = advantages.get(name).needs_values
    if needed and recipe.critic is None:
        raise UserError(f"algorithm.advantage {name!r} needs a critic, and the recipe has none: add `critic: {{}}`")
    if recipe.critic is not None and not needed:
        raise UserError(f"critic: algorithm.advantage {name!r} uses no critic; remove it, or choose `gae`")
