"""Run the same number of forward passes on every rank and scatter the outputs into batch order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.compute.batch import Batch
from agentrl.compute.packing import Packed, Segment, bins, pack

_NONE = np.zeros(0, np.int64)
EMPTY = Packed(np.zeros(1, np.int64), np.zeros(1, np.int64), (Segment(0, 1),), (), _NONE, _NONE, _NONE)
"""A pass that computes one token and predicts none, for a rank with fewer micro-batches than others."""


class ProcessGroup(Protocol):
    """The ranks of an SPMD computation.

    size: ranks whose gradients are averaged, so that each scales its share of a loss by it.
    """

    @property
    def size(self) -> int: ...

    def most(self, count: int) -> int:
        """Return the maximum of `count` over the ranks, all of which call this: every rank runs that many passes."""
        ...

    def beat(self) -> None:
        """Say that a pass is done: whoever waits for the ranks sees that they make progress."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """A group of one process."""

    size: int = 1

    def most(self, count: int) -> int:
        return count

    def beat(self) -> None:
        """Nobody waits."""


SINGLE_PROCESS = SingleProcess()


class TorchProcessGroup:
    """The ranks of torch's default process group; a collective over tensors on `device`.

    beat: called after each pass."""

    def __init__(self, device: Any = "cpu", beat: Callable[[], None] = lambda: None) -> None:
        self._device, self.beat = device, beat
        self.size: int = dist.get_world_size()

    def most(self, count: int) -> int:
        found = torch.tensor([count], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


def aligned_micro_batches(batch: Batch, tokens: int, ranks: ProcessGroup = SINGLE_PROCESS) -> Iterator[Packed]:
    """Yield as many micro-batches as every other rank does, of at most `tokens` packed tokens, the largest first.

    FSDP2 lets ranks meet in every layer, so that each pass takes as long as the largest of any rank. Therefore each
    rank spreads its samples evenly over as many micro-batches as the rank with the most needs; what it still lacks are
    EMPTY ones.
    """
    parts = bins(batch, tokens)
    count = ranks.most(len(parts))  # before the first pass, which has collectives of its own
    if len(parts) < count and len(more := bins(batch, tokens, count)) <= count:
        parts = more
    for index in range(count):
        yield pack(batch, parts[index]) if index < len(parts) else EMPTY
        ranks.beat()


def token_column(
    batch: Batch, tokens: int, ranks: ProcessGroup, compute: Callable[[Packed], Tensor]
) -> npt.NDArray[np.float32]:
    """Return compute(packed) [N], without gradient, as a token column: float32 [T], 0 where nothing is sampled."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    with torch.no_grad():
        for packed in aligned_micro_batches(batch, tokens, ranks):
            found[packed.source] = compute(packed).float().cpu().numpy()
    return found


def column_at(batch: Batch, name: str, packed: Packed, device: Any) -> Tensor:
    """Return the token column `name` at the packed row's predictions, [N]."""
    return torch.from_numpy(batch.tokens[name][packed.source]).to(device)
