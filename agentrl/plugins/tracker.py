"""A tracker sends a run's metrics somewhere else. `metrics.jsonl` is written in any case."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Tracker(ABC):
    """Made without arguments when a run starts; found by the entry-point group `agentrl.trackers`."""

    @abstractmethod
    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        """Begin a run; called once, before step 0. `recipe` has every key, without secrets: `${VAR}` stands as it was
        written, values of headers, keys and tokens are `***`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step; called once a step, with the object that `metrics.jsonl` gets; the run waits for it. What it
        raises is said in one line, and this tracker is told no further step: the run goes on."""

    def finish(self) -> None:  # noqa: B027 - a hook with a default
        """End; called once, when the run ends, however it ends."""
