"""Run the same number of forward passes on every rank and scatter the outputs into batch order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.compute.batch import Batch
from agentrl.compute.packing import Packed, Segment, bins, pack

_NONE = np.zeros(0, np.int64)
EMPTY = Packed(np.zeros(1, np.int64), np.zeros(1, np.int64), (Segment(0, 1),), (), _NONE, _NONE, _NONE, _NONE)
"""A pass that computes one token and predicts none, for a rank with fewer micro-batches than others."""


class ProcessGroup(Protocol):
    """The ranks of an SPMD computation."""

    @property
    def size(self) -> int:
        """Number of ranks whose gradients are averaged; each multiplies its part of a loss by it."""

    def max_over_ranks(self, count: int) -> int:
        """The maximum of `count` over the ranks, all of which call this."""

    def heartbeat(self) -> None:
        """Report that a pass has ended, to a controller that watches the progress of the ranks."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """A group of one process."""

    size: int = 1
    """Number of ranks."""

    def max_over_ranks(self, count: int) -> int:
        """`count`."""
        return count

    def heartbeat(self) -> None:
        """Do nothing: there is no controller."""


SINGLE_PROCESS = SingleProcess()


class TorchProcessGroup:
    """The ranks of torch's default process group, with collectives over tensors on `device`.

    heartbeat: called after each pass. tensor: number of ranks that compute each pass together: their gradients are of
    one and the same loss.
    """

    def __init__(
        self, device: torch.device | str = "cpu", heartbeat: Callable[[], None] = lambda: None, tensor: int = 1
    ) -> None:
        self._device, self.heartbeat = device, heartbeat
        self.size: int = dist.get_world_size() // tensor

    def max_over_ranks(self, count: int) -> int:
        """The maximum of `count` over the ranks; a collective."""
        found = torch.tensor([count], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


def aligned_micro_batches(batch: Batch, tokens: int, ranks: ProcessGroup = SINGLE_PROCESS) -> Iterator[Packed]:
    """Yield the micro-batches of this rank, as many as on every other rank, of at most `tokens` packed tokens each, the
    largest first.

    FSDP2 synchronizes the ranks in every layer, so that a pass takes as long as the largest of any rank. Therefore each
    rank spreads its samples evenly over as many micro-batches as the fullest rank needs, and adds EMPTY ones for the
    rest.
    """
    parts = bins(batch, tokens)
    count = ranks.max_over_ranks(len(parts))  # before the first pass, which has collectives of its own
    if len(parts) < count and len(more := bins(batch, tokens, count)) <= count:
        parts = more
    for index in range(count):
        yield pack(batch, parts[index]) if index < len(parts) else EMPTY
        ranks.heartbeat()


def token_column(
    batch: Batch, tokens: int, ranks: ProcessGroup, compute: Callable[[Packed], Tensor]
) -> npt.NDArray[np.float32]:
    """`compute` [N] of all micro-batches, without gradients, as a token column: float32 [T], 0 where nothing is
    sampled. tokens, ranks: see `aligned_micro_batches`."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    with torch.no_grad():
        for packed in aligned_micro_batches(batch, tokens, ranks):
            found[packed.source] = compute(packed).float().cpu().numpy()
    return found


def column_at(batch: Batch, name: str, packed: Packed, device: torch.device | str) -> Tensor:
    """The token column `name` at the packed row's predictions, [N]."""
    return torch.from_numpy(batch.tokens[name][packed.source]).to(device)
