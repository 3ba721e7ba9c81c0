"""An ordinary class, by which `agentrl try object` shows what the environment does with one."""

from random import Random


class Shelf:
    """A shelf on which a book is to be found; its methods are the tools."""

    def reset(self, seed: int = 0) -> str:
        """Hide the book, and say what is to be done."""
        self._place = Random(seed).randrange(1, 9)
        self.reward = 0.0
        return "Somewhere on places 1 to 8 stands a red book. Look for it, then say where it is by calling found."

    def look(self, place: int) -> str:
        """Look at a place of the shelf.

        Args:
            place: its number, from 1 to 8
        """
        return "a red book" if place == self._place else f"nothing; the book is further {self._way(place)}"

    def found(self, place: int) -> str:
        """Say where the book is.

        Args:
            place: its number, from 1 to 8
        """
        self.reward = float(place == self._place)
        return "right" if self.reward else "wrong"

    def _way(self, place: int) -> str:
        return "up" if place < self._place else "down"
