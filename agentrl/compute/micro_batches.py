"""Forward passes over a batch: as many on every rank, and what they give put where it belongs."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.compute.batch import Batch
from agentrl.compute.packing import Packed, Segment, micro_batches
from agentrl.compute.ranks import SINGLE_PROCESS, ProcessGroup

_NONE = np.zeros(0, np.int64)
EMPTY = Packed(np.zeros(1, np.int64), np.zeros(1, np.int64), (Segment(0, 1),), _NONE, _NONE, _NONE)
"""A pass that computes one token and predicts none: for a rank that has fewer passes than its peers."""


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
