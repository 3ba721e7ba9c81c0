"""Activation checkpointing (arXiv:1604.06174): a layer keeps its input alone, and runs again in the backward pass."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from agentrl.compute.hf_attention import recomputing


def recompute(model: Any, offload: bool = False) -> None:
    """Make the layers of `model` recompute their activations in the backward pass.

    offload: a layer's input lies in CPU memory until then.

    By then the block that replaced the attention is left; each layer remembers its attention.
    """
    for block in blocks_of(model):
        _wrap(block, model, offload)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are recomputed, and gathered, one at a time: those that transformers says must not be
    split, else the longest list of modules that is in no other list."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in kinds and not _has_table(m)]
    if found:
        return found
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [list(m) for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, key=len, default=[])


def _has_table(module: nn.Module) -> bool:
    """Embeddings may be tied to the output layer, which is outside of every block."""
    return any(isinstance(inner, nn.Embedding) for inner in module.modules())


def _wrap(block: nn.Module, model: Any, offload: bool) -> None:
    once = block.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*arguments, **options)
        around = partial(recomputing, model)
        with _on_host([*arguments, *options.values()]) if offload else nullcontext():
            return checkpoint(once, *arguments, use_reentrant=False, context_fn=around, **options)

    block.forward = forward


def _on_host(arguments: Sequence[Any]) -> saved_tensors_hooks:
    """Keep what is saved in the shape of the first tensor, the layer's input, in CPU memory until the backward pass.
    Positions and the like, which all layers share, stay where they are."""
    shape = next(each.shape for each in arguments if isinstance(each, Tensor))

    def pack(saved: Tensor) -> tuple[torch.device, Tensor]:
        return saved.device, saved.to("cpu") if saved.shape == shape and saved.is_floating_point() else saved

    return saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0]))
