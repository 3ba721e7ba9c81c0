"""`Trackers`: those that a recipe names, beside `metrics.jsonl`, which has everything in any case.

One that cannot start is the user's to mend, before anything is sampled. One that fails later is said in one line and
told nothing more: a run of days does not end with somebody's server.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, contained, describe
from agentrl.plugins.tracker import Tracker
from agentrl.threads import DaemonThreads

SECONDS = 300.0
"""What a tracker may take to start, to take a step's metrics, or to finish."""


class Trackers:
    """say: told in a line of one that fails."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: dict[str, Tracker] = {}

    def start(
        self, makers: Mapping[str, Callable[[], Tracker]], folder: Path, recipe: Mapping[str, Any], stack: ExitStack
    ) -> None:
        """makers: by the names of the recipe. stack: gets what finishes each. Raises UserError for one that raises."""
        for name, make in makers.items():
            try:
                tracker = _Bounded(name, make)
                tracker.start(folder, recipe)
            except BaseException as error:  # boundary: it is somebody's code, and its server
                raise UserError(f"track.trackers: {name} cannot start: {describe(contained(error))}") from error
            stack.callback(self._finish, name, tracker)
            self._told[name] = tracker

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, tracker in list(self._told.items()):
            try:
                tracker.log(step, metrics)
            except BaseException as error:  # noqa: BLE001 - boundary: the run goes on without it
                why = describe(contained(error))
                del self._told[name]
                self._say(
                    f"track.trackers: {name} failed at step {step} and is told nothing more: {why} "
                    "(metrics.jsonl has everything)"
                )

    def _finish(self, name: str, tracker: Tracker) -> None:
        try:
            tracker.finish()
        except BaseException as error:  # noqa: BLE001 - boundary: the run has ended, well or with an error of its own
            self._say(f"track.trackers: {name} could not finish: {describe(contained(error))}")


class _Bounded(Tracker):
    """A tracker in a thread of its own, where all that it does is done, so that one that hangs has failed."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._thread = DaemonThreads(f"tracker-{name}", 1)
        self._lost = False
        self._tracker: Tracker = self._call(make)

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._call(self._tracker.start, folder, recipe)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._call(self._tracker.log, step, metrics)

    def finish(self) -> None:
        """Nothing where it hangs already, which has been said."""
        try:
            if not self._lost:
                self._call(self._tracker.finish)
        finally:
            self._thread.shutdown()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        call = self._thread.submit(function, *args)
        try:
            return call.result(SECONDS)
        except TimeoutError:
            if call.done():  # its own
                raise
            self._lost = True
            call.cancel()
            raise TimeoutError(f"it does not answer within {SECONDS:g} s") from None
