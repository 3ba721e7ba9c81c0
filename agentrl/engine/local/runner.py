"""`Runner`: the contract between the scheduler and a model, which extends many conversations at once, kept in slots."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt to be computed."""

    slot: int
    """The slot."""
    start: int
    """Number of tokens already computed in the slot, which the chunk follows."""
    ids: Ints
    """int64 [n]: the token ids of the piece."""


@dataclass(frozen=True, slots=True)
class Work:
    """The input of one step: one token for each of n rows, and chunks of prompts in other slots.

    Rows that are not active may be computed too, but the state of their slots must not change, and their logits are
    not read.
    """

    ids: Ints
    """int64 [n]: the token of each row."""
    positions: Ints
    """int64 [n]: the position of that token in its slot."""
    active: Bools
    """bool [n]: whether the row decodes in this step."""
    chunks: tuple[Chunk, ...]
    """Chunks, in slots of no active row."""
    slots: Ints | None = None
    """int64 [n]: the slot of each row, for a runner with `any_slots`; None: 0..n-1."""


class Runner(Protocol):
    """A model with slots, each of which holds the computed state of one conversation."""

    token_bytes: int
    """Memory of one token in one slot, in bytes."""

    @property
    def batch_invariant(self) -> bool:
        """Whether the logits of a row are the same to the last bit whatever else is in its steps."""

    @property
    def any_slots(self) -> bool:
        """Whether rows may be of any slots. Where they are of the first ones, those that decode are kept next to each
        other: the gaps between them are computed, too."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def columns(self) -> int:
        """Number of tokens that a slot can hold."""

    def forward(self, work: Work) -> Tensor:
        """Compute one step; return the logits after each row's token and each chunk's last token, float32
        [n + chunks, vocab]."""

    def resize(self, slots: int, columns: int) -> None:
        """Change the number of slots and columns; the state of those that remain is kept."""

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        """Copy the first `columns` tokens of slot source[j] to slot target[j], for all j, as if all at once."""

    def clear(self) -> None:
        """Free the memory of the slots."""

    def experts(self, slot: int, tokens: int) -> npt.NDArray[np.int16] | None:
        """What the routers of a mixture chose for the first `tokens` tokens of the slot, int16
        [tokens, layers, experts a token]; None: that was not recorded."""

    def share(self, processes: int) -> None:
        """Count with so many processes on this machine, each of which has a copy of this runner."""

    def refresh(self) -> None:
        """Drop everything derived from the weights, which have changed."""
