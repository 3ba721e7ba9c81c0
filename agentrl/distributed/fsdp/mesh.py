"""`Place`: where this process stands among the ranks of a torch process group that is initialised already."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import UserError
from agentrl.recipe.schema import ClusterSection


@dataclass(frozen=True, slots=True)
class Place:
    """rank of `size`, computing on `device`. The weights are sharded over the last dimension of `mesh` (`shard`), and
    copied along the first where there are two (`replicate`, HSDP: the ranks of a shard group are neighbours).

    sequence: the process group of the neighbouring ranks that share each sequence with this one; None: nobody does.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    sequence: Any = None

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the weights."""
        return int(self.mesh.shape[-1])

    def shard_of(self, rank: int) -> int:
        """Which shard `rank` holds."""
        return rank % self.shards


def find_place(cluster: ClusterSection, device: torch.device) -> Place:
    """Of this rank of the default process group, which computes on `device`. A collective.

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
    return Place(dist.get_rank(), size, device, mesh, _sequence_group(cluster.sequence_parallel, size, kind))


def _sequence_group(length: int, size: int, kind: str) -> Any:
    if length == 1:
        return None
    grid = init_device_mesh(kind, (size // length, length), mesh_dim_names=("data", "sequence"))
    return grid["sequence"].get_group()
