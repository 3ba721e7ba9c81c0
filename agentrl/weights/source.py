"""What is sent: a model's weights, one whole tensor at a time, by the names that engines load."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from agentrl.models.lora import merged, plain_tensors
from agentrl.models.qwen3 import Qwen3
from agentrl.weights.feed import Feed
from agentrl.weights.request import WeightPublisher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NamedTensor = tuple[str, Tensor]
"""Name and whole tensor; dtype, shape and size in bytes are the tensor's own."""
STAMP_VALUES = 32
"""Values of each parameter that the stamp of a model is made of."""


class WeightSource(Protocol):
    """The trainer's weights. An engine that keeps a copy iterates over (name, whole tensor) and must read to the end;
    one of servers has `publisher`, where there is one, send the shards from the processes that hold them."""

    repeatable: bool = False
    """Whether the tensors may be read more than once."""
    publisher: WeightPublisher | None = None
    """Sends them from other processes; None: only who iterates has them."""
    feed: Feed | None = None
    """Other ranks that read in step and fill buckets of their own; None: there are none."""

    def __iter__(self) -> Iterator[NamedTensor]: ...

    def intact(self) -> bool:
        """Whether the weights are still those that they were when this was made."""
        return True


class ModelWeights(WeightSource):
    """The weights of a transformers module. A tied tensor is given once. An adapter is merged into the weights that it
    belongs to, or left out with `base`.

    Sharded parameters (FSDP2) are gathered one by one, so the whole model never exists twice. Every rank must read them
    once and to the end, in step with the others: rank 0 publishes and then calls `finish`, the rest call `follow`.
    Without shards each iteration reads them anew.

    stamp: hash of the weights that these must be, as of an earlier `ModelWeights` (None: as they are now). By it an
    optimizer step in another thread is noticed, before or while they are sent. own_names: names of the module's state
    dict instead of those of checkpoints: transformers keeps the experts of a layer as one tensor, and servers load them
    one by one. beat: called after each tensor. feed: see `WeightSource`.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        stamp: str | None = None,
        base: bool = False,
        own_names: bool = False,
        beat: Callable[[], None] = lambda: None,
        feed: Feed | None = None,
    ) -> None:
        self._model, self._base, self._beat, self.feed = model, base, beat, feed
        self.stamp = stamp or self._hash()
        self.repeatable = not any(hasattr(p, "full_tensor") for p in model.parameters())
        self._renamed = not own_names and _needs_conversion(model)
        self._once = None if self.repeatable else _SharedIterator(self._read())

    def __iter__(self) -> Iterator[NamedTensor]:
        return self._read() if self._once is None else self._once

    def intact(self) -> bool:
        """Whether the weights are those of the time when this was made."""
        return self._hash() == self.stamp

    def finish(self) -> None:
        """Read what nobody has read of sharded weights: the other ranks do."""
        if self._once is not None:
            for _ in self._once:
                pass

    follow = finish

    def _read(self) -> Iterator[NamedTensor]:
        if self.feed is not None:
            self.feed.reading()
        for name, tensor, adapted in _untied(self._model):
            full = whole(tensor) if adapted is None or self._base else merged(adapted, whole)
            if self._renamed:
                yield from as_saved(self._model, {name: full}).items()
            else:
                yield name, full
            self._beat()

    def _hash(self) -> str:
        """Hash a few values of every parameter (of this rank's shard of it): every optimizer step changes them."""
        tensors = (t for _, t, _ in plain_tensors(self._model)) if self._base else self._model.parameters()
        heads = [getattr(t, "_local_tensor", t).detach().reshape(-1)[:STAMP_VALUES].float() for t in tensors]
        return hashlib.sha256(torch.cat(heads).cpu().numpy().tobytes()).hexdigest()


class Rounded(WeightSource):
    """`weights` with matrices in `dtype`, in which servers hold them: half the bytes where the trainer keeps float32.
    Vectors, which servers may hold in float32, stay."""

    def __init__(self, weights: WeightSource, dtype: torch.dtype) -> None:
        self._weights, self._dtype, self.repeatable, self.feed = weights, dtype, weights.repeatable, weights.feed
        if self.feed is not None:
            self.feed.dtype = dtype  # the ranks that read in step round, too

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._weights:
            yield name, tensor.to(self._dtype) if tensor.dim() > 1 and tensor.dtype == torch.float32 else tensor

    def intact(self) -> bool:
        """Whether the underlying weights are intact."""
        return self._weights.intact()


class _SharedIterator:
    """An iterator that several threads may read, one after another."""

    def __init__(self, items: Iterator[NamedTensor]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[NamedTensor]:
        return self

    def __next__(self) -> NamedTensor:
        with self._lock:
            return next(self._items)


def _untied(model: "PreTrainedModel") -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, tensor, and the layer whose adapter is to be merged into it (None: there is none)."""
    seen: set[int] = set()
    for name, tensor, adapted in plain_tensors(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor, adapted


def _needs_conversion(model: "PreTrainedModel") -> bool:
    """Whether any weight has another name in checkpoints. All are asked about at once, since transformers walks
    all modules for each question."""
    names = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor, _ in _untied(model)}
    return as_saved(model, names).keys() != names.keys()


def as_saved(model: "PreTrainedModel", state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a part of a transformers module's state dict to what `save_pretrained` writes."""
    if isinstance(model, Qwen3) or not hasattr(model, "config"):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, state)
    return found


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (a collective), detached."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor.detach()
    with torch.no_grad(), _current_device(tensor.device):
        full: Tensor = gather().detach()
    return full


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    """Threads start on the first GPU, whichever is theirs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def buckets(weights: Iterable[NamedTensor], limit: int) -> Iterator[list[NamedTensor]]:
    """Group consecutive tensors into lists of at most `limit` bytes; a larger tensor is a list of its own."""
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


def fed_buckets(weights: WeightSource, feed: Feed, ahead: int) -> Iterator[tuple[int, bool, list[NamedTensor]]]:
    """Yield number, whether it belongs on the GPU, and tensors of each bucket that this rank is to fill for another
    one, by that one's rule. ahead: buckets that may be filled before servers have copied the first of them."""
    rule = feed.rule()
    if rule is None:
        return
    source = weights if rule["dtype"] is None else Rounded(weights, getattr(torch, rule["dtype"]))
    for index, batch in enumerate(buckets(source, rule["limit"])):
        feed.wait(index - ahead)
        yield index, rule["gpu"], batch
    feed.wait()
