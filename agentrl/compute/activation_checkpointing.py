"""Activation checkpointing (arXiv:1604.06174): a layer keeps only its input, and runs again in the backward pass."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from agentrl.compute.hf_attention import checkpoint_contexts
from agentrl.models.shape import longest_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute(model: "PreTrainedModel", offload: bool = False) -> None:
    """Make the layers of `model` recompute their activations in the backward pass.

    offload: keep the inputs of the layers in CPU memory until then. A layer runs again with the attention of its first
    pass, although the block that replaced the attention is left by then.
    """
    for block in blocks_of(model):
        _wrap(block, model, offload)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are recomputed, and sharded, one at a time: the modules that transformers must not split,
    else its `longest_list`."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in kinds and not _has_table(m)]
    return found or longest_list(model)


def _has_table(module: nn.Module) -> bool:
    """Whether the module holds embeddings, which may be tied to the output layer, outside of all blocks."""
    return any(isinstance(inner, nn.Embedding) for inner in module.modules())


def _wrap(block: nn.Module, model: "PreTrainedModel", offload: bool) -> None:
    once = block.forward

    def forward(*arguments: object, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*arguments, **options)
        around = partial(checkpoint_contexts, model)
        with _on_host([*arguments, *options.values()]) if offload else nullcontext():
            return checkpoint(once, *arguments, use_reentrant=False, context_fn=around, **options)

    block.forward = forward


def _on_host(arguments: Sequence[object]) -> saved_tensors_hooks:
    """Keep tensors saved for the backward pass in CPU memory if they have the shape of the layer's input, the first
    tensor of `arguments`. Positions and others that all layers share stay on their device."""
    shape = next(each.shape for each in arguments if isinstance(each, Tensor))

    def pack(saved: Tensor) -> tuple[torch.device, Tensor]:
        return saved.device, saved.to("cpu") if saved.shape == shape and saved.is_floating_point() else saved

    return saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0]))
