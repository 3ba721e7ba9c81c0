"""Activation checkpointing (arXiv:1604.06174): a layer keeps its input alone, and runs again in the backward pass."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agentrl.compute.hf_attention import recomputing


def recompute(model: Any) -> None:
    """Make the layers of `model` recompute their activations in the backward pass.


    By then the block that replaced the attention is left; each layer remembers its attention.
    """
    for block in blocks_of(model):
        _wrap(block, model)


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


def _wrap(block: nn.Module, model: Any) -> None:
    once = block.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*arguments, **options)
        around = partial(recomputing, model)
        return checkpoint(once, *arguments, use_reentrant=False, context_fn=around, **options)

    block.forward = forward
