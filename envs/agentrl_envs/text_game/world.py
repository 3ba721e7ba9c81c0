"""A map as it is drawn, and how far every place is from the goal. Nothing here changes while a game is played.

#######
#.K#..#
#@.D.G#
#######
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

Cell = tuple[int, int]
"""Column and row, from 0 at the north-west corner, the outer wall included."""

Place = tuple[Cell, bool]
"""Where the player stands, and whether it holds the key: all that decides what may follow."""

_MARKS = "@KDG"


class Direction(Enum):
    """Where one move leads; members in the order in which the game names them."""

    NORTH = "north"
    SOUTH = "south"
    EAST = "east"
    WEST = "west"

    def step(self, cell: Cell) -> Cell:
        """The neighbour of `cell` in this direction."""
        dx, dy = _STEPS[self]
        return cell[0] + dx, cell[1] + dy


_STEPS = {Direction.NORTH: (0, -1), Direction.SOUTH: (0, 1), Direction.EAST: (1, 0), Direction.WEST: (-1, 0)}


@dataclass(frozen=True, slots=True)
class World:
    """floor: every cell that is no wall, the door's among them."""

    width: int
    """Columns, walls included."""
    height: int
    """Rows, walls included."""
    floor: frozenset[Cell]
    start: Cell
    """Where the player begins."""
    key: Cell
    """Where the key lies."""
    door: Cell
    """Where the door is."""
    goal: Cell
    """Where the goal is."""

    @classmethod
    def read(cls, drawing: str) -> "World":
        """A map as `draw` writes it. Raises ValueError where it is none."""
        rows = drawing.split("\n")
        cells = {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
        places = {mark: [cell for cell, m in cells.items() if m == mark] for mark in _MARKS}
        if wrong := [mark for mark, found in places.items() if len(found) != 1]:
            raise ValueError(f"a map needs exactly one {wrong[0]!r}, this one has {len(places[wrong[0]])}")
        floor = frozenset(cell for cell, mark in cells.items() if mark != "#")
        return cls(max(map(len, rows)), len(rows), floor, *(places[mark][0] for mark in _MARKS))

    def draw(self, player: Cell | None = None, *, has_key: bool = False, opened: bool = False) -> str:
        """The map as text, with the player at its start or where it stands; a key that was taken, and a door
        that was opened, are floor."""
        marks = {self.goal: "G"}
        if not opened:
            marks[self.door] = "D"
        if not has_key:
            marks[self.key] = "K"
        marks[player or self.start] = "@"
        rows = (
            (marks.get((x, y), "." if (x, y) in self.floor else "#") for x in range(self.width))
            for y in range(self.height)
        )
        return "\n".join("".join(row) for row in rows)

    def moves(self, place: Place) -> Iterator[tuple[Direction, Place]]:
        """What may be done at a place, and where it leads. The door lets nobody through without the key."""
        cell, has_key = place
        for direction in Direction:
            after = direction.step(cell)
            if after in self.floor and (has_key or after != self.door):
                yield direction, (after, has_key or after == self.key)

    def distances(self) -> Mapping[Place, int]:
        """The least number of moves to the goal, from every place that it can be reached from."""
        before: dict[Place, list[Place]] = {}
        for cell in self.floor:
            for has_key in (False, True):
                for _, after in self.moves((cell, has_key)):
                    before.setdefault(after, []).append((cell, has_key))
        return _spread([(self.goal, False), (self.goal, True)], before)


def _spread(ends: Iterable[Place], before: Mapping[Place, list[Place]]) -> dict[Place, int]:
    found = dict.fromkeys(ends, 0)
    waiting = deque(found)
    while waiting:
        place = waiting.popleft()
        for earlier in before.get(place, ()):
            if earlier not in found:
                found[earlier] = found[place] + 1
                waiting.append(earlier)
    return found
