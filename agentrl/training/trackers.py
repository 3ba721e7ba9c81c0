"""`Trackers`: those that a recipe names, beside `metrics.jsonl`, which has everything in any case.

One that cannot start is the user's to mend, before anything is sampled. One that fails later is said in one line and
told nothing more: a run of days does not end with somebody's server.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, described
from agentrl.plugins.exits import contained
from agentrl.plugins.tracker import Tracker


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
                tracker = make()
                tracker.start(folder, recipe)
            except BaseException as error:  # boundary: it is somebody's code, and its server
                raise UserError(f"track.trackers: {name} cannot start: {described(contained(error))}") from error
            stack.callback(self._finish, name, tracker)
            self._told[name] = tracker

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, tracker in list(self._told.items()):
            try:
                tracker.log(step, metrics)
            except BaseException as error:  # noqa: BLE001 - boundary: the run goes on without it
                why = described(contained(error))
                del self._told[name]
                self._say(
                    f"track.trackers: {name} failed at step {step} and is told nothing more: {why} "
                    "(metrics.jsonl has everything)"
                )

    def _finish(self, name: str, tracker: Tracker) -> None:
        try:
            tracker.finish()
        except BaseException as error:  # noqa: BLE001 - boundary: the run has ended, well or with an error of its own
            self._say(f"track.trackers: {name} could not finish: {described(contained(error))}")
