"""The layers of a model compiled, one at a time, for passes of the trainer: norms, gates, rotary positions, residuals
and changes of type become few kernels.

Attention over packed rows stays a call between two compiled parts of a layer. All layers share one compilation, which
serves rows of any length.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agentrl.compute.activation_checkpointing import blocks_of
from agentrl.compute.hf_attention import attention_is_replaced
from agentrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DESCRIPTION = "layers compiled"
"""Part of the description of a forward that uses it."""
KINDS = 64
"""Maximum compilations of one function: with and without gradients, of each model and type."""


def compile_layers(model: "PreTrainedModel") -> None:
    """Compile the layers of `model`, in place, for passes in which its attention is replaced; an engine that shares the
    module goes on as before."""
    for block in blocks_of(model):
        _wrap(block)


def _wrap(block: nn.Module) -> None:
    once = block.forward
    compiled = torch.compile(once, dynamic=True)

    def forward(*arguments: object, **options: Any) -> Any:
        if not attention_is_replaced():
            return once(*arguments, **options)
        settings: Any = torch._dynamo.config  # of this thread: recomputed layers run in autograd's
        settings.recompile_limit = max(settings.recompile_limit, KINDS)
        return compiled(*arguments, **options)

    block.forward = forward


def cannot(reason: str) -> UserError:
    """The error that layers cannot be compiled, or compute something else then."""
    return UserError(f"model.compile: the layers of this model do not run compiled here ({reason}); set it to false")
