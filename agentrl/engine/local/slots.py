"""`Slots`: assigns conversations to slots, evicts idle ones if memory is short, closes gaps between decoding rows.

Invariant: a slot is free or holds exactly one conversation, of which the first `rows.length[slot]` ids are computed.
"""

import asyncio
import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agentrl.engine.base import Generation, OnTokens, Sampling
from agentrl.engine.grammar import Matcher
from agentrl.engine.local.runner import Runner
from agentrl.engine.local.sampler import Choice

COLUMNS = 64  # slots grow in multiples of this many tokens
LINGER = 4  # steps for which an idle slot stays among the decoding ones: a fast tool has returned by then
NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class Request:
    """One turn that a caller awaits, from `generate` until its `Generation`."""

    request_id: str
    """The id of the conversation."""
    ids: npt.NDArray[np.int64]
    """int32 or int64: the prompt, plus the tokens sampled before the request was put back into the queue."""
    sampling: Sampling
    """The sampling parameters."""
    key: int
    """The hashed seed, 64 bits."""
    room: int
    """Number of tokens that may still be sampled."""
    future: asyncio.Future[Generation]
    """Receives the result."""
    slot: int | None = None
    """The slot where it runs; None: it waits."""
    fed: int = 0
    """Number of `ids` computed so far."""
    last: bool = False
    """Whether this is the last turn of its conversation."""
    done_ids: list[int] = field(default_factory=list)
    """Tokens sampled before the request was put back into the queue."""
    done_logprobs: list[float] = field(default_factory=list)
    """The log-prob of each of `done_ids`."""
    done_versions: list[int] = field(default_factory=list)
    """The weight version of each of `done_ids`."""
    on_tokens: OnTokens | None = None
    """Is given the sampled ids as they come."""
    streamed: int = 0
    """Number of ids that `on_tokens` was given."""
    matcher: Matcher | None = None
    """Says which tokens its constraint allows; None: all of them."""


@dataclass(slots=True, eq=False)
class Conversation:
    """The conversation in a slot."""

    request_id: str
    """The id of the conversation."""
    slot: int
    """Its slot."""
    ids: npt.NDArray[np.int64]
    """int32 or int64: all tokens so far, of which a prefix is computed."""
    running: Request | None = None
    """The turn in progress; None: idle."""
    opening: bytes | None = None
    """The bytes of the first prompt's ids while this slot holds what is computed of it, for others to copy."""


class Openings:
    """Conversations by their first prompts, the first one of each, to find those that begin alike."""

    def __init__(self) -> None:
        self._of: dict[bytes, Conversation] = {}
        self._sorted: list[bytes] = []  # neighbours have the longest beginnings in common

    def get(self, prompt: bytes) -> Conversation | None:
        """The conversation with this prompt."""
        return self._of.get(prompt)

    def add(self, prompt: bytes, c: Conversation) -> None:
        """Offer what `c` computes of its first prompt."""
        if prompt not in self._of:
            self._of[prompt] = c
            bisect.insort(self._sorted, prompt)
            c.opening = prompt

    def remove(self, c: Conversation) -> None:
        """Offer it no longer."""
        if c.opening is not None and self._of.get(c.opening) is c:
            del self._of[c.opening]
            del self._sorted[bisect.bisect_left(self._sorted, c.opening)]
        c.opening = None

    def likest(self, ids: npt.NDArray[np.int64]) -> tuple[Conversation | None, int]:
        """The conversation whose first prompt has the most in common with all but the last of `ids`, and how many
        tokens."""
        prompt, best, most = ids.tobytes(), None, 0
        place = bisect.bisect_left(self._sorted, prompt)
        for near in map(self._of.__getitem__, self._sorted[max(0, place - 1) : place + 1]):
            common = common_tokens(near.ids, ids[:-1])
            if common > most:
                best, most = near, common
        return best, most


def common_tokens(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """How many ids at their beginning are equal."""
    known = min(len(one), len(other))
    differ = np.flatnonzero(one[:known] != other[:known])
    return int(differ[0]) if len(differ) else known


class Rows:
    """The state of all slots as arrays, indexed by slot, so that a decoding step runs no Python code per row."""

    _arrays = (
        "active", "length", "last", "room", "count", "key", "temperature", "top_p", "top_k", "stops", "ids", "logprobs",
        "idle_since",
    )  # fmt: skip

    def __init__(self) -> None:
        self.active = np.zeros(0, np.bool_)  # whether it decodes in every step
        self.length = np.zeros(0, np.int64)  # number of tokens computed
        self.last = np.zeros(0, np.int64)  # the last sampled token, which is not computed yet
        self.room = np.zeros(0, np.int64)  # number of tokens that may still be sampled
        self.count = np.zeros(0, np.int64)  # number of tokens sampled in this turn
        self.key = np.zeros(0, np.uint64)
        self.temperature = np.zeros(0, np.float32)
        self.top_p = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int64)
        self.stops = np.full((0, 1), NO_TOKEN, np.int64)  # stop ids, padded with NO_TOKEN
        self.ids = np.zeros((0, 64), np.int64)  # the `count` tokens sampled in this turn
        self.logprobs = np.zeros((0, 64), np.float32)  # their log-probs
        self.idle_since = np.zeros(0, np.int64)  # the step at which it stopped decoding

    def resize(self, slots: int) -> None:
        """Change the number of slots; the state of those that remain is kept."""
        for name in self._arrays:
            old: npt.NDArray[np.generic] = getattr(self, name)
            new = np.zeros((slots, *old.shape[1:]), old.dtype)
            kept = min(slots, len(old))
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def swap(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Swap the state of slot a[i] with that of slot b[i], for all i."""
        ab, ba = [*a, *b], [*b, *a]
        for name in self._arrays:
            array: npt.NDArray[np.generic] = getattr(self, name)
            array[ab] = array[ba]

    def start(self, slot: int, sampling: Sampling, key: int, room: int) -> None:
        """Start a turn of at most `room` tokens in `slot`. key: the hashed seed."""
        self.room[slot], self.count[slot], self.key[slot] = room, 0, key
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot] = sampling.top_k
        wide = len(sampling.stop_ids) - self.stops.shape[1]
        if wide > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, wide)), constant_values=NO_TOKEN)
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def choice(self, slots: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> Choice:
        """The sampling parameters of `slots` for their tokens at `position`, as copies: rows may change during
        the step."""
        return Choice(self.key[slots], position, self.temperature[slots], self.top_p[slots], self.top_k[slots])

    def append(
        self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.int64]:
        """Add one sampled token to each of `slots`; return the slots whose turn has ended."""
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
        """The ids and log-probs sampled in this turn so far."""
        n = int(self.count[slot])
        return self.ids[slot, :n].tolist(), self.logprobs[slot, :n].tolist()


class Slots:
    """The slots of a runner and the conversations in them.

    max_batch: maximum number of running requests. max_context: maximum tokens of a slot. cache_bytes: maximum memory of
    all slots.
    """

    def __init__(self, runner: Runner, max_batch: int, max_context: int, cache_bytes: int) -> None:
        self.runner, self.rows = runner, Rows()
        self.at: list[Conversation | None] = []
        """The conversation in each slot; None: the slot is free."""
        self.by_id: dict[str, Conversation] = {}
        """Conversations by `request_id`."""
        self.openings = Openings()
        """Conversations whose first prompts, as far as they are computed, can be copied."""
        self.step = 0
        """Number of steps planned so far."""
        self._free: list[int] = []
        self._max_batch, self._max_context, self._bytes = max_batch, max_context, cache_bytes

    def place(self, request: Request) -> Conversation | None:
        """Assign a slot to a new conversation and return it; None: all slots are in use."""
        if not self.reserve(len(request.ids)) or not (self._free or self._add_slots() or self._evict()):
            return None
        c = Conversation(request.request_id, heapq.heappop(self._free), request.ids)
        self.at[c.slot] = self.by_id[c.request_id] = c
        self.rows.length[c.slot] = 0
        return c

    def free(self, c: Conversation) -> None:
        """Free the slot of `c`."""
        self.openings.remove(c)
        if self.by_id.get(c.request_id) is c:
            del self.by_id[c.request_id]
        self.at[c.slot] = None
        self.rows.active[c.slot] = False
        heapq.heappush(self._free, c.slot)

    def free_all(self) -> None:
        """Free all slots; their memory stays allocated."""
        for c in [c for c in self.at if c is not None]:
            self.free(c)

    def drop_memory(self) -> None:
        """Free all slots and their memory."""
        self.free_all()
        self.runner.clear()
        self.runner.resize(0, 0)
        self._resize(0)

    def reserve(self, tokens: int) -> bool:
        """Make room for `tokens` in every slot, evicting idle conversations if memory is short.

        Returns False if too many requests are running for that.
        """
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
        """The number of slots with `columns` columns that fit into the memory."""
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
        """Free the slot of the conversation that has been idle longest; return False if none is idle."""
        idle = [c for c in self.at if c is not None and c.running is None]
        if not idle:
            return False
        self.free(min(idle, key=lambda c: int(self.rows.idle_since[c.slot])))
        return True

    def _squeeze(self, slots: int) -> None:
        """Move all conversations to slots below `slots`, where there are enough free ones."""
        high = [i for i in range(slots, len(self.at)) if self.at[i] is not None]
        low = [i for i in range(min(slots, len(self.at))) if self.at[i] is None]
        self._swap(high, low[: len(high)])

    def compact(self) -> None:
        """Move decoding rows to the lowest slots if the gaps between them cost more than the moves."""
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
