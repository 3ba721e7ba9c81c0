"""A tracker sends a run's metrics somewhere else. `metrics.jsonl` is written in any case."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.plugins.types import Json


class Tracker(ABC):
    """Made with the `args` of the recipe when a run starts; found by the entry-point group `agentrl.trackers`.

    Everything is called in one thread of the tracker's own, and the run does not wait for it: what it is told lies in
    a queue of 256 calls, and at the end of the run all trackers together have 30 seconds. What a method raises is said
    in one line, and this tracker is told nothing more: the run goes on.
    """

    @abstractmethod
    def start(self, folder: Path, recipe: Mapping[str, Json]) -> None:
        """Begin a run; called once, before step 0, and waited for. `recipe` has every key, without secrets: `${VAR}`
        stands as it was written, values of headers, keys and tokens are `***`. What it raises ends the run."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Record a step; called once a step, with the numbers that `metrics.jsonl` gets."""

    def conversations(self, step: int, split: str, samples: Sequence[Mapping[str, Json]]) -> None:  # noqa: B027 - a hook
        """Record some conversations of an evaluation, called before `log` of its step.

        A sample has `task`, `sample`, `data`, `messages`, `tool_uses`, `reward`, `rewards`, `solved`, `finish` and
        more: a record of docs/reference/trajectories.md without tokens.
        """

    def finish(self) -> None:  # noqa: B027 - a hook with a default
        """End; called once, when the run ends, however it ends."""
