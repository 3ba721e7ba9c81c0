"""`Rollouts`: the groups of each step, sampled before the update or while it runs, or read from files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from agentrl.containment.threads import in_thread
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.eval.held_out import solved_by
from agentrl.plugins.types import Json, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import DataSection
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.player import Player
from agentrl.rollout.selection import GroupFilter, Selection, Showable, at_once, make_filter, most_groups
from agentrl.rollout.stored import read_groups
from agentrl.rollout.stream import Flight, Plan, Stream
from agentrl.rollout.trajectory_file import FILTERED, SURPLUS
from agentrl.training.interrupt import Interrupts
from agentrl.trajectory import Group
from agentrl.weights.source import WeightSource

T = TypeVar("T")
OnGroup = Callable[[Group], None]
"""Called with each group as its last sample ends, in the event loop."""
Weights = Callable[[], WeightSource | None]
"""The weights for the engine; None for an engine that shares the trainer's weights."""


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of a step."""

    groups: list[Group]
    """Those that are trained on."""
    metrics: dict[str, Json]
    """Of all that were sampled."""
    left_out: Mapping[str, Sequence[Group]] = field(default_factory=dict)
    """Those that are not, by why."""

    @property
    def sampled(self) -> list[Group]:
        """All that were sampled whole."""
        return [*self.groups, *chain(*self.left_out.values())]


class Rollouts(ABC):
    """Source of each step's groups, which also publishes weights to the engine. A step calls the methods in order."""

    def __init__(
        self,
        recipe: Recipe,
        player: Player,
        tasks: Sequence[Task],
        sampler: TaskSampler,
        interrupts: Interrupts,
        weights: Weights = lambda: None,
        on_group: OnGroup | None = None,
    ) -> None:
        self._recipe, self._player, self._tasks = recipe, player, tasks
        self._sampler, self._interrupts, self._weights, self._on_group = sampler, interrupts, weights, on_group
        self._filter: GroupFilter | None = make_filter(recipe)
        self._selects = self._filter is not None or recipe.rollout.oversample > 1

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self._recipe.train.steps

    @property
    def _showable(self) -> Showable | None:
        """Says of a task that was drawn whether it can be played; None where all can: for a model that sees no images,
        unless an `Order` draws, whose prompts are not measured before."""
        player, sampler, tasks = self._player, self._sampler, self._tasks
        asked = player.sees or sampler.order is not None
        return (lambda index: player.playable(sampler, tasks, index)) if asked else None

    @abstractmethod
    def next(self, step: int) -> StepGroups:
        """The groups that step `step` trains on, and what they cost. Raises Interrupted."""

    @abstractmethod
    def learn(self, work: Callable[[], T]) -> T:
        """Run the step's update to its end, even if the run is interrupted."""

    @abstractmethod
    def publish(self, step: int) -> None:
        """Publish the weights of `step` to the engine, now or once the batch in flight is complete."""

    @abstractmethod
    def sync_engine(self) -> None:
        """Make sure that the engine has the last weights, before an evaluation. Raises Interrupted."""

    def _measured(self, ended: Iterable[tuple[int, Group]]) -> dict[str, float]:
        """Tell the order of tasks what they came to, by their indices; return the metrics of the data."""
        for index, group in ended if self._sampler.order is not None else ():
            if samples := group.trajectories:
                solved = sum(solved_by(self._player.env, t) for t in samples) / len(samples)
                self._sampler.learn(index, solved, [t.reward for t in samples])
        return {"data/epoch": self._sampler.progress} if self._selects or self._recipe.data != DataSection() else {}

    def state(self) -> dict[str, Json]:
        """The state, as JSON values, from which a resumed run chooses the same next tasks."""
        return self._sampler.state()

    def restore(self, step: int, state: Mapping[str, Json]) -> None:
        """Continue from `state`, which `state()` returned after step `step`."""
        self._sampler.restore(dict(state))

    async def close(self) -> None:  # noqa: B027 - between steps, nothing is in flight unless a subclass overlaps
        """Cancel the requests in flight."""


class SerialRollouts(Rollouts):
    """Rollouts that alternate with updates: every token is sampled from the weights that are then trained on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outstanding: list[int] = []  # tasks that were drawn and not sampled whole

    def next(self, step: int) -> StepGroups:
        start = perf_counter()
        limits, seed = self._recipe.rollout, (self._recipe.train.seed, step)
        label, on_group = f"step_{step}", self._on_group
        ahead, most = at_once(self._recipe), most_groups(self._recipe)
        chosen = Selection(self._draw, self._filter, limits.tasks, ahead, most, self._showable)

        async def play() -> None:
            tasks, after = await chosen.first(), chosen.after
            await self._player.play(tasks, limits.n, seed=seed, label=label, on_group=on_group, after=after)

        self._interrupts.run(play)
        self._outstanding = [*chosen.abandoned, *self._outstanding]
        seconds = perf_counter() - start
        left_out = {FILTERED: chosen.groups(kept=False), SURPLUS: chosen.surplus}
        found = StepGroups(chosen.groups(kept=True), {}, left_out)
        metrics = _with_speed(found.sampled, seconds, seconds)
        metrics |= self._measured((chosen.drawn[place], group) for place, (group, _) in sorted(chosen.whole.items()))
        if self._selects:
            metrics |= selection_metrics(found, len(chosen.abandoned))
        found.metrics.update(metrics)
        return found

    def _draw(self) -> tuple[int, Task]:
        index = self._outstanding.pop(0) if self._outstanding else self._sampler.draw(1)[0]
        return index, self._tasks[index]

    def state(self) -> dict[str, Json]:
        return {**super().state(), **({"outstanding": list(self._outstanding)} if self._outstanding else {})}

    def restore(self, step: int, state: Mapping[str, Json]) -> None:
        super().restore(step, state)
        self._outstanding = list(state.get("outstanding", ()))

    def learn(self, work: Callable[[], T]) -> T:
        if self._recipe.engine.sleep:
            self._interrupts.complete(self._player.engine.sleep)
        return work()

    def publish(self, step: int) -> None:
        self._interrupts.complete(lambda: self._publish(step))

    async def _publish(self, step: int) -> None:
        await self._player.engine.update_weights(step, self._weights())
        if self._recipe.engine.sleep:
            await self._player.engine.wake()

    def sync_engine(self) -> None:
        """Do nothing: `publish` has published the weights."""


class StoredRollouts(SerialRollouts):
    """Rollouts of former runs, a file a step: nothing is sampled, and the engine serves evaluations alone."""

    def __init__(self, files: Sequence[Path], *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._files = files

    @property
    def steps(self) -> int:
        return min(super().steps, len(self._files))

    def next(self, step: int) -> StepGroups:
        start = perf_counter()
        path = self._files[step - 1]
        groups = read_groups(path, self._recipe.rewards.weights, trained=True)
        self._check(path, groups)
        metrics = rollout_metrics(groups)
        return StepGroups(groups, {**metrics, "time/rollout_s": perf_counter() - start, "rollout/tokens_per_s": 0.0})

    def _check(self, path: Path, groups: Sequence[Group]) -> None:
        size = self._player.model.config.get_text_config().vocab_size
        for t in (t for group in groups for t in group.trajectories):
            if foreign := t.ids[(t.ids < 0) | (t.ids >= size)].tolist():
                raise UserError(f"{path}: holds token {foreign[0]}, and the model has a vocabulary of {size}")

    def learn(self, work: Callable[[], T]) -> T:
        if self._recipe.rollout.overlap != "none":  # as the run did whose updates are repeated
            return self._interrupts.complete(lambda: in_thread(work))
        return super().learn(work)

    def state(self) -> dict[str, Json]:
        return {**super().state(), "stored": [str(path) for path in self._files]}


class OverlappedRollouts(Rollouts):
    """Rollouts sampled in the event loop while the update runs in a thread.

    With rollout.overlap one_step, new weights wait until the batch in flight is complete, so that all tokens of a step
    have one version, one update older than the weights being trained. With async, they are published immediately, in
    the middle of requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_order = self._recipe.rollout.overlap == "one_step"
        self._published = self._trained = 0
        self._taken = perf_counter()
        self._stream = self._make_stream(0, ())

    def _make_stream(self, step: int, first: Sequence[int], begun: int | None = None) -> Stream:
        limits, train = self._recipe.rollout, self._recipe.train
        staleness = None if self._in_order else limits.max_staleness
        plan = Plan(limits.n, limits.tasks, train.steps, train.seed, staleness, most_groups(self._recipe))
        return Stream(
            self._player.driver(label=f"after_{step}"),
            self._tasks,
            lambda: self._sampler.draw(1)[0],
            plan,
            showable=self._showable,
            version=step,
            first=first,
            begun=begun,
            on_group=self._on_group,
            keep=None if self._filter is None else self._filter.keeps,
        )

    def next(self, step: int) -> StepGroups:
        start = perf_counter()
        flights = self._interrupts.run(self._stream.take)
        waited, elapsed, self._taken = perf_counter() - start, perf_counter() - self._taken, perf_counter()
        if self._in_order:
            self._update_engine()  # the batch is complete and nothing else is in flight
        groups, filtered = ([f.work.result()[0] for f in some] for some in (flights, self._stream.left_out))
        found = StepGroups(groups, {}, {FILTERED: filtered})
        metrics = {**_with_speed(found.sampled, waited, elapsed), **self._staleness(flights)}
        ended = sorted([*flights, *self._stream.left_out], key=lambda flight: flight.number)
        metrics |= self._measured((flight.index, flight.work.result()[0]) for flight in ended)
        if self._selects:
            metrics |= selection_metrics(found, 0)
        found.metrics.update(metrics)
        return found

    def learn(self, work: Callable[[], T]) -> T:
        return self._interrupts.complete(lambda: in_thread(work))

    def publish(self, step: int) -> None:
        self._trained = step
        if not self._in_order:
            self._update_engine()

    def sync_engine(self) -> None:
        if self._in_order:
            self._interrupts.run(self._stream.settle)
            self._update_engine()

    def _update_engine(self) -> None:
        """Publish the last weights to the engine, and allow further groups to start."""

        async def update() -> None:
            if self._published != self._trained:
                await self._player.engine.update_weights(self._trained, self._weights())
                self._published = self._trained
            self._stream.advance(self._published)

        self._interrupts.complete(update)

    def _staleness(self, flights: Sequence[Flight]) -> dict[str, Json]:
        """The metrics of staleness: updates between the weights that started a group and those being trained."""
        ages = [self._trained - flight.version for flight in flights]
        return {
            "rollout/staleness_mean": sum(ages) / max(1, len(ages)),
            "rollout/staleness_max": max(ages, default=0),
            "rollout/in_flight": self._stream.in_flight,
        }

    def state(self) -> dict[str, Json]:
        return {**super().state(), "outstanding": self._stream.outstanding, "begun": self._stream.begun}

    def restore(self, step: int, state: Mapping[str, Json]) -> None:
        super().restore(step, state)
        self._published = self._trained = step
        self._stream = self._make_stream(step, state.get("outstanding", ()), state.get("begun"))

    async def close(self) -> None:
        await self._stream.close()


def selection_metrics(found: StepGroups, abandoned: int) -> dict[str, float]:
    """What it took to find the groups of a step. abandoned: groups given up while they were sampled."""
    left_out = list(chain(*found.left_out.values()))
    return {
        "groups/kept": len(found.groups),
        "groups/left_out": len(left_out),
        "groups/abandoned": abandoned,
        "rollout/left_out_tokens": sum(t.sampled_tokens for g in left_out for t in (*g.trajectories, *g.failed)),
    }


def _with_speed(groups: Sequence[Group], waited: float, elapsed: float) -> dict[str, Json]:
    """The metrics of `groups`. waited: seconds that this step waited for them. elapsed: seconds since the last
    batch, the time over which tokens per second are computed."""
    sampled = sum(t.sampled_tokens for g in groups for t in (*g.trajectories, *g.failed))
    return {**rollout_metrics(groups), "time/rollout_s": waited, "rollout/tokens_per_s": sampled / elapsed}
