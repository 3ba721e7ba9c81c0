"""The splits as sequences of tasks, each made as it is looked at."""

from collections.abc import Sequence
from typing import overload

from agentrl_envs.text_game.maps import make_map

from agentrl.plugins.types import Task

TRAIN_SIZE = 1_000_000
HELD_OUT_SIZE = 1_000
"""Maps of `train`, more than any run plays, and of each held-out split."""


class Maps(Sequence[Task]):
    """A split of the generator. Train depends on the seed; the held-out splits never do, so that runs compare."""

    def __init__(self, split: str, seed: int) -> None:
        self._split = split
        self._seed = seed if split == "train" else 0
        self._size = TRAIN_SIZE if split == "train" else HELD_OUT_SIZE

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        at = index + self._size if index < 0 else index
        if not 0 <= at < self._size:
            raise IndexError(f"{self._split} has {self._size} maps, asked for {index}")
        world = make_map(self._split, at, self._seed)
        shortest = world.distances()[world.start, False]
        return Task(id=f"{self._split}-{at}", data={"map": world.draw(), "shortest": shortest})
