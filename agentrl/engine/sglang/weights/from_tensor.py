"""Weights through memory that trainer and servers of one machine share: only names and places travel by HTTP."""

import asyncio
from collections.abc import Iterable, Sequence

import torch

from agentrl.engine.sglang.weights.server import WeightServer
from agentrl.engine.sglang.weights.shared import SharedBucket
from agentrl.engine.sglang.weights.source import NamedTensor, buckets
from agentrl.engine.sglang.weights.way import Failures, each

BUCKET_BYTES = 256 << 20


class FromTensor:
    """One bucket is in flight; its memory is kept from update to update: `bucket_bytes`, or the largest tensor.

    Between GPUs the bucket stays on the trainer's (CUDA IPC), which servers must see (CUDA_VISIBLE_DEVICES).
    """

    name = "from_tensor"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._limit = bucket_bytes
        self._bucket = SharedBucket()

    async def send(
        self, version: int, servers: Sequence[WeightServer], weights: Iterable[NamedTensor], flush: bool
    ) -> Failures:
        failures: Failures = {}
        taking = opened = await each(servers, WeightServer.begin, failures)
        gpus = all([(await server.facts()).device == "cuda" for server in opened])
        batches = buckets(weights, self._limit)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            if taking:
                taking = await self._send_bucket(batch, gpus, taking, failures, flush)
                flush = False
        await each(opened, WeightServer.end, failures)
        return failures

    async def close(self) -> None:
        self._bucket = SharedBucket()

    async def _send_bucket(
        self, batch: Sequence[NamedTensor], gpus: bool, servers: Sequence[WeightServer], failures: Failures, flush: bool
    ) -> list[WeightServer]:
        """The servers that took it."""
        device = batch[0][1].device if gpus else torch.device("cpu")
        payload = await asyncio.to_thread(self._bucket.fill, batch, device)

        async def load(server: WeightServer) -> None:
            ranks = (await server.facts()).ranks  # each opens the bucket itself
            await server.load_tensors([payload() for _ in range(ranks)], flush)

        return await each(servers, load, failures)
