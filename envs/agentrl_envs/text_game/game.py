"""One game while it is played: a move or a wasted turn in, what the player reads and what it is worth out.

The step reward is shaped by a potential (Ng, Harada and Russell 1999, with gamma = 1): the potential of a place is the
share of the shortest way that lies behind it, and a move is worth the difference. Over a game the differences add up to
the progress that was made, at most 1 whatever the detours, so walking back and forth earns nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl_envs.text_game.world import Cell, Direction, World

View = Callable[["Game"], str]
"""What a player is told of where it stands."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a turn. progress: shares of the shortest way, less than 0 for a step back. legal: it was a move
    that the map allows."""

    text: str
    """What the player reads."""
    progress: float = 0.0
    legal: bool = True
    over: bool = False
    """True where the game has ended."""


@dataclass(slots=True)
class Game:
    """limit: turns that may be used, wasted ones included. used: so many were. opened: the door was gone through."""

    world: World
    """The map."""
    view: View
    """Draws or describes the game for the player."""
    limit: int = 0
    used: int = 0
    position: Cell = (0, 0)
    """Column and row of the player."""
    has_key: bool = False
    """True once the key was taken."""
    opened: bool = False
    distance: dict[tuple[Cell, bool], int] = field(default_factory=dict)
    """Moves to the goal by place and whether the key was taken."""

    @classmethod
    def begin(cls, world: World, view: View, slack: float) -> "Game":
        """A game at its start. slack: turns allowed for each move of the shortest way; one more is given."""
        distance = dict(world.distances())
        limit = math.ceil(slack * distance[world.start, False]) + 1
        return cls(world, view, limit, position=world.start, distance=distance)

    @property
    def shortest(self) -> int:
        """Moves from the start to the goal at the least."""
        return self.distance[self.world.start, False]

    @property
    def left(self) -> int:
        """Moves from here to the goal at the least."""
        return self.distance[self.position, self.has_key]

    @property
    def won(self) -> bool:
        """True where the goal is reached."""
        return self.position == self.world.goal

    @property
    def over(self) -> bool:
        """True where the game is won, or all turns are used."""
        return self.won or self.used >= self.limit

    @property
    def target(self) -> tuple[str, Cell]:
        """What is to be reached next: its name and where it is."""
        if not self.has_key:
            return "Key", self.world.key
        return ("Goal", self.world.goal) if self.opened else ("Door", self.world.door)

    def open_ways(self) -> list[Direction]:
        """The directions of all legal moves."""
        return [direction for direction, _ in self.world.moves((self.position, self.has_key))]

    def best_ways(self) -> list[Direction]:
        """The first moves of all shortest ways from here."""
        ways = self.world.moves((self.position, self.has_key))
        return [direction for direction, after in ways if self.distance[after] < self.left]

    def move(self, direction: Direction) -> Outcome:
        """Use a turn for a move, which may be one that the map does not allow."""
        if self.over:
            return Outcome("The game is over.", legal=False, over=True)
        after = dict(self.world.moves((self.position, self.has_key))).get(direction)
        if after is None:
            locked = direction.step(self.position) == self.world.door
            return self.waste("The door is locked." if locked else "There is a wall.")
        before, found_key, self.used = self.left, after[1] and not self.has_key, self.used + 1
        self.position, self.has_key = after
        said = "You have the key." if found_key else ""
        if self.position == self.world.door and not self.opened:
            self.opened, said = True, "The door opens."
        return self._outcome(said, (before - self.left) / self.shortest, legal=True)

    def waste(self, why: str) -> Outcome:
        """Use a turn for nothing, and say why."""
        if self.over:
            return Outcome("The game is over.", legal=False, over=True)
        self.used += 1
        return self._outcome(why, 0.0, legal=False)

    def _outcome(self, said: str, progress: float, *, legal: bool) -> Outcome:
        if self.won:
            return Outcome("You reach the goal.", progress, legal, over=True)
        where = "No moves are left." if self.over else self.view(self)
        between = "\n" if "\n" in where else " "
        return Outcome(f"{said}{between}{where}" if said else where, progress, legal, self.over)


def compass(game: Game) -> str:
    """Describe in words how far the next target is, and which ways are open."""
    name, (x, y) = game.target
    dx, dy = x - game.position[0], y - game.position[1]
    steps = [(-dy, Direction.NORTH), (dy, Direction.SOUTH), (dx, Direction.EAST), (-dx, Direction.WEST)]
    way = ", ".join(f"{far} {direction.value}" for far, direction in steps if far > 0)
    return f"{name}: {way}. Open: {', '.join(d.value for d in game.open_ways())}."


def drawn(game: Game) -> str:
    """The map: # wall, @ the player, K key, D door, G goal."""
    return game.world.draw(game.position, has_key=game.has_key, opened=game.opened)


VIEWS: dict[str, View] = {"compass": compass, "map": drawn}
