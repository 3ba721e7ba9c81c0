"""`Runner`: a model as the scheduler uses it, which extends many conversations at once and keeps them in slots."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`ids` [n] follow the first `start` tokens of `slot`, whose state is there."""

    slot: int
    start: int
    ids: Ints


@dataclass(frozen=True, slots=True)
class Work:
    """One step. Row r < n is slot r: if active, ids[r] is its token at positions[r]; otherwise the row is passed
    through (whatever it holds must not change) and its logits are not read. Chunks are of slots that are not active."""

    ids: Ints
    positions: Ints
    active: Bools
    chunks: tuple[Chunk, ...]


class Runner(Protocol):
    """Slots hold what was computed; `columns` is how many tokens a slot has room for."""

    token_bytes: int  # memory of one token in one slot

    @property
    def slots(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def forward(self, work: Work) -> Tensor:
        """Logits float32 [n + chunks, vocab] after each row's token and after each chunk's last."""
        ...

    def resize(self, slots: int, columns: int) -> None: ...

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        """The first `columns` tokens of slot target[j] become those of source[j]; read before written."""
        ...

    def clear(self) -> None:
        """Free the slots' memory."""
        ...

    def refresh(self) -> None:
        """The weights changed: whatever was derived from them is stale."""
        ...
