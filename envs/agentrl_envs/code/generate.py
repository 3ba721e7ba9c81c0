"""Any task of any split by its index: `problem(split, index, seed)` depends on nothing else.

`train` and `test` share no (kind, parameters): a hash of them decides on which side they fall. `validation` has
those of the held-out side that `test` leaves; a kind that has none left is not in it.
"""

import copy
import hashlib
import textwrap
from dataclasses import dataclass
from functools import cache
from random import Random

from agentrl.plugins.types import Json
from agentrl_envs.code.kinds import KINDS, UNSEEN, Kind
from agentrl_envs.code.kinds.kind import Parameters

SPLITS = ("train", "test", "kinds", "validation")
"""test, validation: parameters never seen in training; kinds: kinds of functions never seen."""

HELD_OUT_SIZE = 1_000
"""Problems of each held-out split."""
TESTS = 8
_DISTINCT = 3  # results, so that no constant passes
_HELD_OUT = 64  # of 256
_ATTEMPTS = 10

Test = tuple[tuple[Json, ...], Json]
"""The arguments of a call, and its result."""


@dataclass(frozen=True)
class Problem:
    """text: what is asked. entry_point: the function's name. reference: a solution."""

    kind: str
    """Name of the kind of function."""
    text: str
    entry_point: str
    reference: str
    tests: tuple[Test, ...]
    """Calls and their results."""


def problem(split: str, index: int, seed: int = 0) -> Problem:
    """The problem at `index` (0 or more) of a split. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    rng = Random(f"code/{seed}/{split}/{index}")
    while True:
        made = _made(split, rng)
        if split != "validation" or _function(made) not in _tested():
            return made


@cache
def _tested() -> frozenset[tuple[str, str]]:
    return frozenset(_function(problem("test", index)) for index in range(HELD_OUT_SIZE))


def _function(made: Problem) -> tuple[str, str]:
    """What is to be computed: kind and body, whatever the function is called."""
    return made.kind, made.reference.partition("\n")[2]


def _made(split: str, rng: Random) -> Problem:
    kind = rng.choice(UNSEEN if split == "kinds" else KINDS)
    name = rng.choice(kind.names)
    while True:
        parameters = _parameters(kind, rng, split)
        body = textwrap.indent(kind.body.format(**parameters), "    ")
        reference = f"def {name}({kind.signature}):\n{body}"
        if tests := _tests(kind, parameters, reference, name, rng):
            asked = kind.asked.format(**parameters)
            text = f"Write a Python function {name}({kind.signature}) that returns {asked}."
            return Problem(kind.name, text, name, reference, tests)


def is_held_out(kind: str, parameters: Parameters) -> bool:
    """Whether these parameters belong to the held-out side of a kind."""
    text = f"{kind}:" + ",".join(f"{name}={parameters[name]}" for name in sorted(parameters))
    return hashlib.sha256(text.encode()).digest()[0] < _HELD_OUT


def _parameters(kind: Kind, rng: Random, split: str) -> dict[str, Json]:
    while True:
        drawn = kind.draw(rng)
        if split == "kinds" or is_held_out(kind.name, drawn) == (split != "train"):
            return drawn


def _tests(kind: Kind, parameters: Parameters, reference: str, name: str, rng: Random) -> tuple[Test, ...]:
    """`TESTS` calls that differ, with results of which some differ; none where they will not."""
    names: dict[str, Json] = {}
    exec(reference, names)  # our own text, with drawn numbers and letters in it
    for _ in range(_ATTEMPTS):
        made: dict[str, Test] = {}
        for _ in range(TESTS * _ATTEMPTS):
            arguments = kind.arguments(rng, parameters)
            made[repr(arguments)] = arguments, names[name](*copy.deepcopy(arguments))
            if len(made) == TESTS:
                break
        if len(made) == TESTS and len({repr(result) for _, result in made.values()}) >= _DISTINCT:
            return tuple(made.values())
    return ()
