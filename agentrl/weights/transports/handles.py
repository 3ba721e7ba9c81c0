"""Weights through memory of a GPU that trainer and servers share, for vLLM's weight transfer engine `ipc`.

Written by the protocol of vLLM 0.32 and not tried: no GPU. Only rank 0's own GPU is offered, so each server has one
rank, on that GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions as _reductions

from agentrl.threads import in_thread
from agentrl.weights.server import WeightServer, WeightUpdateError
from agentrl.weights.source import NamedTensor, WeightSource, buckets
from agentrl.weights.transports.base import Failures, each
from agentrl.weights.transports.shared_memory import plain_segments

reductions: Any = _reductions  # torch leaves it untyped
BUCKET_BYTES = 256 << 20


class HandleTransport:
    """Copy a bucket of tensors to memory of its own, tell servers where each lies, and free it once they have copied
    it. bucket_bytes: of tensors in one call."""

    name = "from_tensor"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._limit = bucket_bytes

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        failures: Failures = {}
        taking = await each(servers, _opened, failures)
        first = True
        batches: Iterator[list[NamedTensor]] = buckets(weights, self._limit)
        while (batch := await in_thread(next, batches, None)) is not None:
            if taking:
                taking = await self._load(batch, taking, failures, flush and first)
            first = False
        await each(taking, lambda server: server.end(), failures)
        return failures

    async def close(self) -> None:
        pass

    async def _load(
        self, batch: Sequence[NamedTensor], servers: Sequence[WeightServer], failures: Failures, flush: bool
    ) -> list[WeightServer]:
        """Return the servers that took a bucket."""
        copies, handles = await in_thread(_handles, batch)
        layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in copies]
        return await each(servers, lambda server: server.load_handles(layout, handles, flush), failures)


async def _opened(server: WeightServer) -> None:
    facts = await server.facts()
    if facts.transfer != "ipc" or facts.ranks != 1:
        raise WeightUpdateError(
            f"{server.url} opens no memory of the trainer's GPU: it takes one rank, started with "
            """--weight-transfer-config '{"backend": "ipc"}' and VLLM_ALLOW_INSECURE_SERIALIZATION=1"""
        )
    await server.open_handles()
    await server.begin()


def _handles(batch: Sequence[NamedTensor]) -> tuple[list[NamedTensor], list[Mapping[str, Any]]]:
    """Return copies that other processes may open, which have to live until these have, and for each the UUID of its
    GPU with what opens it there. Raises WeightUpdateError for tensors that lie elsewhere."""
    copies: list[NamedTensor] = []
    handles: list[Mapping[str, Any]] = []
    for name, tensor in batch:
        if not tensor.is_cuda:
            raise WeightUpdateError("from_tensor sends vLLM what lies on a GPU; on a CPU use from_disk")
        with plain_segments():
            copy = tensor.detach().contiguous().clone()
        _, arguments = reductions.reduce_tensor(copy)
        copies.append((name, copy))
        handles.append({str(torch.cuda.get_device_properties(copy.device).uuid): arguments})
    torch.cuda.synchronize(copies[0][1].device)
    return copies, handles
