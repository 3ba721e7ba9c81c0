"""Which tasks come next: a seeded shuffle of each epoch, resumable at any position."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class TaskSampler:
    """Draws indices 0..size-1 without replacement within an epoch; an epoch's order depends on (seed, epoch) alone.

    `allowed`: the indices that may be drawn (None: all), such as those whose prompt fits the model.
    """

    size: int
    seed: int
    epoch: int = 0
    position: int = 0
    allowed: np.ndarray | None = None
    _order: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.size <= 0 or (self.allowed is not None and len(self.allowed) == 0):
            raise ValueError("a sampler needs at least one task")

    def draw(self, count: int) -> list[int]:
        """The next `count` indices; goes on into the next epoch where this one ends."""
        drawn: list[int] = []
        while len(drawn) < count:
            order = self._epoch_order()
            part = order[self.position : self.position + count - len(drawn)]
            drawn += part.tolist()
            self.position += len(part)
            if self.position == len(order):
                self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return drawn

    def _epoch_order(self) -> np.ndarray:
        if self._order is None:
            indices = np.arange(self.size) if self.allowed is None else self.allowed
            self._order = np.random.default_rng((self.seed, self.epoch)).permutation(indices)
        return self._order

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self._order = int(state["epoch"]), int(state["position"]), None
