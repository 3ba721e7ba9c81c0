"""Weights given from outside, such as by a trainer in other processes, copied over those of a model in place.

The invariant: each parameter and buffer is written once, by a tensor of its own shape; anything else is an error.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from agentrl.engine.base import EngineError
from agentrl.models.lora import layers


@torch.no_grad()
def copy_into(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """weights: name and whole tensor, by the names of `model.state_dict()`, read once to the end; what is tied, under
    any one of its names. Raises EngineError; `model` then holds a part of them."""
    if layers(model):
        raise EngineError("the engine's model has an adapter of its own, which whole weights would be merged with")
    state = model.state_dict(keep_vars=True)
    due = {id(tensor): name for name, tensor in state.items()}
    for name, tensor in weights:
        target = state.get(name)
        if target is None:
            raise EngineError(f"the weights do not fit the engine's model: it has no {name}")
        if tensor.shape != target.shape:
            given, own = list(tensor.shape), list(target.shape)
            raise EngineError(f"the weights do not fit the engine's model: {name} is {given}, its own is {own}")
        if due.pop(id(target), None) is None:
            raise EngineError(f"the weights do not fit the engine's model: {name} was given twice")
        target.copy_(tensor)
    if due:
        more = f" (and {len(due) - 1} more)" if len(due) > 1 else ""
        raise EngineError(f"the weights do not fit the engine's model: {min(due.values())} was not given{more}")
