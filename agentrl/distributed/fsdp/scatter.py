"""Read the weights of a model on rank 0, and send each rank its shard, one tensor at a time: no other rank ever holds a
whole one."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    for name, parameter in model.named_parameters():
        send = _scatter if isinstance(parameter, DTensor) else _broadcast
        send(parameter, source.read(values[name]) if source is not None else None, context)  # nobody else keeps it
    stored = _unsharded(source.model) if source is not None else {}
    for name, (owner, key, tensor) in _unsharded(model).items():
        target = torch.empty_like(tensor, device=context.device)
        _broadcast(target, source.read(stored[name][2]) if source is not None else None, context)
        setattr(owner, key, target)


def _scatter(parameter: Any, whole: Tensor | None, context: ParallelContext) -> None:
    """Send each rank its shard of a tensor. FSDP2 cuts the first dimension as torch.chunk does: the last shards may be
    short, or empty."""
    rows = -(-parameter.shape[0] // context.shards)
    shape = (rows, *parameter.shape[1:])
    received = torch.empty(shape, dtype=parameter.dtype, device=context.device)
    parts = None
    if whole is not None:
        whole = whole.to(context.device)
        cut = [_padded(whole[i * rows : (i + 1) * rows], shape) for i in range(context.shards)]
        parts = [_bytes(cut[context.shard_of(rank)]) for rank in range(context.size)]
    dist.scatter(_bytes(received), parts, src=0)
    local = parameter.to_local()
    local.copy_(received[: len(local)])


def _padded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    if part.shape == shape:
        return part.contiguous()
    full = part.new_zeros(shape)
    full[: len(part)] = part
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
