"""`Watch`: what a run measures of its own steps, around the loop's phases and the learner's roles.

A role is wrapped, not changed: each call of it by a batch adds what the batch needs to the step's arithmetic, wherever
the role is. One of this process is recorded here where the recipe wants a trace of the step; those of workers are told
of the steps to record, and asked for their memory, through the workplace.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.training.batch import Batch
from agentrl.training.flops import Cost, Need, utilisation
from agentrl.training.peaks import Peaks
from agentrl.training.profile import Profiler

if TYPE_CHECKING:
    from agentrl.training.learner import Learner
    from agentrl.training.workplace import Workplace

ROLLOUT, TRAIN, SYNC = "rollout", "train", "sync"
PROFILE = "profile"  # the folder of traces, in that of the run
FORWARD, UPDATE = ("logprobs", "values"), ("update",)


class Watch:
    """One for a run. folder: of the traces. steps: those to record. engine: whether that computes in this process, and
    is to be recorded too. most: the run's highest memory/... so far."""

    def __init__(self, workplace: "Workplace", folder: Path, steps: Collection[int] = (), *, engine: bool) -> None:
        self._workplace, self._folder, self._steps = workplace, folder, frozenset(steps)
        self._cost, self._peak = workplace.work
        self._peaks = Peaks(workplace.device)
        self._engine = Profiler(folder, "engine", steps=steps if engine else ())
        self.most: dict[str, float] = {}
        self.step = 0
        self.flops = 0.0

    def over(self, learner: "Learner") -> None:
        """Its roles are watched from now on. A critic counts as the policy without its output layer."""
        learner.actor = self._watched(learner.actor, "actor", self._cost)
        learner.reference = learner.reference and self._watched(learner.reference, "reference", self._cost)
        values = replace(self._cost, head=0, trained_head=0)
        learner.critic = learner.critic and self._watched(learner.critic, "critic", values)

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Around a phase of step `step`."""
        self.step = step
        recorded = step in self._steps
        with ExitStack() as stack:
            stack.enter_context(self._peaks.phase(name))
            if name == ROLLOUT:
                stack.enter_context(self._engine.step(step))
            if recorded:
                self._workplace.record(step, self._folder)
            yield
            if recorded:
                self._workplace.record(0, self._folder)

    def take(self, seconds: float) -> dict[str, float]:
        """The metrics of a step, whose training took so long: train/tflops, train/mfu, memory/<phase>_gb, and
        memory/<phase>_<role>_gb of roles in other processes (of the worker that took the most)."""
        memory = {**self._peaks.take(), **self._workplace.measure()}
        for name, value in memory.items():
            self.most[name] = max(value, self.most.get(name, 0.0))
        flops, self.flops = self.flops, 0.0
        return {**utilisation(flops, seconds, self._peak), **memory}

    def describe(self) -> str:
        """The most of every phase, in a line; empty before the first step."""
        said = [f"{name.removeprefix('memory/').removesuffix('_gb')} {most:.2f} GB" for name, most in self.most.items()]
        return f"most memory: {', '.join(said)}" if said else ""

    def _watched(self, role: Any, name: str, cost: Cost) -> Any:
        here = self._workplace.here
        return _Watched(role, Profiler(self._folder, name, steps=self._steps if here else ()), self, cost)


class _Watched:
    """A role whose calls by a batch are counted and recorded; all else is the role's own."""

    def __init__(self, role: Any, profiler: Profiler, watch: Watch, cost: Cost) -> None:
        self._role, self._profiler, self._watch, self._cost = role, profiler, watch, cost

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._role, name)
        if name in FORWARD:
            return self._counted(found, self._cost.forward)
        return self._counted(found, self._cost.update) if name in UPDATE else found

    def _counted(self, method: Callable[..., Any], flops: Callable[[Need], float]) -> Callable[..., Any]:
        def call(batch: Batch, *arguments: Any) -> Any:
            self._watch.flops += flops(Need.of(batch))
            with self._profiler.step(self._watch.step):
                return method(batch, *arguments)

        return call
