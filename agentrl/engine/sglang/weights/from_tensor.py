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
    """One bucket is in flight; its memory is kept from update to update, `bucket_bytes` or the largest tensor."""

    name = "from_tensor"

    def __init__(self, device: torch.device | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._limit = bucket_bytes
        self._bucket = SharedBucket(device)

    async def send(self, version: int, servers: Sequence[WeightServer], weights: Iterable[NamedTensor]) -> Failures:
        failures: Failures = {}
        opened = await each(servers, WeightServer.begin, failures)
        taking = opened
        batches = buckets(weights, self._limit)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            payload = await asyncio.to_thread(self._bucket.fill, batch)

            async def load(server: WeightServer) -> None:
                ranks = (await server.facts()).ranks  # each opens the bucket itself
                await server.load_tensors([payload() for _ in range(ranks)])  # noqa: B023 - called at once

            taking = await each(taking, load, failures)
        await each(opened, WeightServer.end, failures)
        return failures

    async def close(self) -> None:
        self._bucket = SharedBucket()
