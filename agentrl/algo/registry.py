"""Registries of advantage estimators and policy losses: built-in ones, named as in the literature, and users'.

A recipe names a user's function by its import path or its entry point. A function with properties that the learner must
know is registered:

    from agentrl.algo import advantages

    @advantages.register("mine", needs_values=True)
    def mine(samples, config): ...
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentrl.algo.terms import LossTerms, Samples, TokenAdvantages, Tokens, Update
from agentrl.errors import UserError, nearest
from agentrl.plugins.registry import installed, load, with_arguments
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AdvantageSection, AggregationSection, AlgorithmSection, LossSection


class Advantage(Protocol):
    """Signature of an advantage estimator. A third parameter, of a pydantic model or a dataclass, is made from
    `algorithm.advantage.args`.

    Returns one advantage per sample, float32 [S], or one per sampled token, as TokenAdvantages.
    """

    def __call__(self, samples: Samples, config: AlgorithmSection) -> Tensor | TokenAdvantages: ...


class Loss(Protocol):
    """Signature of a policy loss. Returns one loss per token. A third parameter, of a pydantic model or a dataclass, is
    made from `algorithm.loss.args`."""

    def __call__(self, tokens: Tokens, config: AlgorithmSection) -> LossTerms: ...


class Aggregation(Protocol):
    """Signature of an aggregation. A third parameter is made from `algorithm.aggregation.args`.

    Returns the weight of each token of a sample in the loss of the update, float [R].
    """

    def __call__(self, update: Update, config: AlgorithmSection) -> npt.NDArray[np.floating[Any]]: ...


class Choice(Protocol):
    """Signature of the `choose` of a loss. It is given all sampled tokens of an update before it is split, with the
    log-probs just before it, without gradient, and random numbers that depend on the seed, the step and the update.

    Returns a value for each token, float32 [N], which the loss reads as `Tokens.chosen`. A fourth parameter is made
    from `algorithm.loss.args`, as the third of the loss is.
    """

    def __call__(self, update: Tokens, rng: np.random.Generator, config: AlgorithmSection) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AdvantageEntry:
    """A registered advantage estimator."""

    function: Advantage
    """The estimator."""
    needs_values: bool = False
    """Whether it reads the critic's `Samples.values` and returns `TokenAdvantages.returns`, the critic's targets."""
    needs_turns: bool = False
    """Whether it reads `Samples.turns`."""
    needs_states: bool = False
    """Whether it reads `Samples.states`."""
    needs_parts: bool = False
    """Whether it reads `Samples.parts`."""


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A registered policy loss."""

    function: Loss
    """The loss."""
    vanishes_with_advantage: bool = False
    """Whether its gradient is 0 where the advantage is 0: such samples then need no forward pass."""
    choose: "Choice | None" = None
    """What decides over all tokens of an update at once, before it is split; None: the loss needs none."""
    needs_updates: bool = False
    """Whether it pulls back to the policy of the step's beginning, which takes several updates a step."""


@dataclass(frozen=True, slots=True)
class AggregationEntry:
    """A registered aggregation."""

    function: Aggregation
    """The aggregation."""


F = TypeVar("F", bound=Callable[..., object])
Entry = TypeVar("Entry", bound=AdvantageEntry | LossEntry | AggregationEntry)


class Registry(Generic[Entry]):
    """Entries by name. A name that is not registered is looked up among the entry points of `group`.

    kind: what an entry is, for error messages. entry: makes an entry from a function and its flag. flag: the name of
    the flag. attribute: the function attribute that was used before flags, read until 0.3.0; None: there was none.
    """

    def __init__(
        self, group: str, kind: str, entry: Callable[..., Entry], flag: str = "", attribute: str | None = None
    ) -> None:
        self.group, self.kind = group, kind
        self._entry, self._flag, self._attribute = entry, flag, attribute
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, **flags: object) -> Callable[[F], F]:
        """Register the decorated function as `name`.

        flags: `needs_values`, `needs_turns`, `needs_states`, `needs_parts` for an advantage;
        `vanishes_with_advantage`, `choose`, `needs_updates` for a loss. Raises ValueError if a function of another
        module has the name.
        """

        def keep(function: F) -> F:
            known = self._entries.get(name)
            if known is not None and getattr(known.function, "__module__", None) != function.__module__:
                raise ValueError(f"there is a {self.kind} {name!r} already; give yours another name")
            self._entries[name] = self._entry(function, **flags)
            return function

        return keep

    @property
    def functions(self) -> dict[str, Callable[..., object]]:
        """The registered functions by name, including the built-in ones."""
        return {name: entry.function for name, entry in self._entries.items()}

    def get(self, name: str) -> Entry:
        """The entry of a registered name, an entry point or an import path `module:attribute`.

        Raises UserError for an unknown name, or if the function cannot be imported.
        """
        if name in self._entries:
            return self._entries[name]
        others: set[str] = {plugin.name for plugin in installed(self.group)}
        if ":" not in name and name not in others:
            raise UserError(f"no {self.kind} {name!r}{nearest(name, {*self._entries, *others})}")
        function = load(self.group, name)
        return next((e for e in self._entries.values() if e.function is function), None) or self._unregistered(function)

    def bound(self, section: AdvantageSection | LossSection | AggregationSection) -> Callable[..., object]:
        """The function that a recipe's section names, with its own arguments made and given to it.

        Raises UserError, one line: see `get`; arguments that it does not take.
        """
        return with_arguments(self.get(section.name).function, 2, section.args, f"algorithm.{self.kind}.args")

    def chooser(self, section: LossSection) -> Callable[..., object] | None:
        """The `choose` of the loss that a recipe's section names, with its arguments given to it; None where it
        has none. Raises UserError as `bound` does."""
        choose = getattr(self.get(section.name), "choose", None)
        return choose and with_arguments(choose, 3, section.args, f"algorithm.{self.kind}.args")

    def _unregistered(self, function: object) -> Entry:
        if self._attribute is None:
            return self._entry(function)
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


aggregations = Registry("agentrl.aggregations", "aggregation", AggregationEntry)


def check_critic(recipe: Recipe) -> None:
    """Check that the recipe has a critic exactly if its advantage needs one. Raises UserError if not."""
    name = recipe.algorithm.advantage.name
    needed = advantages.get(name).needs_values
    if needed and recipe.critic is None:
        raise UserError(f"algorithm.advantage {name!r} needs a critic, and the recipe has none: add `critic: {{}}`")
    if recipe.critic is not None and not needed:
        raise UserError(f"critic: algorithm.advantage {name!r} uses no critic; remove it, or choose `gae`")
