"""A kind of function, and what its arguments are drawn from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from agentrl.plugins.types import Json

Parameters = Mapping[str, Json]


@dataclass(frozen=True)
class Kind:
    """One kind of function to write.

    names: what it may be called; the first is the kind's own. signature: its parameters. asked: what it returns, where
    `{k}` and the like stand for the drawn parameters. body: the reference solution's, indented by nothing.
    draw: the parameters of one task. arguments: those of one test.
    """

    names: tuple[str, ...]
    signature: str
    asked: str
    body: str
    draw: Callable[[Random], dict[str, Json]]
    arguments: Callable[[Random, Parameters], tuple[Json, ...]]

    @property
    def name(self) -> str:
        """The name by which the kind is known."""
        return self.names[0]


def numbers(rng: Random, *near: int, low: int = -20, high: int = 20, most: int = 9) -> list[int]:
    """A list of whole numbers, now and then empty, in which those of `near` (and their neighbours) come
    often."""
    edges = [n + d for n in near for d in (-1, 0, 0, 1)]
    return [rng.choice(edges) if edges and rng.random() < 0.4 else rng.randint(low, high) for _ in _some(rng, most)]


def word(rng: Random, letters: str = "", most: int = 8) -> str:
    """Letters, of which those given come often."""
    every = "abcdefghijklmnopqrstuvwxyz"
    return "".join(
        rng.choice(letters) if letters and rng.random() < 0.4 else rng.choice(every)
        for _ in range(rng.randint(1, most))
    )


def words(rng: Random, letters: str = "", most: int = 6) -> str:
    """Words with single spaces between them, now and then none."""
    return " ".join(word(rng, letters) for _ in _some(rng, most))


def letter(rng: Random) -> str:
    """Draw a letter."""
    return rng.choice("abcdefghijklmnopqrstuvwxyz")


def two_letters(rng: Random) -> dict[str, str]:
    """Draw two different letters, as parameters `a` and `b`."""
    a, b = rng.sample("abcdefghijklmnopqrstuvwxyz", 2)
    return {"a": a, "b": b}


def _some(rng: Random, most: int) -> range:
    return range(0 if rng.random() < 0.1 else rng.randint(1, most))
