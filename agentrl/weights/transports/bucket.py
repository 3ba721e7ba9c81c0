"""A bucket of tensors that another process of this machine can open: shared memory on a CPU, CUDA IPC on a GPU.

The payload is the pickle that the server's restricted reader admits: one flat tensor of bytes, and for each weight its
name, shape, dtype and place. No class of the server is named in it, so the trainer needs no installed sglang.
"""

import base64
import io
import os
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agentrl.weights.source import NamedTensor
from agentrl.weights.transports.segments import plain_segments

ALIGNMENT = 16  # bytes: every dtype may begin there


class SharedBucket:
    """Memory for one bucket: what a server opened, it has copied before it answers.

    On a CPU it is used again for each: it lives in the system's shared memory under a name, freed when the last process
    that opened it lets go. A GPU's is new for each, which costs torch nothing: each time that torch hands memory to
    another process it wraps it once more, and frees what it wrapped with it.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, batch: Sequence[NamedTensor], device: torch.device) -> Callable[[], str]:
        """Copy `batch` to memory of `device`. The result makes a payload (base64): each process that opens it needs one
        of its own."""
        places, size = [], 0
        for name, tensor in batch:
            places.append(_place(name, tensor, size))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._bytes.numel() or device.type != "cpu" or not self._bytes.is_cpu:
            self.free()
            self._bytes = _allocate(size, device)
        for place, (_, tensor) in zip(places, batch, strict=True):
            target = self._bytes[place.start_idx : place.end_idx].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        content = {"flattened_tensor": self._bytes[:size], "metadata": places}
        return lambda: base64.b64encode(_dump(content)).decode()

    def free(self, device: str = "") -> None:
        """Let go of the memory, or only of that of a kind of device."""
        if device in ("", self._bytes.device.type):
            self._bytes = torch.empty(0, dtype=torch.uint8)


def _place(name: str, tensor: Tensor, start: int) -> SimpleNamespace:
    end = start + tensor.nbytes
    shape = tuple(tensor.shape)
    return SimpleNamespace(
        name=name, shape=shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
    )


def _allocate(size: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        with plain_segments():
            return torch.empty(size, dtype=torch.uint8, device=device)
    inherited = os.get_inheritable(2)
    os.set_inheritable(
        2, False
    )  # torch's helper process lives as long as the servers: `agentrl ... 2>&1 | tee` would hang
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(size)
    finally:
        os.set_inheritable(2, inherited)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _dump(content: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(content)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """By name what is in shared memory; without touching torch's process-wide sharing strategy."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return _reduce_cuda(thing) if thing.is_cuda else _reduce_cpu(thing)
        if isinstance(thing, torch.TypedStorage):
            return reductions.rebuild_typed_storage, (thing._untyped_storage, thing.dtype)
        if isinstance(thing, torch.UntypedStorage):
            manager, handle, size = thing._share_filename_cpu_()
            thing._shared_incref()
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, size)
        return NotImplemented


def _reduce_cpu(tensor: Tensor) -> Any:
    layout = (tensor.storage_offset(), tensor.size(), tensor.stride(), False)
    typed = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    return reductions.rebuild_tensor, (torch.Tensor, typed, layout)


def _reduce_cuda(tensor: Tensor) -> Any:
    """As torch does, with the device by its UUID: the server may number the devices differently."""
    _, arguments = reductions.reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return reductions.rebuild_cuda_tensor, (*arguments[:6], uuid, *arguments[7:])
