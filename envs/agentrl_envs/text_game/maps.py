"""A seeded generator of maps: any map of any split, by its index, the same everywhere.

Every map can be solved, and only with the key: two rooms, a wall between them with one door, the key and the player on
one side, the goal on the other. `train` and `test` share no map: a hash of the drawing decides on which side it falls.
`validation` has maps of the held-out side that are not in `test`.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from random import Random

from agentrl.plugins.types import Task
from agentrl_envs.text_game.world import Cell, World

SPLITS = ("train", "test", "large", "validation")
"""test, validation: maps never seen; large: maps larger than any of training."""

HELD_OUT_SIZE = 1_000
"""Maps of each held-out split."""
_HELD_OUT_SHARE = 32  # of 256
_PILLARS = 6  # cells of a room for one wall in it, at most


@dataclass(frozen=True)
class _Sizes:
    """Inner lengths of a room, in cells, both ends included: along the way from room to room, and across it. longest:
    moves of the shortest way at most, so that a game fits a small context."""

    along: tuple[int, int]
    across: tuple[int, int]
    longest: int


_SMALL, _LARGE = _Sizes((2, 3), (2, 3), 10), _Sizes((3, 4), (4, 5), 16)


def make_map(split: str, index: int, seed: int = 0) -> World:
    """The map at `index` (0 or more) of a split."""
    rng = Random(f"text_game/{seed}/{split}/{index}")
    sizes = _LARGE if split == "large" else _SMALL
    while True:
        world = _draft(rng, sizes)
        if split != "large" and is_held_out(world) == (split == "train"):
            continue
        if split == "validation" and world.draw() in _tested():
            continue
        if world.distances().get((world.start, False), sizes.longest + 1) <= sizes.longest:
            return world


@cache
def _tested() -> frozenset[str]:
    return frozenset(make_map("test", index).draw() for index in range(HELD_OUT_SIZE))


def is_held_out(world: World) -> bool:
    """Whether a map is one of those that are never trained on."""
    return hashlib.sha256(world.draw().encode()).digest()[0] < _HELD_OUT_SHARE


def _draft(rng: Random, sizes: _Sizes) -> World:
    """Draft two rooms from west to east, then perhaps turned around or over."""
    first, second = rng.randint(*sizes.along), rng.randint(*sizes.along)
    across = rng.randint(*sizes.across)
    wall = first + 1
    here = _room(rng, range(1, wall), across)
    there = _room(rng, range(wall + 1, wall + 1 + second), across)
    door = wall, rng.randint(1, across)
    start, key = rng.sample(here, 2)
    goal = rng.choice(there)
    cells = {"floor": [*here, *there, door], "start": [start], "key": [key], "door": [door], "goal": [goal]}
    width, height = first + second + 3, across + 2
    if rng.random() < 0.5:
        cells = {name: [(width - 1 - x, y) for x, y in places] for name, places in cells.items()}
    if rng.random() < 0.5:
        cells = {name: [(y, x) for x, y in places] for name, places in cells.items()}
        width, height = height, width
    floor = frozenset(cells.pop("floor"))
    return World(width, height, floor, **{name: places[0] for name, places in cells.items()})


def _room(rng: Random, columns: range, across: int) -> list[Cell]:
    """The floor of a room with a few walls in it."""
    cells = [(x, y) for x in columns for y in range(1, across + 1)]
    pillars = set(rng.sample(cells, rng.randint(0, len(cells) // _PILLARS)))
    return [cell for cell in cells if cell not in pillars]


TRAIN_SIZE = 1_000_000
"""Maps of `train`, more than any run plays."""


def task(split: str, index: int, seed: int) -> Task:
    """The task of a map; see `make_map`."""
    world = make_map(split, index, seed)
    shortest = world.distances()[world.start, False]
    return Task(id=f"{split}-{index}", data={"map": world.draw(), "shortest": shortest})
