"""`Gatherer`: sharded tensors put together on rank 0, one at a time; no other rank ever holds a whole one."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and offset of a rank's part of a tensor, by dimension."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Gatherer:
    """Of `tensors`, sharded (DTensor) or whole, over `group`: a gloo group of all ranks that nobody else uses
    meanwhile (None: there is one process). Making it is a collective.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Any = None) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        mine = {i: _span(t) for i, t in enumerate(tensors) if isinstance(t, DTensor)}
        self._index = {id(t): i for i, t in enumerate(tensors)}
        self._spans: list[dict[int, Span]] = [mine]
        if group is not None:
            self._spans = [{}] * dist.get_world_size(group)
            dist.all_gather_object(self._spans, mine, group=group)

    def __call__(self, tensor: Tensor) -> Tensor:
        """All ranks call this for the same tensors in the same order. Rank 0 gets it whole, on the CPU; the others an
        empty one of its shape on the meta device."""
        if self._group is None or not isinstance(tensor, DTensor):
            found = local(tensor).detach()
            return found.cpu() if self._rank == 0 else found.to("meta")
        owners = _owners([spans[self._index[id(tensor)]] for spans in self._spans])
        if self._rank != 0:
            if self._rank in owners:
                dist.send(_bytes(local(tensor).detach().cpu()), 0, group=self._group)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return self._assemble(tensor, owners)

    def _assemble(self, tensor: DTensor, owners: dict[int, Span]) -> Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for rank, (size, offset) in owners.items():
            part = local(tensor).detach().cpu()
            if rank != 0:
                part = torch.empty(size, dtype=tensor.dtype)
                dist.recv(_bytes(part), rank, group=self._group)
            whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = part
        return whole


def _span(tensor: DTensor) -> Span:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(size), tuple(offset)


def _owners(spans: Sequence[Span]) -> dict[int, Span]:
    """Rank -> its part, of the ranks whose parts are not empty and no copy of a lower rank's."""
    found: dict[int, Span] = {}
    for rank, span in enumerate(spans):
        if all(span[0]) and span not in found.values():
            found[rank] = span
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory: not every backend carries every type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
