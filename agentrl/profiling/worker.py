"""`InstrumentedWorker`: a worker that measures its memory by phase and traces its roles in selected steps."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from agentrl.cluster.dispatch import ONE_TO_ALL, register
from agentrl.cluster.worker import Worker
from agentrl.profiling.memory import PeakMemory
from agentrl.profiling.step import TRAIN
from agentrl.profiling.trace import Profiler

EVERY = range(1, 1 << 62)  # all steps: the controller selects those that are traced
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound="InstrumentedWorker")


def instrumented(
    role: str, phase: str = TRAIN
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Decorate a worker's method as work of `role` in `phase`, to be measured and traced. Goes below `@register`."""

    def mark(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @wraps(method)
        def call(self: W, /, *arguments: P.args, **options: P.kwargs) -> R:
            with self._peaks.phase(phase), self._profiler(role).step(self._recorded):
                return method(self, *arguments, **options)

        return call

    return mark


_NEVER = Profiler(Path(), "")


class InstrumentedWorker(Worker):
    """Base class of workers that are measured; a subclass calls `start_measuring()` once its device is known."""

    def start_measuring(self) -> None:
        """Start to measure memory, without traces until `trace` is called."""
        self._peaks = PeakMemory(self.device)
        self._profilers: dict[str, Profiler] = {}
        self._recorded = 0
        self._folder = Path()

    @register(ONE_TO_ALL)
    def measure(self) -> dict[str, float]:
        """memory/<phase>_gb of this process, in 10^9 bytes, for the phases since the last call."""
        return self._peaks.take()

    @register(ONE_TO_ALL)
    def trace(self, step: int, folder: str) -> None:
        """Trace the roles into `folder` from now on, as step `step`; 0: stop tracing until the next call."""
        self._recorded, self._folder = step, Path(folder)

    def _profiler(self, role: str) -> Profiler:
        """The profiler of a role; it adds to its earlier recordings of the same step."""
        if not self._recorded:
            return _NEVER
        if role not in self._profilers:
            self._profilers[role] = Profiler(self._folder, role, self.rank, EVERY)
        return self._profilers[role]
