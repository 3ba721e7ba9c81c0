"""`Rows`: the numbers of every slot as arrays, so that a decode step costs no Python a row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.engine.base import Sampling
from agentrl.engine.local.sampler import Choice

NO_TOKEN = -1


class Rows:
    """Per slot: `active` decodes at every step; `length` tokens are computed, and `last` is sampled but not computed;
    `room` tokens may still be sampled; `ids` and `logprobs` [slots, width] hold the `count` sampled in this turn."""

    _arrays = (
        "active", "length", "last", "room", "count", "key", "temperature", "top_p", "top_k", "stops", "ids", "logprobs",
        "idle_since",
    )  # fmt: skip

    def __init__(self) -> None:
        self.active = np.zeros(0, np.bool_)
        self.length = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)
        self.room = np.zeros(0, np.int64)
        self.count = np.zeros(0, np.int64)
        self.key = np.zeros(0, np.uint64)
        self.temperature = np.zeros(0, np.float32)
        self.top_p = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int64)
        self.stops = np.full((0, 1), NO_TOKEN, np.int64)
        self.ids = np.zeros((0, 64), np.int64)
        self.logprobs = np.zeros((0, 64), np.float32)
        self.idle_since = np.zeros(0, np.int64)  # the step at which it stopped decoding

    def resize(self, slots: int) -> None:
        for name in self._arrays:
            old: npt.NDArray[Any] = getattr(self, name)
            new = np.zeros((slots, *old.shape[1:]), old.dtype)
            kept = min(slots, len(old))
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def swap(self, a: Sequence[int], b: Sequence[int]) -> None:
        ab, ba = [*a, *b], [*b, *a]
        for name in self._arrays:
            array: npt.NDArray[Any] = getattr(self, name)
            array[ab] = array[ba]

    def start(self, slot: int, sampling: Sampling, key: int, room: int) -> None:
        """A turn of at most `room` tokens begins in `slot`."""
        self.room[slot], self.count[slot], self.key[slot] = room, 0, key
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot] = sampling.top_k
        wide = len(sampling.stop_ids) - self.stops.shape[1]
        if wide > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, wide)), constant_values=NO_TOKEN)
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def choice(self, slots: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> Choice:
        """How `slots` sample their token at `position`; copies, so that the rows may change meanwhile."""
        return Choice(self.key[slots], position, self.temperature[slots], self.top_p[slots], self.top_k[slots])

    def append(
        self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.int64]:
        """One sampled token for each of `slots`; returns those whose turn is over."""
        count = self.count[slots]
        if len(slots) and int(count.max()) >= self.ids.shape[1]:
            self.ids = np.pad(self.ids, ((0, 0), (0, self.ids.shape[1])))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, self.logprobs.shape[1])))
        self.ids[slots, count] = tokens
        self.logprobs[slots, count] = logprobs
        self.count[slots] = count + 1
        self.last[slots] = tokens
        room = self.room[slots] - 1
        self.room[slots] = room
        over = (tokens[:, None] == self.stops[slots]).any(1) | (room <= 0)
        return slots[over]

    def sampled(self, slot: int) -> tuple[list[int], list[float]]:
        """The turn so far."""
        n = int(self.count[slot])
        return self.ids[slot, :n].tolist(), self.logprobs[slot, :n].tolist()
