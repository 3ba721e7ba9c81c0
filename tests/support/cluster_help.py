"""Workers and data that the tests of the cluster share. Tiny: no models, and torch only where a test needs it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.cluster.dispatch import ALL_TO_ALL, RANK_ZERO, SPLIT, Arguments, Dispatch, Shape, register
from agentrl.cluster.worker import Worker
from agentrl.errors import UserError

STORE = 100_000_000
"""Bytes of shared memory for Ray in a test."""


@dataclass
class Rows:
    """Numbers that are split in turn, whatever their count."""

    values: np.ndarray

    def distribute(self, parts: int) -> "RowsPartition":
        return RowsPartition([Rows(self.values[part::parts]) for part in range(parts)], len(self.values))


@dataclass
class RowsPartition:
    parts: list[Rows]
    count: int

    def join(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.zeros(self.count, dtype=outputs[0].dtype)
        for part, output in enumerate(outputs):
            whole[part :: len(self.parts)] = output
        return whole


class UnpicklableError(Exception):
    """It holds a lock, so it cannot leave its process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def _reversed(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Arguments | None], str]:
    """The last argument to the first rank; rank 1 is left out."""
    calls: list[Arguments | None] = [((value,), kwargs) for value in reversed(args)]
    calls[1] = None
    return calls, "kept"


BACKWARDS = Dispatch("backwards", _reversed, lambda shape, outputs, kept: (kept, outputs))


class Probe(Worker):
    """Says what it is and does what it is told."""

    def __init__(self, *said: Any, collective: bool = False, refuse: int | None = None) -> None:
        self.said, self.seen, self.collective = said, list[int](), collective
        print(f"worker {self.rank} is made")
        if refuse == self.rank:
            raise UserError("this recipe will not do")
        if collective:
            self.connect(120)

    @register()
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @register()
    def about(self) -> dict[str, Any]:
        return {
            "place": (self.rank, self.world_size, self.node),
            "pid": os.getpid(),
            "folder": os.getcwd(),
            "said": self.said,
            "argv": sys.argv,
        }

    @register()
    def size(self, value: np.ndarray, times: int = 1) -> int:
        return value.nbytes * times + self.rank

    @register(dispatch=ALL_TO_ALL)
    def each(self, value: int, more: int = 0) -> tuple[int, int]:
        return self.rank, value + more

    @register(dispatch=RANK_ZERO)
    def first(self, value: str) -> str:
        return f"{value} of {self.rank}"

    @register(dispatch=SPLIT)
    def square(self, factor: float, rows: Rows) -> np.ndarray:
        print(f"worker {self.rank} has {len(rows.values)} rows")
        return factor * rows.values**2

    @register(dispatch=BACKWARDS)
    def own(self, value: str) -> str:
        return f"{value}{self.rank}"

    @register(blocking=False)
    def slow(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register(blocking=False)
    def works(self, seconds: float, beats: float) -> int:
        """For so long, with a sign of progress every 0.2 seconds during `beats` of them."""
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds:
            if spent < beats:
                self.heartbeat()
            time.sleep(0.2)
        return self.rank

    @register()
    def note(self, number: int) -> None:
        self.seen.append(number)

    @register()
    def notes(self) -> list[int]:
        return self.seen

    @register()
    def total(self) -> float:
        import torch

        value = torch.tensor([float(self.rank + 1)])
        torch.distributed.all_reduce(value)
        return value.item()

    @register()
    def fail(self, kind: str, rank: int) -> None:
        """Fail on one rank; the others do their work."""
        if self.rank == rank:
            if kind == "memory":
                np.empty(1 << 60, dtype=np.uint8)
            raise {"user": UserError, "key": KeyError, "unpicklable": UnpicklableError}[kind](f"no such {kind}")

    @register()
    def end(self, how: str, rank: int) -> float:
        """End on one rank while the others wait for it, in a collective if there can be one."""
        if self.rank == rank:
            print("the last thing it said", flush=True)
            if how == "sleep":
                self.sleep_long()
            if how == "raise":
                raise UserError("rank 1 cannot go on")
            os.kill(os.getpid(), getattr(signal, how))
        if not self.collective:
            self.sleep_long()
        return self.total()

    def sleep_long(self) -> None:
        time.sleep(1000)

    def helper(self) -> None:
        """Not registered."""


class Silent(Probe):
    """Prints nothing of its own."""

    def __init__(self) -> None:
        return


class Holder:
    """Holds what Ray gave it."""

    def ready(self) -> int:
        return os.getpid()
