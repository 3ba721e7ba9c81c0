"""Read the weights of a model on rank 0, and send each rank its shard, one tensor at a time: no other rank ever holds a
whole one."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.checkpoint.gather import Span, part_of
from agentrl.distributed.fsdp.mesh import ParallelContext
from agentrl.models.streamed import NotStreamed, Read

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where rank 0 has the weights from."""

    model: Any
    """Modules whose parameters and buffers `read` gives the values of; nothing else may be done with them."""
    read: Read
    """The value of one of them, on the CPU."""
    known: object = None
    """What the other ranks need to know of the model: small and picklable."""
    note: str = ""
    """What people need to know."""


def open_source(stream: Callable[[], tuple[object, Read]], whole: Callable[[], object]) -> Source:
    """Read the files of a model one tensor at a time by `stream`, or, if that raises NotStreamed because the files hold
    other tensors than the modules do, load the model by `whole`."""
    try:
        model, read = stream()
        note = ""
    except NotStreamed as why:
        model, read = whole(), Tensor.detach
        note = f"read whole by the first ({why})"
        _log.warning("the model is %s", note)
    return Source(model, read, getattr(model, "generation_config", None), note)


def share(value: T, context: ParallelContext) -> T:
    """Broadcast a small picklable object from rank 0 to all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=context.device)
    return box[0]


def everywhere(value: bool, context: ParallelContext) -> bool:
    """Whether `value` is true on all ranks."""
    found = torch.tensor([int(value)], device=context.device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


@torch.no_grad()
def fill(model: nn.Module, source: Source | None, context: ParallelContext) -> None:
    """Set every parameter, buffer and other tensor of `model` (sharded, uninitialised) to its value in `source` (None
    except on rank 0), one at a time."""
    values = dict(source.model.named_parameters()) if source is not None else {}
    spans = _spans(model, context)
    for name, parameter in model.named_parameters():
        whole = source.read(values[name]) if source is not None else None
        if isinstance(parameter, DTensor):
            _scatter(parameter, whole, context, [of_rank[name] for of_rank in spans])
        else:
            _broadcast(parameter, whole, context)
        del whole  # nobody else keeps it
    stored = _unsharded(source.model) if source is not None else {}
    for name, (owner, key, tensor) in _unsharded(model).items():
        target = torch.empty_like(tensor, device=context.device)
        _broadcast(target, source.read(stored[name][2]) if source is not None else None, context)
        setattr(owner, key, target)


def _scatter(parameter: Any, whole: Tensor | None, context: ParallelContext, spans: list[Span]) -> None:
    """Send each rank its part of a tensor. spans: of the ranks; some may be short, or empty."""
    largest = max(math.prod(sizes) for sizes, _ in spans)
    received = torch.empty(largest, dtype=parameter.dtype, device=context.device)
    parts = None
    if whole is not None:
        whole = whole.to(context.device)
        parts = [_bytes(_padded(whole[_box(span)], largest)) for span in spans]
    dist.scatter(_bytes(received), parts, src=0)
    local = parameter.to_local()
    local.copy_(received[: local.numel()].view(local.shape))


def _spans(model: nn.Module, context: ParallelContext) -> list[dict[str, Span]]:
    """The part of each sharded parameter, by name, that each rank holds. A collective."""
    own = {name: part_of(p) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    found: list[Any] = [None] * context.size
    dist.all_gather_object(found, own)
    return found


def _box(span: Span) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for size, offset in zip(*span, strict=True))


def _padded(part: Tensor, length: int) -> Tensor:
    """The values of `part` in a row of `length`."""
    if part.numel() == length:
        return part.reshape(-1)
    full = part.new_zeros(length)
    full[: part.numel()] = part.reshape(-1)
    return full


def _broadcast(tensor: Tensor, whole: Tensor | None, context: ParallelContext) -> None:
    carried = (
        tensor.detach().to(context.device).contiguous() if whole is None else whole.to(context.device).contiguous()
    )
    dist.broadcast(_bytes(carried), src=0)
    tensor.copy_(carried)


def _bytes(tensor: Tensor) -> Tensor:
    """View the same memory as bytes: not every backend carries every type."""
    return tensor.reshape(-1).view(torch.uint8)


def _unsharded(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """The buffers, and tensors that modules keep as plain attributes: name -> owner, attribute, value."""
    found = {}
    for path, module in model.named_modules():
        own = {**module._buffers, **{k: v for k, v in vars(module).items() if isinstance(v, Tensor)}}
        found.update({f"{path}.{k}": (module, k, v) for k, v in own.items() if v is not None})
    return found
