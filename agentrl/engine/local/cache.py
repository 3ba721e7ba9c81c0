"""`SlotCache`: keys and values of many conversations, one slot each; every slot has room for the same number of tokens.

Invariant: every number in it is finite, also where no token was written: masked scores are added to, not replaced.
The last column of a slot is scratch: rows that only pass through a step write there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """keys[i] and values[i] of layer i: [slots, kv_heads, columns + 1, D], made when the layer first asks for them."""

    def __init__(self) -> None:
        self.slots = 0
        self.columns = 0
        self.keys: list[Tensor | None] = []
        self.values: list[Tensor | None] = []

    def layer(self, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers of layer i; k and v [N, kv_heads, D] show their shape, dtype and device when they are new."""
        while len(self.keys) <= i:
            self.keys.append(None)
            self.values.append(None)
        keys, values = self.keys[i], self.values[i]
        if keys is None or values is None:
            keys = self.keys[i] = k.new_zeros(self.slots, k.shape[1], self.columns + 1, k.shape[2])
            values = self.values[i] = v.new_zeros(self.slots, v.shape[1], self.columns + 1, v.shape[2])
        return keys, values

    def resize(self, slots: int, columns: int) -> None:
        """Change the room; what lies in slots and columns that remain is kept."""
        s, c = min(slots, self.slots), min(columns, self.columns)
        self.slots, self.columns = slots, columns
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                if old is not None:
                    new = old.new_zeros(slots, old.shape[1], columns + 1, old.shape[3])
                    new[:s, :, :c] = old[:s, :, :c]
                    buffers[i] = new

    def copy(self, source: Sequence[int], target: Sequence[int], columns: int) -> None:
        """Slot target[j] becomes what slot source[j] was, for the first `columns` tokens; they may overlap."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                src = torch.tensor(source, device=buffer.device)
                dst = torch.tensor(target, device=buffer.device)
                view = buffer[:, :, :columns]
                view.index_copy_(0, dst, view.index_select(0, src))

    def clear(self) -> None:
        """Give the memory back; the room stays what it was."""
        self.keys, self.values = [], []


class CachedRunner:
    """The part of `Runner` that is about slots."""

    def __init__(self) -> None:
        self.cache = SlotCache()

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

    def clear(self) -> None:
        self.cache.clear()
