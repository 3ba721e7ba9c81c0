"""`SlotCache`: keys and values of many conversations, one slot each, all slots with the same number of columns.

Invariant: every number is finite, even where no token was written, because masks are added to scores. The last column
of a slot is scratch space: rows that are not active in a step write there.
"""

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def machine_bytes() -> int:
    """The size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SlotCache:
    """Keys and values by layer and slot; each buffer is allocated when its layer is first used."""

    def __init__(self) -> None:
        self.slots = 0
        """Number of slots."""
        self.columns = 0
        """Number of tokens that a slot can hold."""
        self.keys: list[Tensor | None] = []
        """Keys of each layer: [slots, kv_heads, columns + 1, D]; None: not allocated."""
        self.values: list[Tensor | None] = []
        """Values of each layer: [slots, kv_heads, columns + 1, D]; None: not allocated."""
        self.experts: list[Tensor | None] = [None]
        """What the routers chose for each token: int16 [slots, 1, columns + 1, layers * experts a token]; None: that is
        not recorded."""

    def layer(self, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of layer i. k, v: [N, kv_heads, D], the shape, dtype and device of new buffers."""
        while len(self.keys) <= i:
            self.keys.append(None)
            self.values.append(None)
        keys, values = self.keys[i], self.values[i]
        if keys is None or values is None:
            keys = self.keys[i] = k.new_zeros(self.slots, k.shape[1], self.columns + 1, k.shape[2])
            values = self.values[i] = v.new_zeros(self.slots, v.shape[1], self.columns + 1, v.shape[2])
        return keys, values

    def resize(self, slots: int, columns: int) -> None:
        """Change the number of slots and columns; the contents of those that remain are kept."""
        s, c = min(slots, self.slots), min(columns, self.columns)
        self.slots, self.columns = slots, columns
        for buffers in (self.keys, self.values, self.experts):
            for i, old in enumerate(buffers):
                if old is not None:
                    new = old.new_zeros(slots, old.shape[1], columns + 1, old.shape[3])
                    new[:s, :, :c] = old[:s, :, :c]
                    buffers[i] = new

    def copy(self, source: Sequence[int], target: Sequence[int], columns: int) -> None:
        """Copy the first `columns` tokens of slot source[j] to slot target[j], for all j as if at once."""
        for buffer in (*self.keys, *self.values, *self.experts):
            if buffer is not None:
                src = torch.tensor(source, device=buffer.device)
                dst = torch.tensor(target, device=buffer.device)
                view = buffer[:, :, :columns]
                view.index_copy_(0, dst, view.index_select(0, src))

    def clear(self) -> None:
        """Free the memory; the numbers of slots and columns stay the same."""
        self.keys, self.values, self.experts = [], [], [None]


class CachedRunner:
    """Base class of runners with a `SlotCache`: the methods of `Runner` about slots."""

    def __init__(self) -> None:
        self.cache = SlotCache()
        """Keys and values of the slots."""

    @property
    def batch_invariant(self) -> bool:
        return False

    @property
    def any_slots(self) -> bool:
        return False

    @property
    def slots(self) -> int:
        return self.cache.slots

    @property
    def columns(self) -> int:
        return self.cache.columns

    def resize(self, slots: int, columns: int) -> None:
        self.cache.resize(slots, columns)

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        with torch.inference_mode():
            self.cache.copy(source, target, columns)

    def share(self, processes: int) -> None:
        """Do nothing: slots take what the engine gives each process."""

    def clear(self) -> None:
        self.cache.clear()

    def experts(self, slot: int, tokens: int) -> npt.NDArray[np.int16] | None:
        return None
