"""What is sent: a model's weights, one whole tensor at a time, by the names that servers load."""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from agentrl.models.lora import merged, plain_tensors

NamedTensor = tuple[str, Tensor]
STAMPED = 32
"""Values of each parameter that its stamp is made of."""


class ModelWeights:
    """The weights of a transformers module; what is tied is given once, and an adapter is merged into the weights that
    it is of, or with `base` left out.

    Sharded parameters (FSDP2) are gathered one by one, so the whole model never stands twice. Every rank must read them
    once and to the end, in step with the others: rank 0 publishes and then calls `finish`, the rest call `follow`.
    Without shards each iteration reads them anew.

    stamp: what the weights are known by, taken when this is made: by it an update in another thread is found out,
    before or while they are sent. Given, they must still be those that it was taken of.

    repeatable: whether they may be read again. Names are those of checkpoints: transformers keeps the experts of a
    layer as one tensor, and servers load them one by one. own_names: those of the state dict, for another such module.
    """

    def __init__(self, model: Any, stamp: str | None = None, base: bool = False, own_names: bool = False) -> None:
        self._model, self._base = model, base
        self.stamp = stamp or self._stamped()
        self.repeatable = not any(hasattr(p, "full_tensor") for p in model.parameters())
        self._renamed = not own_names and _needs_conversion(model)
        self._only = None if self.repeatable else _Reading(self._read())

    def __iter__(self) -> Iterator[NamedTensor]:
        return self._read() if self._only is None else self._only

    def intact(self) -> bool:
        """Whether the weights are those of `stamp`."""
        return self._stamped() == self.stamp

    def finish(self) -> None:
        """Read what nobody has read of sharded weights: the other ranks do."""
        if self._only is not None:
            for _ in self._only:
                pass

    follow = finish

    def _read(self) -> Iterator[NamedTensor]:
        for name, tensor, adapted in _untied(self._model):
            full = whole(tensor) if adapted is None or self._base else merged(adapted, whole)
            if self._renamed:
                yield from as_saved(self._model, {name: full}).items()
            else:
                yield name, full

    def _stamped(self) -> str:
        """A hash of a few values of every parameter (of this rank's part of it): every optimizer step changes it."""
        tensors = (t for _, t, _ in plain_tensors(self._model)) if self._base else self._model.parameters()
        heads = [getattr(t, "_local_tensor", t).detach().reshape(-1)[:STAMPED].float() for t in tensors]
        return hashlib.sha256(torch.cat(heads).cpu().numpy().tobytes()).hexdigest()


class _Reading:
    """An iterator that several threads may read, one after another."""

    def __init__(self, items: Iterator[NamedTensor]) -> None:
        self._items, self._turn = items, threading.Lock()

    def __iter__(self) -> Iterator[NamedTensor]:
        return self

    def __next__(self) -> NamedTensor:
        with self._turn:
            return next(self._items)


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
    if gather is None:
        return tensor.detach()
    with torch.no_grad(), _on(tensor.device):
        return gather().detach()


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Threads begin on the first GPU, whichever is theirs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
