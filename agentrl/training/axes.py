"""What the keys of a sweep are given: values, or ranges."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import UserError

_RANGE = re.compile(r"([-+.\deE]+)\.\.([-+.\deE]+)")


@dataclass(frozen=True, slots=True)
class Range:
    """Values between two bounds: whole numbers where both are, by their logarithm where they differ tenfold."""

    low: float
    """The lower bound."""
    high: float
    """The upper bound."""
    whole: bool
    """Whether values are whole numbers."""

    @property
    def logarithmic(self) -> bool:
        """Whether values are spread evenly by their logarithm."""
        return self.low > 0 and self.high >= 10 * self.low

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"

    def drawn(self, rng: random.Random) -> str:
        """A value at random."""
        if self.logarithmic:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        return str(round(value)) if self.whole else f"{value:.4g}"


Axis = Range | tuple[str, ...]
"""What a key is given: a range, or values."""


def split_keys(texts: Sequence[str]) -> tuple[list[str], dict[str, Axis]]:
    """The keys of a sweep that have one value, as they are, and those that have several, or a range.

    `KEY=A,B,C` are values (commas within brackets, braces and quotes are parts of one), `KEY=LOW..HIGH` is a range.
    Raises UserError.
    """
    fixed: list[str] = []
    axes: dict[str, Axis] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UserError(f"{text}: expected KEY=VALUE,VALUE such as train.lr=1e-4,3e-4, or KEY=LOW..HIGH")
        values = _values(value)
        if (bounds := _RANGE.fullmatch(value)) is not None:
            axes[key] = _range(text, bounds[1], bounds[2])
        elif len(values) == 1:
            fixed.append(text)
        elif "" in values or len(set(values)) < len(values):
            raise UserError(f"{text}: a value is empty, or there twice")
        else:
            axes[key] = tuple(values)
    return fixed, axes


def _values(text: str) -> list[str]:
    """The values between commas that are not within brackets, braces or quotes."""
    found, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [value.strip() for value in found]


def _range(text: str, low: str, high: str) -> Range:
    try:
        found = Range(float(low), float(high), not re.search(r"[.eE]", low + high))
    except ValueError as error:
        raise UserError(f"{text}: a range has two numbers, such as 1e-5..1e-3") from error
    if not found.low < found.high or not math.isfinite(found.high - found.low):
        raise UserError(f"{text}: the first bound of a range is below the second")
    return found
