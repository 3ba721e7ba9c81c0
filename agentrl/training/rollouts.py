"""Where the loop's batches come from: sampled and trained on in turn, or sampled while others train."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol, TypeVar

from agentrl.data.sampler import TaskSampler
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.player import Player
from agentrl.rollout.stream import Flight, Plan, Stream
from agentrl.threads import in_thread
from agentrl.training.interrupt import Interrupts
from agentrl.trajectory import Group
from agentrl.weights.source import WeightSource

T = TypeVar("T")
Weights = Callable[[], WeightSource | None]
"""Returns what the engine is given for a new version; None where it knows the trainer's model."""


class Rollouts(Protocol):
    """What the loop asks for, in the order of a step."""

    def next(self, step: int) -> tuple[list[Group], dict[str, Any]]:
        """The groups that step `step` trains on, and their metrics. Raises Interrupted."""
        ...

    def learn(self, work: Callable[[], T]) -> T:
        """Do the step's update, to its end whatever is requested."""
        ...

    def publish(self, step: int) -> None:
        """The weights of `step` are whole: let the engine have them, now or as soon as it may."""
        ...

    def current(self) -> None:
        """Let the engine have the last weights before an evaluation. Raises Interrupted."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to draw the tasks that come next; JSON."""
        ...

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, after step `step`."""
        ...

    async def close(self) -> None:
        """Give up what is in flight."""
        ...


class Serial:
    """One after the other: every token comes from the weights that are trained."""

    def __init__(
        self,
        recipe: Recipe,
        player: Player,
        tasks: Sequence[Task],
        sampler: TaskSampler,
        interrupts: Interrupts,
        weights: Weights,
    ) -> None:
        self._recipe, self._player, self._tasks = recipe, player, tasks
        self._sampler, self._interrupts, self._weights = sampler, interrupts, weights

    def next(self, step: int) -> tuple[list[Group], dict[str, Any]]:
        began = perf_counter()
        limits, seed = self._recipe.rollout, (self._recipe.train.seed, step)
        tasks = [self._tasks[i] for i in self._sampler.draw(limits.tasks)]
        groups = self._interrupts.run(lambda: self._player.play(tasks, limits.n, seed=seed, occasion=f"step_{step}"))
        seconds = perf_counter() - began
        return groups, _measured(groups, waited=seconds, since=seconds)

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

    def current(self) -> None:
        """It is."""

    def state(self) -> dict[str, Any]:
        return self._sampler.state()

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        self._sampler.restore(dict(state))

    async def close(self) -> None:
        """Nothing is in flight between steps."""


class Overlapped:
    """Sampling goes on in the event loop while the update runs in a thread.

    one_step: new weights wait until the batch in flight is whole, so that every token of a step has one version, which
    is one update old when it is trained on. async: they are published at once, in the middle of requests.
    """

    def __init__(
        self,
        recipe: Recipe,
        player: Player,
        tasks: Sequence[Task],
        sampler: TaskSampler,
        interrupts: Interrupts,
        weights: Weights,
    ) -> None:
        self._recipe, self._player, self._tasks = recipe, player, tasks
        self._sampler, self._interrupts, self._weights = sampler, interrupts, weights
        self._in_order = recipe.rollout.overlap == "one_step"
        self._published = self._trained = 0
        self._taken = perf_counter()
        self._stream = self._make_stream(0, ())

    def _make_stream(self, step: int, first: Sequence[int]) -> Stream:
        limits, train = self._recipe.rollout, self._recipe.train
        staleness = None if self._in_order else limits.max_staleness
        plan = Plan(limits.n, limits.tasks, train.steps, train.seed, staleness)
        draw = self._sampler.draw
        driver = self._player.driver(occasion=f"after_{step}")
        return Stream(driver, self._tasks, lambda: draw(1)[0], plan, version=step, first=first)

    def next(self, step: int) -> tuple[list[Group], dict[str, Any]]:
        began = perf_counter()
        flights = self._interrupts.run(self._stream.take)
        waited, since, self._taken = perf_counter() - began, perf_counter() - self._taken, perf_counter()
        if self._in_order:
            self._hand_over()  # the batch is whole, and nothing else is in flight
        groups = [flight.work.result()[0] for flight in flights]
        return groups, {**_measured(groups, waited, since), **self._staleness(flights)}

    def learn(self, work: Callable[[], T]) -> T:
        return self._interrupts.complete(lambda: in_thread(work))

    def publish(self, step: int) -> None:
        self._trained = step
        if not self._in_order:
            self._hand_over()

    def current(self) -> None:
        if self._in_order:
            self._interrupts.run(self._stream.settle)
            self._hand_over()

    def _hand_over(self) -> None:
        """The engine gets the last weights, and more may begin."""
        self._interrupts.complete(self._update_engine)

    async def _update_engine(self) -> None:
        if self._published != self._trained:
            await self._player.engine.update_weights(self._trained, self._weights())
            self._published = self._trained
        self._stream.advance(self._published)

    def _staleness(self, flights: Sequence[Flight]) -> dict[str, Any]:
        """In updates, of each group's first token when it is trained on."""
        ages = [self._trained - flight.version for flight in flights]
        return {
            "rollout/staleness_mean": sum(ages) / len(ages),
            "rollout/staleness_max": max(ages),
            "rollout/in_flight": self._stream.in_flight,
        }

    def state(self) -> dict[str, Any]:
        return {**self._sampler.state(), "outstanding": self._stream.outstanding}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        self._sampler.restore(dict(state))
        self._published = self._trained = step
        self._stream = self._make_stream(step, state.get("outstanding", ()))

    async def close(self) -> None:
        await self._stream.close()


def make_rollouts(
    recipe: Recipe,
    player: Player,
    tasks: Sequence[Task],
    sampler: TaskSampler,
    interrupts: Interrupts,
    weights: Weights = lambda: None,
) -> Rollouts:
    """As `rollout.overlap` says."""
    kind = Serial if recipe.rollout.overlap == "none" else Overlapped
    return kind(recipe, player, tasks, sampler, interrupts, weights)


def _measured(groups: Sequence[Group], waited: float, since: float) -> dict[str, Any]:
    """since: seconds since the last batch came, in which these and others were sampled."""
    sampled = sum(t.sampled_tokens for g in groups for t in (*g.trajectories, *g.failed))
    return {**rollout_metrics(groups), "time/rollout_s": waited, "rollout/tokens_per_s": sampled / since}
