"""`Trackers`: the experiment trackers that a recipe names, in addition to `metrics.jsonl`, which is always complete.

A tracker that cannot start is an error before anything is sampled. A tracker that fails later is reported in one line
and switched off: a failing tracking server does not end a run.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, contained, describe
from agentrl.plugins.tracker import Tracker
from agentrl.threads import DaemonThreads

SECONDS = 300.0
"""Time limit for a tracker to start, to log the metrics of a step, or to finish."""


class Trackers:
    """The active trackers of a run. notify: called with one line for each tracker that fails."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._active: dict[str, Tracker] = {}

    def start(
        self, makers: Mapping[str, Callable[[], Tracker]], folder: Path, recipe: Mapping[str, Any], stack: ExitStack
    ) -> None:
        """Start one tracker for each of `makers` (name -> function that makes it); `stack` finishes them.

        Raises UserError if one fails.
        """
        for name, make in makers.items():
            try:
                tracker = _TimeLimited(name, make)
                tracker.start(folder, recipe)
            except BaseException as error:  # boundary: a tracker is a plugin, with a server of its own
                raise UserError(f"track.trackers: {name} cannot start: {describe(contained(error))}") from error
            stack.callback(self._finish, name, tracker)
            self._active[name] = tracker

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a step to every active tracker; switch off and report one that fails."""
        for name, tracker in list(self._active.items()):
            try:
                tracker.log(step, metrics)
            except BaseException as error:  # noqa: BLE001 - boundary: the run goes on without it
                why = describe(contained(error))
                del self._active[name]
                self._notify(
                    f"track.trackers: {name} failed at step {step} and is switched off: {why} "
                    "(metrics.jsonl has everything)"
                )

    def _finish(self, name: str, tracker: Tracker) -> None:
        try:
            tracker.finish()
        except BaseException as error:  # noqa: BLE001 - boundary: the run has ended; its own error comes first
            self._notify(f"track.trackers: {name} could not finish: {describe(contained(error))}")


class _TimeLimited(Tracker):
    """A tracker in a thread of its own, where a call that takes longer than SECONDS fails."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._thread = DaemonThreads(f"tracker-{name}", 1)
        self._hangs = False
        self._tracker: Tracker = self._call(make)

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._call(self._tracker.start, folder, recipe)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._call(self._tracker.log, step, metrics)

    def finish(self) -> None:
        """Finish the tracker, unless an earlier call hangs, which has been reported."""
        try:
            if not self._hangs:
                self._call(self._tracker.finish)
        finally:
            self._thread.shutdown()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        call = self._thread.submit(function, *args)
        try:
            return call.result(SECONDS)
        except TimeoutError:
            if call.done():  # the tracker itself raised TimeoutError
                raise
            self._hangs = True
            call.cancel()
            raise TimeoutError(f"no answer within {SECONDS:g} s") from None
