"""`ParallelContext`: the position of this process among the ranks of an initialised torch process group."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import UserError
from agentrl.recipe.sections.cluster import ClusterSection


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The position of one rank, and how the weights lie over all of them."""

    rank: int
    size: int
    """Number of ranks."""
    device: torch.device
    """The device that this rank computes on."""
    mesh: DeviceMesh
    """The weights are sharded over its last dimension (`shard`), and copied along the first if there are two
    (`replicate`, HSDP: the ranks of a shard group are neighbours)."""
    sequence: dist.ProcessGroup | None = None
    """The process group of the neighbouring ranks that share each sequence with this one; None: there are none."""

    @property
    def shards(self) -> int:
        """Number of ranks that together hold one copy of the weights."""
        return int(self.mesh.shape[-1])

    def shard_of(self, rank: int) -> int:
        """The index of the shard that `rank` holds."""
        return rank % self.shards


def make_context(cluster: ClusterSection, device: torch.device) -> ParallelContext:
    """The position of this rank of the default process group, which computes on `device`. A collective.

    Raises UserError: a `cluster.shard` or `cluster.sequence_parallel` that does not divide the number of ranks.
    """
    size = dist.get_world_size()
    shard = cluster.shard or size
    for key, value in (("shard", shard), ("sequence_parallel", cluster.sequence_parallel)):
        if size % value:
            raise UserError(f"cluster.{key} is {value}, which does not divide the {size} workers")
    kind = device.type
    if shard == size:
        mesh = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(kind, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    return ParallelContext(dist.get_rank(), size, device, mesh, _sequence_group(cluster.sequence_parallel, size, kind))


def _sequence_group(length: int, size: int, kind: str) -> dist.ProcessGroup | None:
    if length == 1:
        return None
    grid = init_device_mesh(kind, (size // length, length), mesh_dim_names=("data", "sequence"))
    return grid["sequence"].get_group()
