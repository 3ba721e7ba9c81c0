"""`Feed`: buckets of an update that several ranks of the trainer fill, each in memory of its own GPU, for the ranks of
one server, which open them by CUDA IPC.

The rank that sends to the server says by which rule it makes buckets (`open`). The others, who gather the same tensors
in step, fill theirs by the same rule and offer what opens them; the sender takes all offers into one call. They talk
through the store of their process group and never by a collective, so that a rank that fails holds up nobody.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from agentrl.weights.request import WeightUpdateError

SECONDS = 600.0
"""How long a rank waits for another one: as long as a server may take to load a bucket."""
POLL_SECONDS, BEAT_SECONDS = 0.005, 1.0


@dataclass(slots=True)
class Feed:
    """One update, on one rank. A rank may send to several servers, or feed one; who does neither has no part in it."""

    store: Store
    """That all ranks of the trainer share."""
    update: int
    """Number of the update, the same on every rank."""
    rank: int
    """Of this process."""
    feeders: Mapping[str, tuple[int, ...]]
    """URL -> for each rank of the server the trainer's rank on its GPU; the first one sends."""
    beat: Callable[[], None] = lambda: None
    """Called while it waits, as a sign of life."""
    dtype: torch.dtype | None = None
    """What matrices are rounded to; of the sender."""
    _told: dict[str, Any] = field(default_factory=dict)

    @property
    def sender(self) -> int | None:
        """Whom this rank feeds; None: nobody."""
        found = (ranks[0] for ranks in self.feeders.values() if self.rank in ranks[1:])
        return next(found, None)

    def open(self, limit: int, gpu: bool) -> None:
        """Say how buckets are made: of how many bytes, and whether on the GPU. Of the sender, before it reads (see
        `reading`)."""
        kind = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        self._tell({"limit": limit, "gpu": gpu, "dtype": kind, "taken": -1})

    def offers(self, url: str, index: int, own: str) -> list[str]:
        """Collect what opens bucket `index` for each rank of the server; block until all have offered. own: of this
        rank. Raises WeightUpdateError where one cannot."""
        return [own if rank == self.rank else self._offer_of(rank, index) for rank in self.feeders[url]]

    def taken(self, index: int) -> None:
        """Say that servers have copied bucket `index`."""
        self._tell({**self._told, "taken": index})

    def close(self) -> None:
        """Say that servers need no bucket any more. Of the sender, whatever has happened."""
        if "closed" not in self._told:
            self._tell({**self._told, "closed": True})

    def reading(self) -> None:
        """Close it unless it was opened: by a transport that takes no offers there is no rule, for which the others
        wait before they read in step."""
        if "limit" not in self._told and self.sender is None:
            self.close()

    def serves(self, url: str, ranks: int) -> bool:
        """Say whether every rank of this server is fed from its own GPU."""
        return "closed" not in self._told and len(self.feeders.get(url, ())) == ranks

    def rule(self) -> dict[str, Any] | None:
        """Wait for what the sender gives to `open`: `limit`, `gpu`, and `dtype`, a name or None. Returns None where it
        sends by a transport that takes no offers."""
        told = self._until(lambda told: "limit" in told)
        return told if "limit" in told else None

    def wait(self, index: int | None = None) -> None:
        """Block until servers have copied bucket `index`, or, without one, need none any more."""
        self._until(lambda told: index is not None and told["taken"] >= index)

    def offer(self, index: int, payload: str) -> None:
        """Offer what opens bucket `index` of this rank."""
        self.store.set(f"{self.rank}/{index % 2}", f"{self.update} {index} {payload}")

    def fail(self, why: str) -> None:
        """Say that this rank offers nothing more."""
        self.store.set(f"{self.rank}/failed", f"{self.update} {why}")

    def _offer_of(self, rank: int, index: int) -> str:
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            update, found, payload = self._read(f"{rank}/{index % 2}", 3)
            if (update, found) == (str(self.update), str(index)):
                return payload
            update, why = self._read(f"{rank}/failed", 2)
            if update == str(self.update):
                raise WeightUpdateError(f"rank {rank} of the trainer offers no memory of its GPU: {why}")
            self._pause(begin)
        raise WeightUpdateError(f"rank {rank} of the trainer offered no memory of its GPU within {SECONDS:.0f} s")

    def _until(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What the sender has said last, once it is as far or has closed. Raises WeightUpdateError after SECONDS."""
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            update, said = self._read(f"{self.sender}/says", 2)
            if update == str(self.update):
                told: dict[str, Any] = json.loads(said)
                if "closed" in told or reached(told):
                    return told
            self._pause(begin)
        raise WeightUpdateError(f"rank {self.sender} of the trainer said nothing for {SECONDS:.0f} s")

    def _pause(self, begin: float) -> None:
        before = time.monotonic()
        time.sleep(POLL_SECONDS)
        if (before - begin) // BEAT_SECONDS != (time.monotonic() - begin) // BEAT_SECONDS:
            self.beat()

    def _tell(self, told: dict[str, Any]) -> None:
        self._told = told
        self.store.set(f"{self.rank}/says", f"{self.update} {json.dumps(told)}")

    def _read(self, key: str, parts: int) -> list[str]:
        text = self.store.get(key).decode() if self.store.check([key]) else ""
        words = text.split(" ", parts - 1)
        return [*words, *[""] * (parts - len(words))]
