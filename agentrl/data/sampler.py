"""Which tasks come next: a seeded shuffle of each epoch, resumable at any position."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class TaskSampler:
    """Draws indices 0..size-1 without replacement within an epoch; an epoch's order depends on (seed, epoch) alone.

    `excluded` ones are passed over, such as those whose prompt does not fit; the order of the others stays.
    """

    size: int
    """Number of tasks."""
    seed: int
    """Seed of the shuffles."""
    epoch: int = 0
    """Number of epochs that are used up."""
    position: int = 0
    """Number of indices of the epoch's order that are used up."""
    excluded: frozenset[int] = frozenset()
    _order: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.excluded) >= self.size:
            raise ValueError("a sampler needs at least one task")

    def draw(self, count: int) -> list[int]:
        """Return the next `count` indices; goes on into the next epoch where this one ends."""
        drawn: list[int] = []
        while len(drawn) < count:
            order = self._epoch_order()
            part = order[self.position : self.position + count - len(drawn)]
            drawn += [i for i in part.tolist() if i not in self.excluded]
            self.position += len(part)
            if self.position == len(order):
                self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return drawn

    def _epoch_order(self) -> np.ndarray:
        if self._order is None:
            self._order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
        return self._order

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, from `state()` of a sampler of the same size and seed."""
        self.epoch, self.position, self._order = int(state["epoch"]), int(state["position"]), None
