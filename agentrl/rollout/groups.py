"""`roll_out`: groups of samples, at most so many requests at once. A failed sample is tried again, then left out."""

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agentrl.containment.deadline import OwnedTask
from agentrl.containment.pulse import PULSE
from agentrl.containment.threads import check_abandoned
from agentrl.errors import UserError
from agentrl.plugins.types import Task
from agentrl.rollout.conversation import Seed
from agentrl.rollout.driver import Driver
from agentrl.rollout.request import Opening
from agentrl.trajectory import Boundary, Failure, FinishReason, Group, Trajectory


class Contrast(StrEnum):
    """Whether the rewards of a group differ. An advantage that compares within groups is 0 for a group that is not
    varied; a critic, a KL, an entropy bonus or a comparison over the whole step may still train on it."""

    VARIED = "varied"
    EQUAL = "equal"  # all rewards are equal
    FEW = "few"  # fewer than two valid samples


def contrast(group: Group) -> Contrast:
    """Whether the rewards of the valid samples differ by 1e-9 or more, or those of a seat."""
    if len(group.trajectories) < 2:
        return Contrast.FEW
    compared = [[t.reward for t in group.trajectories]]
    for seat in {name for t in group.trajectories for name in t.seats}:
        compared.append([t.seats[seat] for t in group.trajectories if seat in t.seats])
    return Contrast.VARIED if any(max(one) - min(one) >= 1e-9 for one in compared) else Contrast.EQUAL


_ALLOCATIONS = 500_000  # objects more than were freed, before the young ones are walked over
_held: list[tuple[int, int, int]] = []  # the thresholds before the first of those that hold it back now
_AGAIN = 5  # times that a sample may be in flight while the process stands still, before it is given up


After = Callable[[int, Group], Awaitable[Sequence[Task] | None]]
"""Asked for more tasks as a group is whole, with its place among those so far; None: what is in flight is abandoned."""


class _EnoughError(Exception):
    """Ends the requests that are in flight."""


@dataclass(slots=True)
class _Growing:
    """A group while its samples run. `first`: the seed index of its first sample, 0 unless its task comes twice."""

    task: Task
    first: int
    opening: Opening = field(default_factory=Opening)
    samples: list[Trajectory | None] = field(default_factory=list)
    left: int = 0
    whole: Group | None = None  # once all are finished and scored together

    def group(self) -> Group:
        return Group.of(self.task, [t for t in self.samples if t is not None])


def _stop(flying: Collection[OwnedTask]) -> None:
    for own in flying:
        own.stop()


async def roll_out(
    driver: Driver,
    tasks: Sequence[Task],
    n: int,
    *,
    seed: Seed = 0,
    only: Sequence[Collection[int]] | None = None,
    on_sample: Callable[[int, Trajectory], None] | None = None,
    on_group: Callable[[Group], None] | None = None,
    after: After | None = None,
) -> list[Group]:
    """`n` samples of each task, in the order of `tasks`; no request waits for another's turn.

    seed: of the run and the step; the same seed, weights and tasks give the same tokens where the engine does. Requests
    in flight and retries: `rollout.concurrency`, `rollout.retries`. only: of each task, the indices of the samples that
    are played; the others are left out of its group. on_sample, on_group: called as each ends (also for the failed), in
    the event loop; a sample comes with the index of its task, and without what is scored by group. When it is
    cancelled, every request in flight is released first. What was in flight while the process stood still is sampled
    again. after: asked for more tasks as each group is whole; their groups come last. Where it returns None, that is
    enough: what is in flight is cancelled, and groups that are not whole are left out.

    Raises UserError where too many calls of one synchronous function hang (`agentrl.containment.threads`).
    """
    seen: Counter[str] = Counter()
    growing: list[_Growing] = []
    jobs: deque[tuple[int, int]] = deque()

    def add(task: Task, chosen: Collection[int]) -> None:
        jobs.extend((len(growing), index) for index in sorted(chosen))
        growing.append(_Growing(task, seen[task.id] * n, samples=[None] * n, left=len(chosen)))
        if driver.workspaces is not None:
            driver.workspaces.expect(task, len(chosen))
        seen[task.id] += 1

    flying: set[OwnedTask] = set()
    working = 0

    async def work() -> None:
        while jobs:
            place, index = jobs.popleft()
            group = growing[place]
            trajectory = await _sample(driver, group, index, seed, flying)
            group.samples[index] = trajectory
            if on_sample is not None:
                on_sample(place, trajectory)
            group.left -= 1
            if group.left == 0:
                group.whole = await _score(driver, group.group())
                check_abandoned()
                if on_group is not None:
                    on_group(group.whole)
                if after is not None:
                    more = await after(place, group.whole)
                    if more is None:
                        raise _EnoughError
                    for task in more:
                        add(task, range(n))
                    begin()

    def begin() -> None:
        nonlocal working
        for _ in range(min(driver.limits.concurrency - working, len(jobs))):
            working += 1
            workers.create_task(work()).add_done_callback(ended)

    def ended(_: object) -> None:
        nonlocal working
        working -= 1

    announced = driver.workspaces.announced() if driver.workspaces is not None else nullcontext()
    try:
        with announced, rare_collections(), PULSE.ticking(lambda: _stop(flying)):
            for task, chosen in zip(tasks, only if only is not None else [range(n)] * len(tasks), strict=True):
                add(task, chosen)
            async with asyncio.TaskGroup() as workers:
                begin()
    except ExceptionGroup as errors:
        if (ours := errors.subgroup(UserError)) is not None:
            raise ours.exceptions[0] from None
        if errors.split(_EnoughError)[1] is not None:
            raise
        return [group.whole for group in growing if group.whole is not None]
    return [group.whole or group.group() for group in growing]


async def _sample(driver: Driver, group: _Growing, index: int, seed: Seed, flying: set[OwnedTask]) -> Trajectory:
    """Sample once, and again where the machinery failed; what failed before is kept in `extra["retried"]`. One that
    was in flight while the process stood still is as if it had never been. flying: told of what may be stopped."""
    failures: list[str] = []
    spent: Counter[str] = Counter()  # by attempts that failed, as an endpoint counted it
    still = 0
    while True:
        request = driver.request(
            group.task, group.first + index, seed=seed, attempt=len(failures), opening=group.opening
        )
        stops = PULSE.stops()
        flying.add(request.own)
        try:
            trajectory = await driver.drive(request)
        finally:
            flying.discard(request.own)
        check_abandoned()
        if request.own.stopped or PULSE.stops() != stops:
            still += 1
            if still < _AGAIN:
                continue
            lost = Failure(Boundary.INFRASTRUCTURE, f"driver: the process stood still {still} times meanwhile")
            trajectory = replace(trajectory, finish=FinishReason.ERROR, failure=lost, rewards={})
            break
        failure = trajectory.failure
        if failure is None or trajectory.finish is FinishReason.ABORTED or len(failures) >= driver.limits.retries:
            break
        failures.append(f"{failure.boundary}: {failure.message}")
        spent.update(trajectory.extra.get("usage", {}))
    if group.first or failures:
        extra = {**trajectory.extra, "retried": tuple(failures)} if failures else trajectory.extra
        if spent:
            extra = {**extra, "usage": dict(spent + Counter(extra.get("usage", {})))}
        trajectory = replace(trajectory, sample=index, extra=extra)
    return trajectory


async def _score(driver: Driver, group: Group) -> Group:
    """The group scored together, and again where the process stood still meanwhile."""
    for _ in range(_AGAIN):
        stops = PULSE.stops()
        scored = await driver.scorer.score_group(group)
        if PULSE.stops() == stops:
            break
    return scored


@contextmanager
def rare_collections() -> Iterator[None]:
    """Hold Python's cyclic garbage collector back in here. Nested and concurrent uses are fine.

    A request makes no cycles: counting references frees it. But the collector walks over all that is alive whenever
    that has grown by a quarter, and with ten thousand requests in flight those walks cost more than the driver does.
    What cycles a plugin makes are found later.
    """
    _held.append(gc.get_threshold() if not _held else _held[0])
    if 0 < _held[0][0] < _ALLOCATIONS:
        gc.set_threshold(_ALLOCATIONS, *_held[0][1:])
    try:
        yield
    finally:
        before = _held.pop()
        if not _held:
            gc.set_threshold(*before)
