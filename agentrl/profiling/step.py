"""`StepProfiler`: what a run measures of its own steps, around the loop's phases and the learner's roles.

A role is wrapped, not changed: each call of it by a batch adds what the batch needs to the step's arithmetic, wherever
the role is. The reward model's calls, made while samples are drawn, are counted and timed by themselves. A role of this
process is recorded here where the recipe wants a trace of the step; those of workers are told of the steps to record,
and asked for their memory, through the workplace.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from agentrl.compute.batch import Batch
from agentrl.compute.flops import Cost, Need, peak_together, utilisation
from agentrl.profiling.memory import PeakMemory
from agentrl.profiling.trace import Profiler

if TYPE_CHECKING:
    from agentrl.learner.learner import Learner
    from agentrl.learner.roles import RoleHost

ROLLOUT, TRAIN, SYNC = "rollout", "train", "sync"
PROFILE = "profile"  # the folder of traces, in that of the run
JUDGE = "reward_model"
FORWARD, UPDATE = ("logprobs", "values", "scores"), ("update",)


class StepProfiler:
    """One for a run. folder: of the traces. steps: those to record. engine: whether that computes in this process, and
    is to be recorded too. most: the run's highest memory/... so far. reward_model: the workplace's, watched."""

    def __init__(self, role_host: "RoleHost", folder: Path, steps: Collection[int] = (), *, engine: bool) -> None:
        self._workplace, self._folder, self._steps = role_host, folder, frozenset(steps)
        self._work = dict(role_host.work)
        judge = self._work.get(JUDGE)
        self._peak = peak_together(work for name, work in self._work.items() if name != JUDGE)
        self._judge_peak = None if judge is None else judge.peak
        self._peaks = PeakMemory(role_host.device)
        self._engine = Profiler(folder, "engine", steps=steps if engine else ())
        self.most: dict[str, float] = {}
        self.step = 0
        self.reward_model = self._watched(role_host.reward_model, JUDGE)
        self._counting = Lock()
        self._flops = self._judged = self._judging = 0.0

    def over(self, learner: "Learner") -> None:
        """Its roles are watched from now on."""
        learner.actor = self._watched(learner.actor, "actor")
        learner.reference = self._watched(learner.reference, "reference")
        learner.critic = self._watched(learner.critic, "critic")

    def count(self, name: str, flops: float, seconds: float) -> None:
        """A call of a role; of the reward model in any thread."""
        if name != JUDGE:
            self._flops += flops
            return
        with self._counting:
            self._judged, self._judging = self._judged + flops, self._judging + seconds

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
        memory/<phase>_<role>_gb of roles in other processes (of the worker that took the most). Of a reward model that
        was asked since the last step, reward_model/tflops and mfu, over time/reward_model_s, what its calls took."""
        memory = {**self._peaks.take(), **self._workplace.measure()}
        for name, value in memory.items():
            self.most[name] = max(value, self.most.get(name, 0.0))
        with self._counting:
            flops, judged, judging = self._flops, self._judged, self._judging
            self._flops = self._judged = self._judging = 0.0
        found = utilisation(flops, seconds, self._peak) | memory
        if judging:
            found |= utilisation(judged, judging, self._judge_peak, JUDGE) | {f"time/{JUDGE}_s": judging}
        return found

    def describe(self) -> str:
        """The most of every phase, in a line; empty before the first step."""
        said = [f"{name.removeprefix('memory/').removesuffix('_gb')} {most:.2f} GB" for name, most in self.most.items()]
        return f"most memory: {', '.join(said)}" if said else ""

    def _watched(self, role: Any, name: str) -> Any:
        """None where there is no such role."""
        if role is None:
            return None
        steps = self._steps if self._workplace.here else ()
        return _Instrumented(role, name, Profiler(self._folder, name, steps=steps), self, self._work[name].cost)


class _Instrumented:
    """A role whose calls by a batch are counted and recorded; all else is the role's own."""

    def __init__(self, role: Any, name: str, profiler: Profiler, watch: StepProfiler, cost: Cost) -> None:
        self._role, self._name, self._profiler, self._watch, self._cost = role, name, profiler, watch, cost

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._role, name)
        if name in FORWARD:
            return self._counted(found, self._cost.forward)
        return self._counted(found, self._cost.update) if name in UPDATE else found

    def _counted(self, method: Callable[..., Any], flops: Callable[[Need], float]) -> Callable[..., Any]:
        def call(batch: Batch, *arguments: Any) -> Any:
            needed, began = flops(Need.of(batch)), perf_counter()
            with self._profiler.step(self._watch.step):
                found = method(batch, *arguments)
            self._watch.count(self._name, needed, perf_counter() - began)
            return found

        return call
