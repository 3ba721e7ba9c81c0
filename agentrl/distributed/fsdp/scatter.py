"""Tensors of rank 0 dealt out one by one, each shard to the rank that holds it: nobody else sees a whole one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.distributed.fsdp.mesh import Place
from agentrl.distributed.fsdp.source import Source


def share(value: Any, place: Place) -> Any:
    """What rank 0 has, to all: a small picklable object."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=place.device)
    return box[0]


def everywhere(value: bool, place: Place) -> bool:
    """Whether it holds on all ranks."""
    found = torch.tensor([int(value)], device=place.device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


@torch.no_grad()
def fill(model: nn.Module, source: Source | None, place: Place) -> None:
    """Give every parameter, buffer and other tensor of `model` (sharded, uninitialised) the value that it has in
    `source`, which rank 0 has and the others do not (None): one is read, and dealt out, at a time."""
    values = dict(source.model.named_parameters()) if source is not None else {}
    for name, parameter in model.named_parameters():
        deal = _scatter if isinstance(parameter, DTensor) else _broadcast
        deal(parameter, source.read(values[name]) if source is not None else None, place)  # nobody else keeps it
    places, kept = _unsharded(model), _unsharded(source.model) if source is not None else {}
    for name, (owner, key, tensor) in places.items():
        target = torch.empty_like(tensor, device=place.device)
        _broadcast(target, source.read(kept[name][2]) if source is not None else None, place)
        setattr(owner, key, target)


def _scatter(parameter: Any, whole: Tensor | None, place: Place) -> None:
    """FSDP2 cuts the first dimension as torch.chunk does: the last shards may be short, or empty."""
    rows = -(-parameter.shape[0] // place.shards)
    shape = (rows, *parameter.shape[1:])
    received = torch.empty(shape, dtype=parameter.dtype, device=place.device)
    parts = None
    if whole is not None:
        whole = whole.to(place.device)
        cut = [_padded(whole[i * rows : (i + 1) * rows], shape) for i in range(place.shards)]
        parts = [_bytes(cut[place.shard_of(rank)]) for rank in range(place.size)]
    dist.scatter(_bytes(received), parts, src=0)
    local = parameter.to_local()
    local.copy_(received[: len(local)])


def _padded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    if part.shape == shape:
        return part.contiguous()
    full = part.new_zeros(shape)
    full[: len(part)] = part
    return full


def _broadcast(tensor: Tensor, whole: Tensor | None, place: Place) -> None:
    carried = tensor.detach().to(place.device).contiguous() if whole is None else whole.to(place.device).contiguous()
    dist.broadcast(_bytes(carried), src=0)
    tensor.copy_(carried)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: not every backend carries every type."""
    return tensor.reshape(-1).view(torch.uint8)


def _unsharded(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Buffers, and tensors that modules keep as plain attributes: owner, attribute and value by name."""
    found = {}
    for path, module in model.named_modules():
        own = {**module._buffers, **{k: v for k, v in vars(module).items() if isinstance(v, Tensor)}}
        found.update({f"{path}.{k}": (module, k, v) for k, v in own.items() if v is not None})
    return found
