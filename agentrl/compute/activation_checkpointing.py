"""Activation checkpointing (arXiv:1604.06174): a layer keeps only its input, and runs again in the backward pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from agentrl.compute.hf_attention import checkpoint_contexts
from agentrl.compute.offload import InputsOnHost
from agentrl.models.shape import longest_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute(model: "PreTrainedModel", offload: bool = False) -> None:
    """Make the layers of `model` recompute their activations in the backward pass.

    offload: keep the inputs of the layers in CPU memory until then. A layer runs again with the attention of its first
    pass, although the block that replaced the attention is left by then.
    """
    blocks = blocks_of(model)
    inputs = InputsOnHost(len(blocks)) if offload else None
    for number, block in enumerate(blocks):
        _wrap(block, model, partial(inputs.around, number) if inputs is not None else None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are recomputed, and sharded, one at a time: the modules that transformers must not split,
    else its `longest_list`."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in kinds and not _has_table(m)]
    return found or longest_list(model)


def _has_table(module: nn.Module) -> bool:
    """Whether the module holds embeddings, which may be tied to the output layer, outside of all blocks."""
    return any(isinstance(inner, nn.Embedding) for inner in module.modules())


def _wrap(
    block: nn.Module, model: "PreTrainedModel", hooks: Callable[[Sequence[object]], saved_tensors_hooks | None] | None
) -> None:
    once = block.forward

    def forward(*arguments: object, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*arguments, **options)
        around = partial(checkpoint_contexts, model)
        with (hooks and hooks([*arguments, *options.values()])) or nullcontext():
            return checkpoint(once, *arguments, use_reentrant=False, context_fn=around, **options)

    block.forward = forward
