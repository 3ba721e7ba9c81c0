"""Any problem of any split by its index: `problem(split, index, seed)` depends on nothing else.

`train` and the held-out splits share no (kind, numbers): a hash of them decides on which side they fall. `validation`
shares none with the others either.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache

from agentrl_envs.gsm8k.problems import buying, comparing, counting, rates, sharing
from agentrl_envs.gsm8k.problems.draw import Draw
from agentrl_envs.gsm8k.problems.expression import Expression, parse, steps
from agentrl_envs.gsm8k.problems.grammar import Kind, expand
from agentrl_envs.gsm8k.problems.words import fillers

KINDS: tuple[Kind, ...] = (*buying.KINDS, *comparing.KINDS, *sharing.KINDS, *rates.KINDS, *counting.KINDS)
SPLITS = ("train", "test", "phrasing", "large", "validation")
"""test, validation: fresh numbers; phrasing: fresh numbers and a clause never seen; large: numbers above those of
training."""

HELD_OUT_SIZE = 1_000
"""Problems of each held-out split."""
_HELD_OUT_SHARE = 32  # of 256


@dataclass(frozen=True)
class Problem:
    """steps: one operation each, as `(("12*7", 84), ...)`; the last result is the answer. numbers: by name."""

    question: str
    """The text of the problem."""
    expression: Expression
    """The formula with its numbers."""
    steps: tuple[tuple[str, int], ...]
    answer: int
    """The result of the last step."""
    kind: str
    """Name of the kind of problem."""
    numbers: tuple[tuple[str, int], ...]


def problem(split: str, index: int, seed: int = 0) -> Problem:
    """The problem at `index` (0 or more) of a split. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    draw = Draw(f"gsm8k/{seed}/{split}/{index}", large=split == "large")
    kind, numbers = _drawn(draw, split)
    text = expand(kind.grammar, draw, held_out=split == "phrasing")
    tree = parse(kind.formula, numbers)
    done = steps(tree)
    question = _sentence(text.format_map(fillers(draw, numbers)))
    return Problem(question, tree, done, done[-1][1], kind.name, tuple(numbers.items()))


def _drawn(draw: Draw, split: str) -> tuple[Kind, dict[str, int]]:
    while True:
        kind = draw.pick(KINDS)
        numbers = _numbers(kind, draw, split)
        if split != "validation" or (kind.name, *numbers.items()) not in _asked():
            return kind, numbers


@cache
def _asked() -> frozenset[tuple[object, ...]]:
    """Kinds and numbers of `test` and `phrasing`, which are of the same numbers as `validation`."""
    places = [f"gsm8k/0/{split}/{index}" for split in ("test", "phrasing") for index in range(HELD_OUT_SIZE)]
    drawn = [_drawn(Draw(place), "test") for place in places]
    return frozenset((kind.name, *numbers.items()) for kind, numbers in drawn)


def _numbers(kind: Kind, draw: Draw, split: str) -> dict[str, int]:
    while True:
        numbers = kind.draw(draw)
        if split == "large" or is_held_out(kind.name, numbers) == (split != "train"):
            return numbers


def is_held_out(kind: str, numbers: dict[str, int]) -> bool:
    """Whether these numbers belong to the held-out side of a kind."""
    text = f"{kind}:" + ",".join(f"{name}={numbers[name]}" for name in sorted(numbers))
    return hashlib.sha256(text.encode()).digest()[0] < _HELD_OUT_SHARE


def _sentence(text: str) -> str:
    text = text.replace(" a hour", " an hour")
    return re.sub(r"(^|[.?!] )([a-z])", lambda m: m[1] + m[2].upper(), text)
