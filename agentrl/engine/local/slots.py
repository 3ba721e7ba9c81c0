"""`Slots`: which conversation lies in which slot; it finds room, gives up what is least needed, and keeps rows dense.

Invariant: a slot is free, or holds exactly one conversation, of which the first `rows.length[slot]` ids are computed.
"""

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.engine.base import Generation, Sampling
from agentrl.engine.local.runner import Runner
from agentrl.engine.local.sampler import Choice

COLUMNS = 64  # slots grow in multiples of this many tokens
LINGER = 4  # steps an idle slot stays among the decoding ones: a fast tool is back by then
NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class Request:
    """One turn that a caller awaits, from `generate` until its `Generation`."""

    request_id: str
    """The conversation."""
    ids: npt.NDArray[np.int64]
    """The prompt; after a retraction also the tokens sampled by then."""
    sampling: Sampling
    key: int
    """The hashed seed, 64 bits."""
    room: int
    """How many tokens may still be sampled."""
    future: asyncio.Future[Generation]
    slot: int | None = None
    """The slot where it runs (None: it waits)."""
    fed: int = 0
    """How many of `ids` the slot has computed while the prompt is being fed."""
    last: bool = False
    """Whether the conversation ends with this turn."""
    done_ids: list[int] = field(default_factory=list)
    """Tokens sampled before a retraction."""
    done_logprobs: list[float] = field(default_factory=list)
    """The log-prob of each of `done_ids`."""
    done_versions: list[int] = field(default_factory=list)
    """The version of the weights that sampled each of `done_ids`."""


@dataclass(slots=True, eq=False)
class Conversation:
    """What lies in a slot."""

    request_id: str
    slot: int
    ids: npt.NDArray[np.int64]
    """All tokens so far, of which a prefix is computed."""
    running: Request | None = None
    """The turn in progress."""
    opening: bytes | None = None
    """The first prompt's bytes while that prompt is computed here, for others to copy."""


class Rows:
    """The numbers of every slot as arrays, so that a decode step runs no Python per row.

    Per slot: `active` decodes at every step; `length` tokens are computed, and `last` is sampled but not computed;
    `room` tokens may still be sampled; `ids` and `logprobs` [slots, width] hold the `count` sampled in this turn.
    """

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
        """Begin a turn of at most `room` tokens in `slot`."""
        self.room[slot], self.count[slot], self.key[slot] = room, 0, key
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot] = sampling.top_k
        wide = len(sampling.stop_ids) - self.stops.shape[1]
        if wide > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, wide)), constant_values=NO_TOKEN)
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def choice(self, slots: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> Choice:
        """Return how `slots` sample their token at `position`: copies, as the rows may change meanwhile."""
        return Choice(self.key[slots], position, self.temperature[slots], self.top_p[slots], self.top_k[slots])

    def append(
        self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.int64]:
        """Add one sampled token to each of `slots`; return those whose turn is over."""
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
        over: npt.NDArray[np.bool_] = (tokens[:, None] == self.stops[slots]).any(1) | (room <= 0)
        return slots[over]

    def sampled(self, slot: int) -> tuple[list[int], list[float]]:
        """Return ids and log-probs of the turn so far."""
        n = int(self.count[slot])
        return self.ids[slot, :n].tolist(), self.logprobs[slot, :n].tolist()


class Slots:
    """`at[slot]` is the conversation there; `by_id` finds it, `openings` finds those whose prompt is ready to copy."""

    def __init__(self, runner: Runner, max_batch: int, max_context: int, cache_bytes: int) -> None:
        self.runner, self.rows = runner, Rows()
        self.at: list[Conversation | None] = []
        self.by_id: dict[str, Conversation] = {}
        self.openings: dict[bytes, Conversation] = {}
        self.step = 0
        self._free: list[int] = []
        self._max_batch, self._max_context, self._bytes = max_batch, max_context, cache_bytes

    def place(self, request: Request) -> Conversation | None:
        """Give a slot to a conversation that has none; None: all are in use."""
        if not self.reserve(len(request.ids)) or not (self._free or self._add_slots() or self._evict()):
            return None
        c = Conversation(request.request_id, heapq.heappop(self._free), request.ids)
        self.at[c.slot] = self.by_id[c.request_id] = c
        self.rows.length[c.slot] = 0
        return c

    def free(self, c: Conversation) -> None:
        """Make the slot of `c` available."""
        self.forget_opening(c)
        if self.by_id.get(c.request_id) is c:
            del self.by_id[c.request_id]
        self.at[c.slot] = None
        self.rows.active[c.slot] = False
        heapq.heappush(self._free, c.slot)

    def free_all(self) -> None:
        for c in [c for c in self.at if c is not None]:
            self.free(c)

    def drop_memory(self) -> None:
        """Free every slot and its memory."""
        self.free_all()
        self.runner.clear()
        self.runner.resize(0, 0)
        self._resize(0)

    def forget_opening(self, c: Conversation) -> None:
        if c.opening is not None and self.openings.get(c.opening) is c:
            del self.openings[c.opening]
        c.opening = None

    def reserve(self, tokens: int) -> bool:
        """Make room for `tokens` in every slot. Where memory is short idle conversations are evicted; False: too many
        are running."""
        if tokens <= self.runner.columns:
            return True
        need = min(-(-tokens // COLUMNS) * COLUMNS, self._max_context)
        wide = min(max(4 * COLUMNS, need, self.runner.columns * 3 // 2), self._max_context)
        used = sum(c is not None for c in self.at)
        columns = wide if self._limit(wide) >= max(used, min(len(self.at), self._max_batch)) else need
        slots = min(max(len(self.at), self._max_batch), self._limit(columns))
        running = sum(c is not None and c.running is not None for c in self.at)
        if running > slots:
            return False
        while sum(c is not None for c in self.at) > slots and self._evict():
            pass
        self._squeeze(slots)
        self.runner.resize(slots, columns)
        self._resize(slots)
        return True

    def _limit(self, columns: int) -> int:
        """Return how many slots of so many columns fit in memory."""
        return self._bytes // (self.runner.token_bytes * (columns + 1))

    def _add_slots(self) -> bool:
        slots = min(2 * len(self.at), self._limit(self.runner.columns))
        if slots <= len(self.at):
            return False
        self.runner.resize(slots, self.runner.columns)
        self._resize(slots)
        return True

    def _resize(self, slots: int) -> None:
        self.at = (self.at + [None] * (slots - len(self.at)))[:slots]
        self.rows.resize(slots)
        self._free = [i for i, c in enumerate(self.at) if c is None]  # sorted, so a heap

    def _evict(self) -> bool:
        """Free the conversation that has been idle longest."""
        idle = [c for c in self.at if c is not None and c.running is None]
        if not idle:
            return False
        self.free(min(idle, key=lambda c: int(self.rows.idle_since[c.slot])))
        return True

    def _squeeze(self, slots: int) -> None:
        """Move every conversation below `slots`; there is room."""
        high = [i for i in range(slots, len(self.at)) if self.at[i] is not None]
        low = [i for i in range(min(slots, len(self.at))) if self.at[i] is None]
        self._swap(high, low[: len(high)])

    def compact(self) -> None:
        """Bring decoding rows together at the bottom, once the gaps cost more than moving does."""
        active = np.flatnonzero(self.rows.active)
        gaps = int(active[-1]) + 1 - len(active) if len(active) else 0
        if gaps <= 2 + len(active) // 16:
            return
        since = self.step - self.rows.idle_since
        low = [s for s in range(len(active)) if not self.rows.active[s] and self._may_move(s, int(since[s]))]
        high = [int(s) for s in active[::-1] if s >= len(active)][: len(low)]
        pairs = [(h, s) for h, s in zip(high, low, strict=False) if h > s]
        self._swap([h for h, _ in pairs], [s for _, s in pairs])

    def _may_move(self, slot: int, idle: int) -> bool:
        c = self.at[slot]
        return c is None or (c.running is None and idle > LINGER)

    def _swap(self, a: list[int], b: list[int]) -> None:
        if not a:
            return
        width = int(self.rows.length[[*a, *b]].max())
        if width:
            self.runner.copy([*a, *b], [*b, *a], width)
        self.rows.swap(a, b)
        for x, y in zip(a, b, strict=True):
            self.at[x], self.at[y] = self.at[y], self.at[x]
            for slot in (x, y):
                c = self.at[slot]
                if c is not None:
                    c.slot = slot
                    if c.running is not None:
                        c.running.slot = slot
        self._free = [i for i, c in enumerate(self.at) if c is None]
