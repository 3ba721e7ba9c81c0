"""Weights through memory that trainer and servers of one machine share: only names and places travel by HTTP."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from agentrl.threads import in_thread
from agentrl.weights.server import WeightServer
from agentrl.weights.source import NamedTensor, buckets
from agentrl.weights.transports.base import Failures, each
from agentrl.weights.transports.bucket import SharedBucket

BUCKET_BYTES = 128 << 20


class FromTensor:
    """One bucket is filled while servers load from the other: twice `bucket_bytes`, or the largest tensor. On a CPU
    their memory is kept from update to update.

    Between GPUs buckets stay on the trainer's (CUDA IPC), which servers must see (CUDA_VISIBLE_DEVICES).
    """

    name = "from_tensor"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._limit = bucket_bytes
        self._buckets = (SharedBucket(), SharedBucket())

    async def send(
        self, version: int, servers: Sequence[WeightServer], weights: Iterable[NamedTensor], flush: bool
    ) -> Failures:
        failures: Failures = {}
        opened = await each(servers, WeightServer.begin, failures)
        await self._send_buckets(opened, buckets(weights, self._limit), failures, flush)
        await each(opened, WeightServer.end, failures)
        return failures

    async def close(self) -> None:
        self._buckets = (SharedBucket(), SharedBucket())

    async def _send_buckets(
        self, servers: list[WeightServer], batches: Iterator[list[NamedTensor]], failures: Failures, flush: bool
    ) -> None:
        gpus = all([(await server.facts()).device == "cuda" for server in servers])
        taking, loading, turn = servers, None, 0
        try:
            while (batch := await in_thread(next, batches, None)) is not None:
                device = batch[0][1].device if gpus else torch.device("cpu")
                payload = await in_thread(self._buckets[turn % 2].fill, batch, device)
                taking = taking if loading is None else await loading
                loading = asyncio.create_task(_load(payload, taking, failures, flush and turn == 0))
                turn += 1
            if loading is not None:
                await loading
        finally:
            if loading is not None:
                loading.cancel()
            for bucket in self._buckets:
                bucket.free("cuda")


async def _load(
    payload: Callable[[], str], servers: list[WeightServer], failures: Failures, flush: bool
) -> list[WeightServer]:
    """The servers that took a bucket."""

    async def load(server: WeightServer) -> None:
        ranks = (await server.facts()).ranks  # each opens the bucket itself
        await server.load_tensors([payload() for _ in range(ranks)], flush)

    return await each(servers, load, failures)
