"""The game: a square of cells with gems and a player on it, drawn as a picture."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Cell = tuple[int, int]
"""Column from the west, row from the north."""

COLORS: Mapping[str, tuple[int, int, int]] = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 230)}
"""Of the gems, as RGB."""
MOVES: Mapping[str, Cell] = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
CELL = 16
"""Pixels of a cell's side."""
_FLOOR, _LINE, _PLAYER = (245, 240, 225), (190, 185, 170), (20, 20, 20)


@dataclass(slots=True)
class Game:
    """A game as it stands."""

    size: int
    """Cells of a side."""
    player: Cell
    """Where the player is."""
    gems: dict[Cell, str]
    """The color of the gem that lies in a cell."""
    wanted: str
    """The color of the gem to pick up."""
    left: int = 0
    """Turns that may still be used."""
    taken: str | None = None
    """The color that was picked up; "" for none at all."""

    @classmethod
    def draft(cls, rng: Random, size: int, gems: int) -> "Game":
        """A game of gems of different colors, none of them under the player."""
        cells = [(x, y) for x in range(size) for y in range(size)]
        player, *places = rng.sample(cells, gems + 1)
        colors = rng.sample(sorted(COLORS), gems)
        game = cls(size, player, dict(zip(places, colors, strict=True)), rng.choice(colors))
        game.left = 2 * game.distance + 2
        return game

    @property
    def target(self) -> Cell:
        """Where the gem lies that is wanted."""
        return next(cell for cell, color in self.gems.items() if color == self.wanted)

    @property
    def distance(self) -> int:
        """Moves of the shortest way to it."""
        return abs(self.player[0] - self.target[0]) + abs(self.player[1] - self.target[1])

    @property
    def won(self) -> bool:
        """Whether the right gem was picked up."""
        return self.taken == self.wanted

    @property
    def over(self) -> bool:
        """Whether a gem was picked up, or no turn is left."""
        return self.taken is not None or self.left <= 0

    def move(self, to: str) -> bool:
        """Move one step; return whether the player could."""
        self.left -= 1
        x, y = self.player[0] + MOVES[to][0], self.player[1] + MOVES[to][1]
        if not (0 <= x < self.size and 0 <= y < self.size):
            return False
        self.player = x, y
        return True

    def pick_up(self) -> str:
        """Pick up what lies here, which ends the game; return what is said."""
        self.left -= 1
        self.taken = self.gems.get(self.player, "")
        return f"You have the {self.taken} gem." if self.taken else "Nothing lies here."

    def best(self) -> list[str]:
        """The moves that come nearer to the gem that is wanted; none where the player stands on it."""
        across, down = self.target[0] - self.player[0], self.target[1] - self.player[1]
        return [to for to, (x, y) in MOVES.items() if (x and x * across > 0) or (y and y * down > 0)]

    def picture(self, blank: bool = False) -> "Image":
        """Draw it; a blank picture shows the floor alone."""
        return _drawn(self.size, None if blank else self.player, () if blank else tuple(sorted(self.gems.items())))

    @property
    def held_out(self) -> bool:
        """Whether games that begin like this one are never trained on: a hash of the beginning decides."""
        said = repr((self.size, self.player, sorted(self.gems.items()), self.wanted))
        return hashlib.sha256(said.encode()).digest()[0] < 32


def named(cell: Cell) -> str:
    """The name of a cell: a letter for the column, a number for the row, as on a chessboard seen from above."""
    return f"{chr(ord('a') + cell[0])}{cell[1] + 1}"


@lru_cache(4096)
def _drawn(size: int, player: Cell | None, gems: tuple[tuple[Cell, str], ...]) -> "Image":
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size * CELL, size * CELL), _FLOOR)
    draw = ImageDraw.Draw(image)
    for at in range(0, size * CELL, CELL):
        draw.line((at, 0, at, size * CELL), _LINE)
        draw.line((0, at, size * CELL, at), _LINE)
    for (x, y), color in gems:
        draw.rectangle((x * CELL + 2, y * CELL + 2, x * CELL + CELL - 2, y * CELL + CELL - 2), COLORS[color])
    if player is not None:
        x, y = player[0] * CELL, player[1] * CELL
        draw.ellipse((x + 5, y + 5, x + CELL - 5, y + CELL - 5), _PLAYER)
    return image
