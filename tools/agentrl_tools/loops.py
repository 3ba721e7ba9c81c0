"""What belongs to one event loop, such as a connection pool: a run may use several loops, one after another."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One T for each event loop, made when it is first asked for there."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[asyncio.AbstractEventLoop, T] = {}

    def here(self) -> T:
        """The object of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]

    def take(self) -> T | None:
        """Take the object of the running loop, if there is one, and forget it."""
        return self._made.pop(asyncio.get_running_loop(), None)

    def orphans(self) -> list[T]:
        """Those whose loop is closed, which are then forgotten: nothing of theirs can be awaited any more."""
        dead = [loop for loop in self._made if loop.is_closed()]
        return [self._made.pop(loop) for loop in dead]
