"""Which groups of a step are trained on, and which tasks are sampled in place of the others."""

import math
from asyncio import gather, timeout
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.containment.threads import Abandoned, DaemonThreads
from agentrl.errors import UserError, call_plugin
from agentrl.plugins.registry import load, with_arguments
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import FilterSection
from agentrl.rollout.groups import Contrast, contrast
from agentrl.trajectory import Group

Showable = Callable[[int], Awaitable[bool]]
"""Says of the index of a task that was drawn whether its images can be shown."""
WHERE = "algorithm.filter"
_REMEDY = "give it a time-out of its own"


def varied(group: Group) -> bool:
    """Keep groups whose rewards differ: a comparison within a group learns from no other."""
    return contrast(group) is Contrast.VARIED


class GroupFilter:
    """A recipe's `algorithm.filter`. A function of a user's runs in a thread of its own, `seconds` at most."""

    def __init__(self, section: FilterSection, seconds: float) -> None:
        """Raises UserError, one line: an unknown name, or arguments that it does not take."""
        self.name, self._seconds = section.name, seconds
        function: Callable[..., object] = load("filters", section.name)
        self._function = with_arguments(function, 1, section.args, f"{WHERE}.args")
        self._threads = None if function is varied else DaemonThreads(WHERE, 1, Abandoned(WHERE, _REMEDY))

    async def keeps(self, group: Group) -> bool:
        """Whether the group is trained on. Raises UserError: what the function raises, gives that is no bool, or
        that it does not end."""
        if self._threads is None:
            return varied(group)
        owner = f"{WHERE} {self.name!r}"
        try:
            async with timeout(self._seconds):
                found = await self._threads.call(call_plugin, owner, self._function, group)
        except TimeoutError:
            raise UserError(f"{owner} does not end within {self._seconds:g} s") from None
        if not isinstance(found, bool) and type(found).__name__ not in ("bool", "bool_"):  # numpy's
            raise UserError(f"{owner} gave {found!r:.60}, not true or false")
        return bool(found)


def make_filter(recipe: Recipe) -> GroupFilter | None:
    """The filter of a recipe's groups; None where all are trained on. Raises UserError: see `GroupFilter`."""
    algorithm = recipe.algorithm
    section = algorithm.filter or (FilterSection(name="varied") if algorithm.dynamic_sampling is not None else None)
    return None if section is None else GroupFilter(section, recipe.rollout.turn_timeout)


def most_groups(recipe: Recipe) -> int:
    """How many groups may begin for one step."""
    needed, dynamic = recipe.rollout.tasks, recipe.algorithm.dynamic_sampling
    return max(at_once(recipe), math.floor(needed * dynamic.budget) if dynamic is not None else needed)


def at_once(recipe: Recipe) -> int:
    """How many groups of a step are in flight or kept, at most."""
    return math.ceil(recipe.rollout.tasks * recipe.rollout.oversample)


@dataclass(slots=True)
class Selection:
    """The groups of one step while they are sampled.

    Further ones begin as soon as one is left out, so that as many as are missing are in flight, and no more. Which are
    sampled, and which of them are kept, then does not depend on the order in which they end, unless `at_once` is more
    than `needed`.
    """

    draw: Callable[[], tuple[int, Task]]
    """Gives the next task, and its index."""
    filter: GroupFilter | None
    """Says which are kept; None: all."""
    needed: int
    """Groups that the step trains on."""
    at_once: int
    """Groups in flight or kept, at most."""
    most: int
    """Groups that may begin."""
    showable: Showable | None = None
    """Says whether the images of a task can be shown; another is drawn where not. None: all can."""
    drawn: list[int] = field(default_factory=list)
    """Indices of the tasks that began, in order."""
    whole: dict[int, tuple[Group, bool]] = field(default_factory=dict)
    """The groups that ended, by their place in `drawn`, and whether they are kept."""
    surplus: list[Group] = field(default_factory=list)
    """Groups that ended together with the last one that was needed; they are abandoned as well."""
    _waiting: list[int] = field(default_factory=list)  # that were drawn, and begin once their images are seen
    _reserved: int = 0  # groups that will begin once tasks for them are found

    async def first(self) -> list[Task]:
        """The tasks to begin with."""
        return await self._more(min(self.at_once, self.most))

    async def after(self, place: int, group: Group) -> Sequence[Task] | None:
        """The tasks that begin now that a group has ended; None where enough are kept. See `roll_out`."""
        keep = self.filter is None or await self.filter.keeps(group)
        if self.missing == 0:
            self.surplus.append(group)
            return None
        self.whole[place] = group, keep
        if self.missing > 0:
            begun = len(self.drawn) + self._reserved
            alive = begun - sum(not kept for _, kept in self.whole.values())
            more = await self._more(min(self.at_once - alive, self.most - begun))
            if self.missing > 0:
                return more
        return None if len(self.whole) < len(self.drawn) else ()

    async def _more(self, count: int) -> list[Task]:
        """`count` tasks, which begin now; none where enough groups are kept by the time they are found."""
        found: list[tuple[int, Task]] = []
        self._reserved += max(0, count)
        try:
            while len(found) < count:
                new = [self.draw() for _ in range(count - len(found))]
                self._waiting += [index for index, _ in new]
                found += [one for one, can in zip(new, await self._shown(new), strict=True) if can]
        finally:
            self._reserved -= max(0, count)
        if self.missing == 0:
            return []
        for index, _ in found:
            self._waiting.remove(index)
        self.drawn += [index for index, _ in found]
        return [task for _, task in found]

    async def _shown(self, drawn: Sequence[tuple[int, Task]]) -> list[bool]:
        """Whether each can be shown; those that cannot wait no longer."""
        if self.showable is None:
            return [True] * len(drawn)
        shown = await gather(*(self.showable(index) for index, _ in drawn))
        for (index, _), can in zip(drawn, shown, strict=True):
            if not can:
                self._waiting.remove(index)
        return shown

    @property
    def missing(self) -> int:
        """How many groups more have to be kept."""
        return self.needed - sum(kept for _, kept in self.whole.values())

    def groups(self, kept: bool) -> list[Group]:
        """The groups that are kept, or left out, in the order in which they began."""
        return [group for _, (group, keep) in sorted(self.whole.items()) if keep is kept]

    @property
    def abandoned(self) -> list[int]:
        """Indices of the tasks whose groups began and were given up, or were about to begin."""
        return [*(index for place, index in enumerate(self.drawn) if place not in self.whole), *self._waiting]
