"""`LazyTasks`: a split whose tasks are made as they are looked at, so that it may be long."""

from collections.abc import Callable, Sequence
from typing import overload

from agentrl.plugins.types import Task


class LazyTasks(Sequence[Task]):
    """`size` tasks; `make(index)` makes one, always the same for an index in 0 .. size - 1."""

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._size))]
        at = index + self._size if index < 0 else index
        if not 0 <= at < self._size:
            raise IndexError(f"there are {self._size} tasks, asked for {index}")
        return self._make(at)
