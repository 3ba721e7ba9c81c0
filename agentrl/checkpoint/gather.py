"""`Gatherer`: gathers sharded tensors on rank 0, one at a time; no other rank ever holds a whole one."""

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and offsets of a rank's part of a tensor, by dimension."""


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a part of one that ranks share. Nobody has made one where their module, whose import takes a
    second, was never imported, or is being imported by another thread."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class Gatherer:
    """Gathers tensors, sharded (DTensor) or whole, over `group`: a gloo group of all ranks that nobody else uses
    meanwhile (None: there is one process)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """The whole tensor on the CPU on rank 0, an empty one of its shape on the meta device on other ranks.
        All ranks call this for the same tensors in the same order."""
        if self._group is None or not is_sharded(tensor):
            found = local(tensor).detach()
            return found.cpu() if self._rank == 0 else found.to("meta")
        if 0 not in tensor.device_mesh.mesh:  # copies of what the first rank's mesh holds
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        owners = _owners(tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh)
        if self._rank != 0:
            if self._rank in owners:
                dist.send(_bytes(local(tensor).detach().cpu()), 0, group=self._group)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return self._assemble(tensor, owners)

    def _assemble(self, tensor: "DTensor", owners: dict[int, Span]) -> Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for rank, (size, offset) in owners.items():
            part = local(tensor).detach().cpu()
            if rank != 0:
                part = torch.empty(size, dtype=tensor.dtype)
                dist.recv(_bytes(part), rank, group=self._group)
            whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = part
        return whole


@lru_cache(maxsize=1024)
def _owners(shape: tuple[int, ...], placements: "tuple[Placement, ...]", mesh: "DeviceMesh") -> dict[int, Span]:
    """Rank -> its part, without ranks whose parts are empty or copies of a lower rank's."""
    positions = {int(mesh.mesh[position]): position for position in product(*map(range, mesh.mesh.shape))}
    found: dict[int, Span] = {}
    seen: set[Span] = set()
    for rank in sorted(positions):
        span = span_of(shape, placements, tuple(mesh.mesh.shape), positions[rank])
        if all(span[0]) and span not in seen:
            found[rank] = span
            seen.add(span)
    return found


def part_of(tensor: "DTensor") -> Span:
    """The part of a sharded tensor that this rank holds."""
    mesh = tensor.device_mesh
    position = mesh.get_coordinate()
    assert position is not None  # nobody else has the tensor
    return span_of(tuple(tensor.shape), tuple(tensor.placements), tuple(mesh.mesh.shape), position)


def span_of(
    shape: Sequence[int], placements: "Sequence[Placement]", ranks: Sequence[int], position: Sequence[int]
) -> Span:
    """The part of a tensor that one rank holds.

    placements, ranks (their number), position (of the rank): by dimension of the mesh. A dimension of the tensor is cut
    as by `torch.chunk`, first by the mesh's first dimension: the last parts may be short or empty. Where FSDP2 cuts
    what is divided already, it places the tensor as _StridedShard, by the earlier dimension of the mesh: that cut is
    the second.

    Raises NotImplementedError for another placement.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    size, offset = list(shape), [0] * len(shape)
    cuts = list(zip(placements, ranks, position, strict=True))
    later = [cut for cut in cuts if type(cut[0]) is _StridedShard]
    for placement, parts, index in [*(cut for cut in cuts if type(cut[0]) is not _StridedShard), *later]:
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, _StridedShard) or not _divided(placement, placements, ranks):
            raise NotImplementedError(f"tensors placed as {placement}")
        d = placement.dim  # type: ignore[attr-defined]
        largest = -(-size[d] // parts)
        start = min(size[d], largest * index)
        size[d], offset[d] = min(largest, size[d] - start), offset[d] + start
    return tuple(size), tuple(offset)


def _divided(placement: "Placement", placements: "Sequence[Placement]", ranks: Sequence[int]) -> bool:
    """Whether a _StridedShard says no more than that other dimensions of the mesh cut the same dimension before."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is not _StridedShard:
        return True
    before = [n for p, n in zip(placements, ranks, strict=True) if type(p) is Shard and p.dim == placement.dim]
    return placement.split_factor == math.prod(before)


def _bytes(tensor: Tensor) -> Tensor:
    """View the same memory as bytes: not every backend sends every dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
