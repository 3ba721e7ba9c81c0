"""Random choices that are the same in every process and every version of Python.

Only `Random.random()` over a string seed is used: Python promises that both stay as they are, and promises it of no
other method.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of choices. `large` moves the two ranges that numbers are drawn from above those of training."""

    def __init__(self, seed: str, large: bool = False) -> None:
        self._random = Random(seed).random
        self._large = large

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included; `low` when the range is empty."""
        return low + int(self._random() * (max(high, low) - low + 1))

    def small(self) -> int:
        """A count or a price."""
        return self.between(13, 20) if self._large else self.between(2, 12)

    def medium(self) -> int:
        """A stock, a sum or an amount a day."""
        return self.between(130, 300) if self._large else self.between(10, 120)

    def spare(self) -> int:
        """What is left over after something else: keeps a derived number from being exactly used up."""
        return self.between(70, 200) if self._large else self.between(1, 60)

    def pick(self, options: Sequence[T]) -> T:
        """Draw one of `options`."""
        return options[self.between(0, len(options) - 1)]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different ones, in random order."""
        pool = list(options)
        return [pool.pop(self.between(0, len(pool) - 1)) for _ in range(count)]

    def flip(self) -> bool:
        """Draw True or False, each half of the time."""
        return self._random() < 0.5
