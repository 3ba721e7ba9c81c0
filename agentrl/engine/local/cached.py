"""`CachedRunner`: what the runners over a `SlotCache` have in common: its room, its copies, its end."""

import torch

from agentrl.engine.local.cache import SlotCache


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
