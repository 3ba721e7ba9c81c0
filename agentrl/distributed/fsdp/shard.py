"""Apply FSDP2 to a computation: to each block, then to the root, whose own forward reads what lies outside of blocks.

The hooks of FSDP2 gather a module's weights around its `forward`, and only there. So the root is called, and
embeddings, final norm and output layer are whole inside its forward and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from agentrl.compute.forward import computed_in
from agentrl.distributed.fsdp.mesh import ParallelContext
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


def shard(root: nn.Module, blocks: Sequence[nn.Module], context: ParallelContext, options: Options) -> None:
    """Apply FSDP2 in place, on any device. Gradients are averaged over all ranks, in float32."""
    precision = MixedPrecisionPolicy(param_dtype=options.compute, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda") if options.offload else OffloadPolicy()
    settings: dict[str, Any] = {"mesh": context.mesh, "mp_policy": precision, "offload_policy": offload}
    for block in reversed(blocks):  # FSDP2 wants what lies inside of another first
        fully_shard(block, **settings)
    fully_shard(root, **settings)
