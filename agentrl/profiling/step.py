"""`StepProfiler`: FLOPs, memory and traces of a run's steps, measured around the phases of the loop and calls of roles.

Roles are wrapped, not changed, before the learner is built: each call with a batch adds the batch's FLOPs to those of
the step, in whatever process the role runs. Calls of the reward model, which happen during sampling, are counted and
timed separately. Roles of this process are traced here in the steps that the recipe names; workers are told by the role
host which steps to trace, and report their memory through it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from agentrl.compute.batch import Batch
from agentrl.compute.flops import Cost, Workload, peak_together, utilisation
from agentrl.learner.roles import ActorRole, CriticRole, ReferenceRole, RewardModelRole, RoleHost
from agentrl.learner.teacher import TeacherRole
from agentrl.profiling.memory import PeakMemory
from agentrl.profiling.trace import Profiler

ROLLOUT, TRAIN, SYNC = "rollout", "train", "sync"
PROFILE = "profile"
"""Folder of the traces, inside the run folder."""

REWARD_MODEL = "reward_model"
FORWARD, UPDATE = ("logprobs", "entropies", "values", "scores"), ("update",)
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class InstrumentedRoles:
    """The roles of a role host, wrapped so that their calls are counted and traced."""

    actor: ActorRole
    """The policy being trained."""
    reference: ReferenceRole | None
    """The reference policy; None without one."""
    critic: CriticRole | None
    """The critic; None without one."""
    reward_model: RewardModelRole | None
    """The reward model; None without one."""
    teachers: Mapping[int, TeacherRole]
    """The teachers in the trainer's processes, which are not counted."""
    pools: Mapping[str, str]
    """The name of the pool of workers that holds each role."""


class StepProfiler:
    """Profiler of a run's steps. `roles` are the roles of `role_host`, instrumented.

    folder: where the traces are written. steps: the steps to trace. engine: whether the engine computes in this
    process, so that it is traced too.
    """

    def __init__(self, role_host: RoleHost, folder: Path, steps: Collection[int] = (), *, engine: bool) -> None:
        self._role_host, self._folder, self._steps = role_host, folder, frozenset(steps)
        self._work = dict(role_host.role_costs)
        scoring = self._work.get(REWARD_MODEL)
        self._peak_flops = peak_together(work for name, work in self._work.items() if name != REWARD_MODEL)
        self._scoring_peak_flops = None if scoring is None else scoring.peak
        self._memory = PeakMemory(role_host.device)
        self._engine = Profiler(folder, "engine", steps=steps if engine else ())
        self._run_peaks: dict[str, float] = {}
        self.step = 0
        """The step that the last phase belonged to."""
        self._lock = Lock()
        self._flops = self._scoring_flops = self._scoring_seconds = 0.0
        self.roles = InstrumentedRoles(
            self._instrumented(role_host.actor, "actor"),
            self._instrumented(role_host.reference, "reference"),
            self._instrumented(role_host.critic, "critic"),
            self._instrumented(role_host.reward_model, REWARD_MODEL),
            role_host.teachers,
            role_host.pools,
        )

    def count(self, name: str, flops: float, seconds: float) -> None:
        """Add the FLOPs and duration of one call of role `name`, from any thread."""
        with self._lock:
            if name != REWARD_MODEL:
                self._flops += flops
                return
            self._scoring_flops += flops
            self._scoring_seconds += seconds

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Measure the block as phase `name` of step `step`."""
        self.step = step
        recorded = step in self._steps
        with ExitStack() as stack:
            stack.enter_context(self._memory.phase(name))
            if name == ROLLOUT:
                stack.enter_context(self._engine.step(step))
            if recorded:
                self._role_host.trace(step, self._folder)
            yield
            if recorded:
                self._role_host.trace(0, self._folder)

    def take(self, seconds: float) -> dict[str, float]:
        """Take the metrics of a step whose training took `seconds`, and start the next step's.

        train/tflops, train/mfu, memory/<phase>_gb, and memory/<phase>_<role>_gb for roles in other processes (of the
        worker with the largest peak). If the reward model was called: time/reward_model_s, the duration of its calls,
        and reward_model/tflops and reward_model/mfu over that duration.
        """
        memory = {**self._memory.take(), **self._role_host.measure()}
        for name, value in memory.items():
            self._run_peaks[name] = max(value, self._run_peaks.get(name, 0.0))
        with self._lock:
            flops, scoring_flops, scoring_seconds = self._flops, self._scoring_flops, self._scoring_seconds
            self._flops = self._scoring_flops = self._scoring_seconds = 0.0
        found = utilisation(flops, seconds, self._peak_flops) | memory
        if scoring_seconds:
            found |= utilisation(scoring_flops, scoring_seconds, self._scoring_peak_flops, REWARD_MODEL)
            found[f"time/{REWARD_MODEL}_s"] = scoring_seconds
        return found

    def describe(self) -> str:
        """One line with the run's peak memory by phase; an empty string before the first step."""
        peaks = [
            f"{key.removeprefix('memory/').removesuffix('_gb')} {gb:.2f} GB" for key, gb in self._run_peaks.items()
        ]
        return f"peak memory: {', '.join(peaks)}" if peaks else ""

    def _instrumented(self, role: T, name: str) -> T:
        """`role` wrapped, or None if it is None."""
        if role is None:
            return role
        profiler = Profiler(self._folder, name, steps=self._steps if self._role_host.in_process else ())
        return cast(T, _InstrumentedRole(role, name, profiler, self, self._work[name].cost))


class _InstrumentedRole:
    """A role whose calls with a batch are counted and traced; other attributes are those of the role."""

    def __init__(self, role: object, name: str, profiler: Profiler, steps: StepProfiler, cost: Cost) -> None:
        self._role, self._name, self._profiler, self._steps, self._cost = role, name, profiler, steps, cost

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._role, name)
        if name in FORWARD:
            return self._counted(found, self._cost.forward)
        return self._counted(found, self._cost.update) if name in UPDATE else found

    def _counted(
        self, method: Callable[Concatenate[Batch, P], R], flops: Callable[[Workload], float]
    ) -> Callable[Concatenate[Batch, P], R]:
        def call(batch: Batch, /, *arguments: P.args, **options: P.kwargs) -> R:
            needed, began = flops(Workload.of(batch)), perf_counter()
            with self._profiler.step(self._steps.step):
                found = method(batch, *arguments, **options)
            self._steps.count(self._name, needed, perf_counter() - began)
            return found

        return call
