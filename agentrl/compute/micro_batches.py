"""Forward passes over a batch: as many on every rank, and what they give put where it belongs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.compute.batch import Batch
from agentrl.compute.packing import Packed, Segment, micro_batches

_NONE = np.zeros(0, np.int64)
EMPTY = Packed(np.zeros(1, np.int64), np.zeros(1, np.int64), (Segment(0, 1),), _NONE, _NONE, _NONE)
"""A pass that computes one token and predicts none: for a rank that has fewer passes than its peers."""


class ProcessGroup(Protocol):
    """size: ranks whose gradients are averaged, so that each scales its share of a loss by it."""

    @property
    def size(self) -> int: ...

    def most(self, count: int) -> int:
        """The maximum of `count` over the ranks, all of which call this: so many passes does every one of them make."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """One process."""

    size: int = 1

    def most(self, count: int) -> int:
        return count


SINGLE_PROCESS = SingleProcess()


class TorchProcessGroup:
    """The ranks of torch's default process group; a collective over tensors on `device`."""

    def __init__(self, device: Any = "cpu") -> None:
        self._device = device
        self.size: int = dist.get_world_size()

    def most(self, count: int) -> int:
        found = torch.tensor([count], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


def aligned_micro_batches(batch: Batch, tokens: int, ranks: ProcessGroup = SINGLE_PROCESS) -> Iterator[Packed]:
    """The batch in micro-batches of at most `tokens`, and EMPTY ones up to as many as the rank with the most has."""
    parts = list(micro_batches(batch, tokens))
    idle = ranks.most(len(parts)) - len(parts)  # asked before the first pass, in which the ranks meet in other calls
    yield from parts
    yield from [EMPTY] * idle


def token_column(
    batch: Batch, tokens: int, ranks: ProcessGroup, compute: Callable[[Packed], Tensor]
) -> npt.NDArray[np.float32]:
    """compute(packed) [N] without gradient, as a token column of the batch: float32 [T], 0 where nothing is sampled."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    with torch.no_grad():
        for packed in aligned_micro_batches(batch, tokens, ranks):
            found[packed.source] = compute(packed).float().cpu().numpy()
    return found


def column_at(batch: Batch, name: str, packed: Packed, device: Any) -> Tensor:
    """The token column `name` at the packed row's predictions, [N]."""
    return torch.from_numpy(batch.tokens[name][packed.source]).to(device)
