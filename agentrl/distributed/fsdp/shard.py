"""Apply FSDP2 to a computation: to each block, then to the root, whose own forward reads what lies outside of blocks.

The hooks of FSDP2 gather a module's weights around its `forward`, and only there. So the root is called, and
embeddings, final norm and output layer are whole inside its forward and nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from agentrl.compute.forward import computed_in
from agentrl.distributed.fsdp.mesh import LayerMeshes, ParallelContext
from agentrl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Options:
    """What a recipe says about sharding."""

    compute: torch.dtype | None = None
    """Dtype of matrix products; None: that of the weights."""
    offload: bool = False
    """Keep shards, gradients and optimizer state on the CPU."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Options":
        """Read the options from a recipe."""
        return cls(computed_in(recipe.model), "parameters" in recipe.cluster.offload)


class Root(nn.Module):
    """Module whose forward is `computation`: any callable over `model`, which is registered here for FSDP2 to find its
    parameters.

    After a pass without gradients the weights are resharded at once; with gradients, in the backward pass.
    """

    def __init__(self, model: nn.Module, computation: Any) -> None:
        super().__init__()
        self.model, self.computation = model, computation

    def forward(self, *arguments: object, **options: object) -> Any:
        """Call the computation, with all weights outside of blocks gathered."""
        found = self.computation(*arguments, **options)
        return found.clone() if isinstance(found, Tensor) else found  # FSDP2 hooks onto it, which no view survives

    def __call__(self, *arguments: object, **options: object) -> Any:
        found = super().__call__(*arguments, **options)
        if not torch.is_grad_enabled() and isinstance(self, FSDPModule):
            self.reshard()
        return found


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    context: ParallelContext,
    options: Options,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Apply FSDP2 in place, on any device. Gradients are averaged over all ranks, in float32.

    experts: modules inside of blocks whose experts are divided among ranks. The gradient of an expert comes from the
    data of all ranks that send to it, so it is the sum over ranks that is divided by the number of those with data of
    their own.
    """
    precision = MixedPrecisionPolicy(param_dtype=options.compute, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda") if options.offload else OffloadPolicy()
    settings: dict[str, Any] = {"mesh": context.mesh, "mp_policy": precision, "offload_policy": offload}
    inside, layers = settings, context.layers
    if layers is not None:
        for module in experts:
            mesh = _without_last(layers.experts)
            apart: Any = fully_shard(module, **{**settings, "mesh": mesh, "shard_placement_fn": _undivided})
            apart.set_gradient_divide_factor(float(context.size // layers.tensor))
            if mesh.shape[-1] > 1:  # only NCCL divides by other numbers than that of its ranks
                apart.set_force_sum_reduction_for_comms(True)
        inside = {**settings, "shard_placement_fn": _placement(layers)}
    for block in reversed(blocks):  # FSDP2 wants what lies inside of another first
        fully_shard(block, **inside)
    fully_shard(root, **settings)


def _placement(layers: LayerMeshes) -> Callable[[nn.Parameter], Any]:
    """How FSDP2 cuts the parameters of a block: divided matrices over the ranks that have the same part of them, and
    all others over all ranks, among which they could come apart otherwise by rounding."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    mesh = _without_last(layers.dense)
    among = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def placed(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(_undivided(parameter), among) if isinstance(parameter, DTensor) else None

    return placed


def _without_last(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions over which ranks have data of their own."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]]


def _undivided(parameter: nn.Parameter) -> Shard:
    """Cut the first dimension that other ranks do not divide already, if there is one."""
    divided = {p.dim % parameter.dim() for p in getattr(parameter, "placements", ()) if isinstance(p, Shard)}
    return Shard(next((d for d in range(parameter.dim()) if d not in divided), 0))
