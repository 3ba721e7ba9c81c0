"""`Gatherer`: sharded tensors put together on rank 0, one at a time; no other rank ever holds a whole one."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and offset of a rank's part of a tensor, by dimension."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Gatherer:
    """Of tensors that are sharded (DTensor) or whole, over `group`: a gloo group of all ranks that nobody else uses
    meanwhile (None: there is one process)."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """All ranks call this for the same tensors in the same order. Rank 0 gets it whole, on the CPU; the others an
        empty one of its shape on the meta device."""
        if self._group is None or not isinstance(tensor, DTensor):
            found = local(tensor).detach()
            return found.cpu() if self._rank == 0 else found.to("meta")
        owners = _owners(tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh)
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


@lru_cache(maxsize=1024)
def _owners(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh) -> dict[int, Span]:
    """Rank -> its part, of the ranks whose parts are not empty and no copy of a lower rank's."""
    places = {int(mesh.mesh[place]): place for place in product(*map(range, mesh.mesh.shape))}
    found: dict[int, Span] = {}
    seen: set[Span] = set()
    for rank in sorted(places):
        span = span_of(shape, placements, tuple(mesh.mesh.shape), places[rank])
        if all(span[0]) and span not in seen:
            found[rank] = span
            seen.add(span)
    return found


def span_of(shape: Sequence[int], placements: Sequence[Placement], ranks: Sequence[int], place: Sequence[int]) -> Span:
    """The part of a tensor that the rank at `place` holds. placements, ranks, place: by dimension of the mesh.

    A dimension is cut as `torch.chunk` does, first by the mesh's first dimension: the last parts may be short, or
    empty. Raises NotImplementedError for any other placement.
    """
    size, offset = list(shape), [0] * len(shape)
    for placement, parts, index in zip(placements, ranks, place, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise NotImplementedError(f"tensors placed as {placement}")
        d = placement.dim
        most = -(-size[d] // parts)
        start = min(size[d], most * index)
        size[d], offset[d] = min(most, size[d] - start), offset[d] + start
    return tuple(size), tuple(offset)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory: not every backend carries every type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
