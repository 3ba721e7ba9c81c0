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
    layers: "LayerMeshes | None" = None
    """How ranks divide layers; None: each computes whole layers."""

    @property
    def shards(self) -> int:
        """Number of ranks that together hold one copy of the weights."""
        return int(self.mesh.shape[-1])


@dataclass(frozen=True, slots=True)
class LayerMeshes:
    """The meshes of ranks that divide the matrices or the experts of each layer."""

    dense: DeviceMesh
    """[shard, tensor], with several copies [replicate, shard, tensor]: what divides a layer's matrices lies in
    neighbouring ranks, which have the same data."""
    experts: DeviceMesh
    """[shard, expert], or [replicate, shard, expert]: the neighbours of a row divide all experts; those of a column
    have the same experts."""

    @property
    def tensor(self) -> int:
        """Number of ranks that divide a matrix."""
        return int(self.dense.shape[-1])

    @property
    def expert(self) -> int:
        """Number of ranks that divide the experts."""
        return int(self.experts.shape[-1])


def make_context(cluster: ClusterSection, device: torch.device) -> ParallelContext:
    """The position of this rank of the default process group, which computes on `device`. A collective.

    Raises UserError: a number of ranks that one of the cluster's sizes does not divide.
    """
    size = dist.get_world_size()
    shard = cluster.shard or size
    for key, value in (
        ("shard", shard),
        ("sequence_parallel", cluster.sequence_parallel),
        ("tensor_parallel", cluster.tensor_parallel),
        ("expert_parallel", cluster.expert_parallel),
    ):
        if size % value:
            raise UserError(f"cluster.{key} is {value}, which does not divide the {size} workers")
    kind = device.type
    if shard == size:
        mesh = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(kind, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    group = _sequence_group(cluster.sequence_parallel, size, kind)
    return ParallelContext(dist.get_rank(), size, device, mesh, group, _layer_meshes(cluster, size, shard, kind))


def _layer_meshes(cluster: ClusterSection, size: int, shard: int, kind: str) -> LayerMeshes | None:
    tensor, expert = cluster.tensor_parallel, max(cluster.tensor_parallel, cluster.expert_parallel)
    if expert == 1:
        return None

    def mesh(ranks: int, name: str) -> DeviceMesh:
        if shard == size:
            return init_device_mesh(kind, (size // ranks, ranks), mesh_dim_names=("shard", name))
        shape = (size // shard, shard // ranks, ranks)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard", name))

    return LayerMeshes(mesh(tensor, "tensor"), mesh(expert, "expert"))


def _sequence_group(length: int, size: int, kind: str) -> dist.ProcessGroup | None:
    if length == 1:
        return None
    grid = init_device_mesh(kind, (size // length, length), mesh_dim_names=("data", "sequence"))
    return grid["sequence"].get_group()
