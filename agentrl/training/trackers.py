"""`Trackers`: the experiment trackers that a recipe names, in addition to `metrics.jsonl`, which is always complete.

A tracker that cannot start is an error before anything is sampled. Afterwards the run never waits for one: what it is
told lies in a queue of its own, which a thread of its own empties. One that fails or hangs is said in one line and
switched off; one that is too slow loses rows, which are counted.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from agentrl.containment.threads import DaemonThreads
from agentrl.errors import UserError, contained, describe
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Json, Task
from agentrl.rollout.trajectory_file import record, row
from agentrl.trajectory import Group, Trajectory

SECONDS = 300.0
"""Time limit for a tracker to start, and for each of its calls while the run goes on."""
FLUSH_SECONDS = 30.0
"""Time that all trackers together have at the end of a run, to send what they were told and to finish."""
WAITING = 256
"""Calls that may wait for a tracker; further ones are dropped."""
SAMPLES = 8
"""Conversations of each evaluation that trackers are given."""
_EVERYTHING = "(metrics.jsonl has everything)"


class Trackers:
    """The active trackers of a run. notify: called with one line for each tracker that fails."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._all: list[_Queue] = []
        self._active: list[_Queue] = []

    def __bool__(self) -> bool:
        return bool(self._active)

    def start(
        self, makers: Mapping[str, Callable[[], Tracker]], folder: Path, recipe: Mapping[str, Json], stack: ExitStack
    ) -> None:
        """Start one tracker for each of `makers` (name -> function that makes it); `stack` finishes them.

        Raises UserError if one fails.
        """
        stack.callback(self._finish)
        for name, make in makers.items():
            queue = _Queue(name)
            try:
                queue.start(make, folder, recipe)
            except UserError as error:
                raise UserError(f"track.trackers: {name} cannot start: {error}") from error
            except BaseException as error:  # boundary: a tracker is a plugin, with a server of its own
                raise UserError(f"track.trackers: {name} cannot start: {describe(contained(error))}") from error
            self._all.append(queue)
            self._active.append(queue)

    def log(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Tell every active tracker the metrics of a step; switch off and report those that failed meanwhile."""
        for queue in self._active:
            queue.put(f"step {step}", queue.tracker.log, step, dict(metrics))
        self._report()

    def conversations(self, step: int, split: str, samples: Sequence[Mapping[str, Json]]) -> None:
        """Give every active tracker conversations of an evaluation; see `Tracker.conversations`."""
        for queue in self._active:
            queue.put(f"the conversations of {split}", queue.tracker.conversations, step, split, samples)
        self._report()

    def _report(self) -> None:
        for queue in list(self._active):
            if line := queue.failure():
                self._active.remove(queue)
                self._notify(line)
            elif queue.dropped and not queue.said:
                queue.said = True
                self._notify(f"track.trackers: {queue.name} is too slow: rows are dropped {_EVERYTHING}")

    def _finish(self) -> None:
        """Finish every tracker that does not hang, and say what was not sent."""
        deadline = monotonic() + FLUSH_SECONDS
        self._report()
        for queue in self._all:
            queue.finish()
        for queue in self._all:
            for line in queue.finished(max(0.0, deadline - monotonic()), queue in self._active):
                self._notify(line)
        self._active.clear()


class _Queue:
    """A tracker in a thread of its own, and what it was told and has not taken yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracker: Tracker
        """The tracker, once it is started."""
        self.dropped = 0
        """Number of calls that were dropped."""
        self.said = False
        """Whether that was said."""
        self._thread = DaemonThreads(f"tracker-{name}", 1)
        self._waiting: deque[Future[None]] = deque()
        self._now: tuple[str, float] | None = None  # what it takes, and since when
        self._failed: str | None = None  # at what, and why
        self._hangs = False
        self._last: Future[None] | None = None

    def start(self, make: Callable[[], Tracker], folder: Path, recipe: Mapping[str, Json]) -> None:
        """Make and start it, within SECONDS."""

        def begin() -> None:
            self.tracker = make()
            self.tracker.start(folder, recipe)

        call = self._thread.submit(begin)
        try:
            call.result(SECONDS)
        except TimeoutError:
            if call.done():  # the tracker itself raised TimeoutError
                raise
            call.cancel()
            raise TimeoutError(f"no answer within {SECONDS:g} s") from None

    def put(self, what: str, function: Callable[..., None], *args: object) -> None:
        """Let it call `function` once it has done what it was told before; drop that where too much waits."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if len(self._waiting) >= WAITING:
            self.dropped += 1
        elif self._failed is None and not self._hangs:
            self._waiting.append(self._thread.submit(self._take, what, function, *args))

    def _take(self, what: str, function: Callable[..., None], *args: object) -> None:
        if self._failed is not None:
            return
        self._now = what, monotonic()
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - boundary: the run goes on without it
            self._failed = f"{what} and is switched off: {describe(contained(error))}"
        finally:
            self._now = None

    def failure(self) -> str | None:
        """A line where it failed, or takes longer than SECONDS; None while it is well."""
        now = self._now
        if self._failed is None and now is not None and monotonic() - now[1] > SECONDS:
            self._leave(now[0], SECONDS)
        return None if self._failed is None else f"track.trackers: {self.name} failed at {self._failed} {_EVERYTHING}"

    def _leave(self, what: str, seconds: float) -> None:
        """Abandon the call that it makes, and what waits for it."""
        self._hangs = True
        left = sum(not call.done() for call in self._waiting) - 1
        more = f"; {left} more were not sent" if left > 0 else ""
        self._failed = f"{what} and is switched off: TimeoutError: no answer within {seconds:g} s{more}"
        for call in reversed(self._waiting):
            call.cancel()

    def finish(self) -> None:
        """Let it finish once it has done what it was told, unless it hangs."""
        if not self._hangs:
            self._last = self._thread.submit(self.tracker.finish)

    def finished(self, seconds: float, active: bool) -> list[str]:
        """Wait so long until it has finished; return lines about what went wrong. active: whether it was well until
        now."""
        lines = []
        if self._last is not None:
            wait([self._last], seconds)
            now = self._now
            if not self._last.done() and now is not None:
                self._leave(now[0], FLUSH_SECONDS)
            if active and (line := self.failure()):
                lines.append(line)
            if not self._last.done():
                if not self._hangs:
                    lines.append(f"track.trackers: {self.name} could not finish within {FLUSH_SECONDS:g} s")
                self._last.cancel()
            elif (error := self._last.exception()) is not None:
                lines.append(f"track.trackers: {self.name} could not finish: {describe(contained(error))}")
        if self.dropped:
            lines.append(f"track.trackers: {self.name} was too slow: {self.dropped} rows were dropped {_EVERYTHING}")
        self._thread.shutdown()
        return lines


def samples_of(
    groups: Sequence[Group],
    solved: Callable[[Trajectory], bool],
    environment: Callable[[Task], str],
) -> list[dict[str, Json]]:
    """At most SAMPLES conversations of an evaluation for trackers, half of them unsolved where there are as
    many: the first sample of each task, in the order of the tasks, so that evaluations show the same ones."""
    first = [group.trajectories[0] for group in groups if group.trajectories]
    wrong = [t for t in first if not solved(t)]
    right = [t for t in first if solved(t)]
    half = SAMPLES // 2
    chosen = wrong[: max(half, SAMPLES - len(right))] + right[: max(half, SAMPLES - len(wrong))]
    return [record(row(t, environment=environment(t.task), solved=solved(t))) for t in chosen]
