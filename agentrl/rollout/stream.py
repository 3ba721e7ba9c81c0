"""`Stream`: groups rolled out without a stop, while somebody else trains on those that are finished.

A group belongs to the version of the weights that its first request began with. In any order, a batch takes what is
finished, and first of all as many of the old as must go now: no group is trained on more than `staleness` updates after
it began. That can be kept because no more begin than the coming batches take (AReaL, arXiv:2505.24298, equation 3). In
order, the next batch is sampled while one trains, and new weights wait until nothing is in flight.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.plugins.types import Task
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.rollout.selection import Showable
from agentrl.trajectory import Group


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One group on its way. index: of its task. number: groups that began before it. version: of the weights then."""

    index: int
    number: int
    version: int
    work: "asyncio.Task[list[Group]]"
    """Plays the group."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stream keeps to. n: samples a group. batch: groups a step. steps: of the whole run. seed: of the run; a
    group's tokens depend on it and on the group's number. staleness: updates; None: in order, see above. most: groups
    that may begin for a batch, where some are left out; None: as many as a batch has."""

    n: int
    batch: int
    steps: int
    seed: int
    staleness: int | None
    most: int | None = None

    @property
    def spare(self) -> int:
        """Groups of a batch that are left out and replaced, at most."""
        return 0 if self.most is None else self.most - self.batch


class Stream:
    """driver: plays the groups. tasks: what indices stand for. draw: gives the index of the next task.

    version: of the engine's weights at the beginning, which is the number of steps that are done. first: indices of
    tasks that come before those that `draw` gives. begun: groups that began in the steps that are done; None: as many
    as their batches have. on_group: called as each group ends. keep: asked of each group that ended whether it is
    trained on; another begins in the place of one that is not, up to `Plan.most` for a batch, and a batch is smaller by
    what is missing then. showable: asked of the tasks that are about to begin whether their images can be shown; others
    are drawn in place of those that cannot. Everything but the constructor is called in one event loop.
    """

    def __init__(
        self,
        driver: Driver,
        tasks: Sequence[Task],
        draw: Callable[[], int],
        plan: Plan,
        *,
        version: int = 0,
        first: Sequence[int] = (),
        begun: int | None = None,
        on_group: Callable[[Group], None] | None = None,
        keep: Callable[[Group], Awaitable[bool]] | None = None,
        showable: Showable | None = None,
    ) -> None:
        self._driver, self._tasks, self._draw, self._plan = driver, tasks, draw, plan
        self.version, self._on_group, self._keep, self._showable = version, on_group, keep, showable
        self._waiting = list(first)
        self._looked_at: list[int] = []
        self._ready: list[int] = []  # their images can be shown
        self._look: asyncio.Task[None] | None = None
        self._flights: list[Flight] = []
        self._flying = 0  # how many of them are not finished
        self._errors: list[BaseException] = []
        self._ended = asyncio.Event()  # something has, since `take` looked last
        self._rejected: set[int] = set()  # numbers of those among the flights that are left out
        self.left_out: list[Flight] = []
        """What was left out for the last batch, in the order in which it began."""
        self._begun = version * plan.batch if begun is None else begun
        self._batches = version  # that were taken
        self._closed = False

    @property
    def outstanding(self) -> list[int]:
        """Indices of tasks that were drawn and not taken, or left out since: a resumed run begins with them."""
        return [*(flight.index for flight in self._flights), *self._ready, *self._looked_at, *self._waiting]

    @property
    def begun(self) -> int:
        """Groups that began, without those that are outstanding."""
        return self._begun - len(self._flights)

    @property
    def in_flight(self) -> int:
        """Groups that have begun and are not finished."""
        return self._flying

    async def take(self) -> list[Flight]:
        """The next batch, whole, the oldest first; `left_out` says what it cost beside. What it does not take
        stays in flight. Raises what `roll_out` and `keep` raise, as soon as they do."""
        self._fill()
        self._raise_failed()
        while (chosen := self._chosen()) is None:
            assert self._flying or self._look is not None, "the batch is not whole, and nothing is in flight"
            self._ended.clear()
            await self._ended.wait()
            self._raise_failed()
            self._fill()  # raises what the order of tasks raised
        self.left_out = [flight for flight in self._flights if flight.number in self._rejected]
        taken = set(chosen)
        self._flights = [flight for flight in self._alive if flight not in taken]
        self._rejected.clear()
        self._batches += 1
        return chosen

    def _raise_failed(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _note_end(self, work: "asyncio.Task[Any]") -> None:
        """Count what has ended, once, so that looking at thousands of groups costs no more than their number."""
        if not work.cancelled() and (error := work.exception()) is not None:
            self._errors.append(error)
        self._ended.set()
        self._fill()

    def _land(self, work: "asyncio.Task[Any]") -> None:
        self._flying -= 1
        self._note_end(work)

    def advance(self, version: int) -> None:
        """Note that the engine samples from `version` from now on: more groups may begin."""
        self.version = version
        self._fill()

    async def settle(self) -> None:
        """Wait until nothing is in flight; what is finished stays for the next batch."""
        while unfinished := self._unfinished:
            await asyncio.wait(unfinished)

    async def close(self) -> None:
        """Cancel what is in flight; every request is released."""
        self._closed = True
        if unfinished := self._unfinished:
            for work in unfinished:
                work.cancel()
            await asyncio.wait(unfinished)

    def _fill(self) -> None:
        while (room := self._room) and (self._ready or self._showable is None):
            index = self._ready.pop(0) if self._ready else self._next()
            work = asyncio.get_running_loop().create_task(self._play(index, self._begun))
            work.add_done_callback(self._land)
            self._flying += 1
            self._flights.append(Flight(index, self._begun, self.version, work))
            self._begun += 1
        if room and self._look is None and self._showable is not None:
            self._looked_at = [self._next() for _ in range(room)]
            self._look = asyncio.get_running_loop().create_task(self._see(self._showable))
            self._look.add_done_callback(self._note_end)

    def _next(self) -> int:
        return self._waiting.pop(0) if self._waiting else self._draw()

    async def _see(self, showable: Showable) -> None:
        shown = await asyncio.gather(*map(showable, self._looked_at))
        self._ready += [index for index, can in zip(self._looked_at, shown, strict=True) if can]
        self._looked_at, self._look = [], None

    async def _play(self, index: int, number: int) -> list[Group]:
        groups = await roll_out(
            self._driver, [self._tasks[index]], self._plan.n, seed=(self._plan.seed, number), on_group=self._on_group
        )
        if self._keep is not None and not await self._keep(groups[0]):
            self._rejected.add(number)
        return groups

    @property
    def _alive(self) -> list[Flight]:
        """What is in flight, or finished and not left out."""
        return [flight for flight in self._flights if flight.number not in self._rejected]

    @property
    def _count(self) -> int:
        """How many these are."""
        return len(self._flights) - len(self._rejected)

    @property
    def _lost(self) -> int:
        """Groups of the next batch that are left out and not replaced."""
        return max(0, len(self._rejected) - self._plan.spare)

    @property
    def _room(self) -> int:
        """How many groups may begin now."""
        plan = self._plan
        ahead = self._batches if plan.staleness is None else self.version + plan.staleness
        bound = (min(ahead + 1, plan.steps) - self._batches) * plan.batch
        flying = self.in_flight
        at_once = max(self._driver.limits.concurrency // plan.n - flying, int(flying == 0))
        return 0 if self._closed else max(0, min(at_once, bound - self._count - self._lost))

    @property
    def _unfinished(self) -> "list[asyncio.Task[Any]]":
        """What is in flight, and looks at images for what is to begin."""
        return [
            *_unfinished(self._flights),
            *([self._look] if self._look is not None and not self._look.done() else ()),
        ]

    def _chosen(self) -> list[Flight] | None:
        """The next batch; None while it is not whole."""
        wanted = max(0, self._plan.batch - self._lost)
        if self._count - self._flying < wanted:
            return None
        waiting = sorted(self._alive, key=lambda flight: flight.number)
        if self._plan.staleness is not None:
            waiting.sort(key=lambda flight: not flight.work.done())
            due = self._due(waiting, self._plan.staleness)
            first = set(due)
            waiting = [*due, *(flight for flight in waiting if flight not in first)]
        chosen = waiting[:wanted]
        if len(chosen) < wanted or _unfinished(chosen):
            return None
        return sorted(chosen, key=lambda flight: flight.number)

    def _due(self, waiting: Sequence[Flight], staleness: int) -> list[Flight]:
        """Those of `waiting` that this batch must take: of the flights of a version and before, no more may be
        left than the batches take that may still train on them. Finished ones first, as `waiting` is ordered."""
        due: dict[Flight, None] = {}
        for version in sorted({flight.version for flight in waiting}):
            old = [flight for flight in waiting if flight.version <= version]
            later = max(0, version + staleness - self.version) * self._plan.batch
            missing = len(old) - later - sum(flight.version <= version for flight in due)
            due |= dict.fromkeys([flight for flight in old if flight not in due][: max(0, missing)])
        return list(due)


def _unfinished(flights: Iterable[Flight]) -> "list[asyncio.Task[list[Group]]]":
    return [flight.work for flight in flights if not flight.work.done()]
