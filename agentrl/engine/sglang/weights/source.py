"""What is sent: a model's weights, one whole tensor at a time, by the names that servers load."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from agentrl.models.lora import merged, plain_tensors

NamedTensor = tuple[str, Tensor]
STAMPED = 32
"""Values of each parameter that its stamp is made of."""


class ModelWeights:
    """The weights of a transformers module, read anew by each iteration; what is tied is given once, and an adapter is
    merged into the weights that it is of.

    Sharded parameters (FSDP2) are gathered one by one, so the whole model never stands twice: every rank must iterate,
    to the end and in step with the others (rank 0 publishes, the rest call `follow`).

    stamp: what the weights are known by, taken when this is made: by it an update in another thread is found out,
    before or while they are sent. Given, they must still be those that it was taken of.

    repeatable: whether one rank alone may iterate again. Names are those of checkpoints: transformers keeps the experts
    of a layer as one tensor, and servers load them one by one.
    """

    def __init__(self, model: Any, stamp: str | None = None) -> None:
        self._model = model
        self.stamp = stamp or _stamp(model)
        self.repeatable = not any(hasattr(p, "full_tensor") for p in model.parameters())
        self._renamed = _needs_conversion(model)

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor, adapted in _untied(self._model):
            full = whole(tensor) if adapted is None else merged(adapted, whole)
            if self._renamed:
                yield from as_saved(self._model, {name: full}).items()
            else:
                yield name, full

    def intact(self) -> bool:
        """Whether the weights are those of `stamp`."""
        return _stamp(self._model) == self.stamp

    def follow(self) -> None:
        """What ranks other than 0 do while rank 0 publishes."""
        for _ in self:
            pass


def _stamp(model: Any) -> str:
    """A hash of a few values of every parameter (of this rank's part of it): every optimizer step changes it."""
    heads = [getattr(p, "_local_tensor", p).detach().reshape(-1)[:STAMPED].float() for p in model.parameters()]
    return hashlib.sha256(torch.cat(heads).cpu().numpy().tobytes()).hexdigest()


def _untied(model: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """Name, tensor, and the layer whose adapter is to be merged into it (None: there is none)."""
    seen: set[int] = set()
    for name, tensor, adapted in plain_tensors(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor, adapted


def _needs_conversion(model: Any) -> bool:
    """Whether any weight is called otherwise in checkpoints."""
    names = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor, _ in _untied(model)}
    return any(list(as_saved(model, {name: tensor})) != [name] for name, tensor in names.items())


def as_saved(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A part of a transformers module's state dict, as `save_pretrained` would write it."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state) if hasattr(model, "config") else state


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (a collective), detached."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach()


def buckets(weights: Iterable[NamedTensor], limit: int) -> Iterator[list[NamedTensor]]:
    """Runs of tensors of at most `limit` bytes together; a larger tensor stands alone."""
    batch: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch
