"""Weights through memory that trainer and servers of one machine share: only names and offsets travel by HTTP.

Shared memory on a CPU, CUDA IPC between GPUs. The payload is the pickle that the server's restricted reader admits: one
flat tensor of bytes, and for each weight its name, shape, dtype and offsets. It names no class of the server's, so the
trainer needs no installed sglang.
"""

import asyncio
import base64
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions as _reductions

from agentrl.containment.threads import in_thread
from agentrl.models.allocator import plain_segments
from agentrl.weights.feed import Feed
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import WeightServer
from agentrl.weights.source import NamedTensor, WeightSource, buckets, fed_buckets
from agentrl.weights.transports.base import Failures, each

reductions: Any = _reductions  # torch leaves it untyped
BUCKET_BYTES, GPU_BUCKET_BYTES = 128 << 20, 512 << 20
"""Each bucket is a request to every server: 30 for a model of 7B parameters in bfloat16 from a GPU."""
ALIGNMENT = 16
"""Bytes; a tensor of any dtype may start at a multiple."""
PLAIN_VERSION = 2


class SharedMemoryTransport:
    """Fill one bucket while servers load from the other: takes twice `bucket_bytes` (None: `BUCKET_BYTES`, of a GPU
    `GPU_BUCKET_BYTES`), or twice the largest tensor. On a CPU that memory is kept from update to update.

    Between GPUs buckets stay on the trainer's GPU (CUDA IPC), which servers must see (CUDA_VISIBLE_DEVICES): for each
    rank of a server on its own, where the trainer has a rank there (`Feed`).
    """

    name = "from_tensor"

    def __init__(self, bucket_bytes: int | None = None) -> None:
        self._limit = bucket_bytes
        self._buckets = (SharedBucket(), SharedBucket())

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        """Copy the weights into shared buckets, and let the servers load them."""
        failures: Failures = {}
        gpus = all([(await server.facts()).device == "cuda" for server in servers])
        limit = self._limit or (GPU_BUCKET_BYTES if gpus else BUCKET_BYTES)
        if weights.feed is not None:
            weights.feed.open(limit, gpus)
        opened = await each(servers, lambda server: server.begin(), failures)
        await self._send_buckets(opened, buckets(weights, limit), failures, flush, gpus, weights.feed)
        await each(opened, lambda server: server.end(), failures)
        return failures

    def fill(self, weights: WeightSource, feed: Feed) -> None:
        """Fill buckets in step with the rank that sends, and offer them to it; blocks until servers need none."""
        try:
            for index, gpu, batch in fed_buckets(weights, feed, len(self._buckets)):
                device = batch[0][1].device if gpu else torch.device("cpu")
                feed.offer(index, self._buckets[index % 2].fill(batch, device)())
        finally:
            for bucket in self._buckets:
                bucket.free("cuda")

    async def close(self) -> None:
        """Release the shared buckets."""
        self._buckets = (SharedBucket(), SharedBucket())

    async def _send_buckets(
        self,
        servers: list[WeightServer],
        batches: Iterator[list[NamedTensor]],
        failures: Failures,
        flush: bool,
        gpus: bool,
        feed: Feed | None,
    ) -> None:
        taking, loading, index = servers, None, 0
        try:
            while (batch := await in_thread(next, batches, None)) is not None:
                device = batch[0][1].device if gpus else torch.device("cpu")
                payload = await in_thread(self._buckets[index % 2].fill, batch, device)
                taking = taking if loading is None else await loading
                loading = asyncio.create_task(_load(payload, taking, failures, flush and index == 0, feed, index))
                index += 1
            if loading is not None:
                await loading
        finally:
            if loading is not None:
                loading.cancel()
            for bucket in self._buckets:
                bucket.free("cuda")


async def _load(
    payload: Callable[[], str],
    servers: list[WeightServer],
    failures: Failures,
    flush: bool,
    feed: Feed | None,
    index: int,
) -> list[WeightServer]:
    """The servers that took a bucket."""

    async def load(server: WeightServer) -> None:
        facts = await server.facts()
        if feed is not None and feed.serves(server.url, facts.ranks):
            payloads = await in_thread(feed.offers, server.url, index, payload())
        elif facts.machines > 1:
            raise WeightUpdateError(
                f"{server.url} computes on {facts.machines} machines: from_tensor takes a rank of the trainer at the "
                "place of each of its ranks; leave engine.args.weights at auto"
            )
        else:
            payloads = [payload() for _ in range(facts.ranks)]  # each opens the bucket itself
        await server.load_tensors(payloads, flush)

    took = await each(servers, load, failures)
    if feed is not None:
        feed.taken(index)
    return took


class SharedBucket:
    """Memory for one bucket of tensors that other processes of this machine open; a server has copied it when it
    answers.

    On a CPU it is used again for each bucket: it lives in the system's shared memory under a name, freed when the last
    process that opened it lets go. On a GPU it is new for each, which costs torch nothing: each time that torch shares
    memory with another process it wraps it once more, and frees what it wrapped with it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, batch: Sequence[NamedTensor], device: torch.device) -> Callable[[], str]:
        """Copy `batch` to memory of `device`. Returns a function that makes a payload (base64): each process that opens
        the bucket needs one of its own."""
        layout, size = [], 0
        for name, tensor in batch:
            layout.append(_entry(name, tensor, size))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._bytes.numel() or device.type != "cpu" or not self._bytes.is_cpu:
            self.free()
            self._bytes = _allocate(size, device)
        for entry, (_, tensor) in zip(layout, batch, strict=True):
            target = self._bytes[entry.start_idx : entry.end_idx].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        content = {"flattened_tensor": self._bytes[:size], "metadata": layout}
        return lambda: base64.b64encode(_dump(content)).decode()

    def free(self, device: str = "") -> None:
        """Free the memory; with `device`, only where it is of that kind."""
        if device in ("", self._bytes.device.type):
            self._bytes = torch.empty(0, dtype=torch.uint8)


def _entry(name: str, tensor: Tensor, start: int) -> SimpleNamespace:
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
    os.set_inheritable(2, False)  # torch's helper lives as long as the servers: `agentrl ... 2>&1 | tee` would hang
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(size)
    finally:
        os.set_inheritable(2, inherited)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _dump(content: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(content)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickle shared memory by its name, whatever torch's process-wide sharing strategy."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _reduce_cuda(value) if value.is_cuda else _reduce_cpu(value)
        if isinstance(value, torch.TypedStorage):
            return reductions.rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            storage: Any = value
            manager, handle, size = storage._share_filename_cpu_()
            storage._shared_incref()
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, size)
        return NotImplemented


def _reduce_cpu(tensor: Tensor) -> tuple[object, ...]:
    layout = (tensor.storage_offset(), tensor.size(), tensor.stride(), False)
    typed_storage: Any = torch.storage.TypedStorage
    typed = typed_storage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
    return reductions.rebuild_tensor, (torch.Tensor, typed, layout)


def _reduce_cuda(tensor: Tensor) -> tuple[object, ...]:
    """Pickle as torch does, with the device by its UUID: the server may number the devices differently."""
    return reductions.rebuild_cuda_tensor, exported(tensor)


def exported(tensor: Tensor) -> tuple[object, ...]:
    """The arguments of torch's `rebuild_cuda_tensor`, by which another process opens a tensor of a GPU; the
    seventh is the GPU's UUID. One process may open it, as often as it likes before it lets go: torch counts each call
    here as one that holds the memory."""
    _, arguments = reductions.reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    handle = readable(arguments[7]) if isinstance(arguments[7], bytes) else arguments[7]
    return (*arguments[:6], uuid, handle, *arguments[8:])


def readable(handle: bytes) -> bytes:
    """A handle of CUDA IPC that older versions of torch read too. Its first byte is the version of its layout, 3
    since torch 2.13, its second the kind of memory; that of plain memory (`c`) is laid out as in version 2, and a
    reader refuses only what is newer than itself."""
    plain = len(handle) > 1 and handle[0] > PLAIN_VERSION and handle[1:2] == b"c"
    return bytes([PLAIN_VERSION]) + handle[1:] if plain else handle
