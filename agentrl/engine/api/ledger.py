"""`Ledger`: numbers that stand for messages, so that a conversation which an API keeps as messages runs like any other.

The first id of a piece stands for its messages, and fillers follow it, so that lengths count what was generated.
"""

from collections.abc import Sequence
from typing import Any

FILLER = 0


class Ledger:
    """Gives ids to pieces of conversations and finds them again. `forget` what no conversation needs any more."""

    def __init__(self) -> None:
        self._pieces: dict[int, Any] = {}
        self._openings: dict[str, int] = {}
        self._next = FILLER + 1

    def add(self, piece: Any, length: int = 1) -> list[int]:
        """`length` ids, of which the first stands for `piece`."""
        self._pieces[self._next] = piece
        self._next += 1
        return [self._next - 1] + [FILLER] * (length - 1)

    def opening(self, key: str, piece: Any) -> list[int]:
        """Likewise, with equal ids for equal keys: the samples of a task share their opening."""
        if key not in self._openings:
            (self._openings[key],) = self.add(piece)
        return [self._openings[key]]

    def find(self, ids: Sequence[int]) -> list[Any]:
        """The pieces that `ids` stand for, in order."""
        return [self._pieces[i] for i in ids if i != FILLER]

    def forget(self, ids: Sequence[int]) -> None:
        """Drop what `ids` stand for, except openings."""
        kept = set(self._openings.values())
        for i in ids:
            if i not in kept:
                self._pieces.pop(i, None)
