"""Weights through memory of a GPU that trainer and servers share, for vLLM's weight transfer engine `ipc`.

Written by the protocol of vLLM 0.32 (`packed_tensor.py`), whose own code reads it in the tests; not tried on a GPU.
Each rank of a server opens memory of its own GPU: that of the sender, or of the rank of the trainer there (`Feed`).
"""

import base64
import pickle
from collections.abc import Iterator, Sequence

import torch

from agentrl.containment.threads import in_thread
from agentrl.models.allocator import plain_segments
from agentrl.weights.feed import Feed
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import Layout, WeightServer
from agentrl.weights.source import NamedTensor, WeightSource, buckets, fed_buckets
from agentrl.weights.transports.base import Failures, each
from agentrl.weights.transports.shared_memory import exported

BUCKET_BYTES = 256 << 20


class HandleTransport:
    """Copy a bucket of tensors to memory of its own, have servers copy it from there, and fill it again. bucket_bytes:
    of tensors in one call."""

    name = "from_tensor"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._limit = bucket_bytes

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        """Copy the weights into a buffer, bucket by bucket, and let the servers load them."""
        failures: Failures = {}
        feed = weights.feed
        if feed is not None:
            feed.open(self._limit, True)
        taking = await each(servers, lambda server: _opened(server, feed), failures)
        buffer = PackedBuffer()
        batches: Iterator[list[NamedTensor]] = buckets(weights, self._limit)
        index = 0
        while (batch := await in_thread(next, batches, None)) is not None:
            if taking:
                layout = await in_thread(buffer.fill, batch)

                async def load(
                    server: WeightServer, layout: Layout = layout, flush: bool = flush, index: int = index
                ) -> None:
                    handles = [buffer.handle(server.url)]
                    if feed is not None and (await server.facts()).ranks > 1:
                        offers = await in_thread(feed.offers, server.url, index, _packed(handles[0]))
                        handles = [pickle.loads(base64.b64decode(offer)) for offer in offers]
                    await server.load_packed(layout, handles, flush)

                taking = await each(taking, load, failures)
            if feed is not None:
                feed.taken(index)
            flush, index = False, index + 1
        await each(taking, lambda server: server.end(), failures)  # until then they keep the buffer open
        return failures

    def fill(self, weights: WeightSource, feed: Feed) -> None:
        """Fill a buffer in step with the rank that sends, and offer it; blocks until servers need it no more."""
        buffer = PackedBuffer()
        for index, _, batch in fed_buckets(weights, feed, 1):
            buffer.fill(batch)
            feed.offer(index, _packed(buffer.handle("")))

    async def close(self) -> None:
        """There is nothing to release."""


def _packed(handle: tuple[object, ...]) -> str:
    return base64.b64encode(pickle.dumps(handle)).decode()


async def _opened(server: WeightServer, feed: Feed | None) -> None:
    facts = await server.facts()
    reached = facts.ranks == 1 or (feed is not None and feed.serves(server.url, facts.ranks))
    if facts.transfer != "ipc" or not reached:
        raise WeightUpdateError(
            f"{server.url} opens no memory of the trainer's GPU: it takes a rank of the trainer on the GPU of each of "
            """its ranks, and a start with --weight-transfer-config '{"backend": "ipc"}' and """
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1"
        )
    await server.open_packed()
    await server.begin()


class PackedBuffer:
    """Memory of a GPU that other processes open, each by a handle of its own: they keep it open from bucket to bucket
    (torch frees it once every handle was let go)."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._handles: dict[str, tuple[object, ...]] = {}

    def fill(self, batch: Sequence[NamedTensor]) -> Layout:
        """Copy a bucket one tensor after the other, without gaps. Returns name, dtype and shape in that order. Raises
        WeightUpdateError for tensors that lie on no GPU."""
        ordered = sorted(batch, key=lambda item: -item[1].element_size())  # so that each starts at a multiple of it
        device, size = ordered[0][1].device, sum(tensor.nbytes for _, tensor in ordered)
        if device.type != "cuda":
            raise WeightUpdateError("from_tensor sends vLLM what lies on a GPU; on a CPU use from_disk")
        if size > self._bytes.numel():
            with plain_segments():
                self._bytes = ordered[0][1].new_empty(size, dtype=torch.uint8)
            self._handles.clear()
        start = 0
        for _, tensor in ordered:
            self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            start += tensor.nbytes
        torch.cuda.synchronize(device)
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered]

    def handle(self, url: str) -> tuple[object, ...]:
        """What opens it for the server at `url`: the same until it has to grow."""
        if url not in self._handles:
            self._handles[url] = exported(self._bytes)
        return self._handles[url]
