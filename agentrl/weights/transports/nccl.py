"""Weights through a process group of the trainer and the servers, across machines: nccl between GPUs, gloo otherwise.

A bucket of tensors in one broadcast, of vLLM tensor by tensor: a server holds one bucket besides its model. A member
that fails breaks the group for all; then those that did not fail get the weights again in a new one.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import torch

from agentrl.containment.threads import in_thread
from agentrl.weights.group import Group, open_group
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import WeightServer
from agentrl.weights.source import NamedTensor, WeightSource, buckets
from agentrl.weights.transports.base import Failures, each

BUCKET_BYTES = 256 << 20
DEADLINE_SHARE = 0.75
"""Of the group's time-out: after that, NCCL's own watchdog ends this process over a broadcast that hangs."""
BROKEN = "the process group broke"
GRACE_SECONDS = 5.0
"""Time between one server's refusal and giving up the broadcast to the others."""


class GroupTransport:
    """timeout: seconds for the group to form, and for each broadcast. bucket_bytes: of tensors in one call. nccl:
    whether NCCL serves where all members have GPUs: it wants one version of it on both sides, and no GPU shared."""

    name = "from_distributed"

    def __init__(self, timeout: float = 120.0, bucket_bytes: int = BUCKET_BYTES, nccl: bool = True) -> None:
        self._timeout, self._limit, self._nccl = timeout, bucket_bytes, nccl
        self._group: Group | None = None
        self._broke = BROKEN

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        """Broadcast the weights; again to the remaining servers if one breaks the group."""
        failures: Failures = {}
        opened = await each(servers, lambda server: server.begin(), failures)
        unsent, before = await self._attempt(opened, weights, failures, flush), len(opened) + 1
        again = weights.repeatable and not any(server.joins_by_id for server in servers)  # vLLM would load parts twice
        while unsent and len(unsent) < before and again:
            before = len(unsent)  # who broke the group may show only once another one does not form
            unsent = await self._attempt(unsent, weights, failures, flush)
        failures |= dict.fromkeys((s.url for s in unsent), self._broke)
        await each([s for s in opened if s.url not in failures], lambda server: server.end(), failures)
        return failures

    async def close(self) -> None:
        """Leave the process group."""
        group, self._group = self._group, None
        if group is not None:
            await each(group.servers, lambda server: server.leave_group(group.name), {})
            await in_thread(group.abort)

    async def _attempt(
        self, servers: Sequence[WeightServer], weights: WeightSource, failures: Failures, flush: bool
    ) -> list[WeightServer]:
        """The servers that did not fail but did not get everything either, because another one failed."""
        batches = buckets(weights, self._limit)
        batch = await in_thread(next, batches, None)
        group = await self._joined(servers, batch[0][1].device, failures) if servers and batch else None
        while batch is not None:
            if group is not None and not await self._send_bucket(group, batch, failures, flush):
                group = self._group = None  # the rest is read on: other ranks gather in step
            flush = False
            batch = await in_thread(next, batches, None)
        return [] if group is not None else [s for s in servers if s.url not in failures]

    async def _joined(self, servers: Sequence[WeightServer], device: torch.device, failures: Failures) -> Group | None:
        """The group of exactly these servers: the one that stands, or a new one."""
        if self._group is not None and {s.url for s in self._group.servers} == {s.url for s in servers}:
            return self._group
        await self.close()
        kinds = {device.type, *[(await server.facts()).device for server in servers]}
        backend = "nccl" if self._nccl and kinds == {"cuda"} else "gloo"
        try:
            self._group = await open_group(servers, backend, self._timeout, failures, device)
        except WeightUpdateError as error:
            if not any(server.url in failures for server in servers):  # no single one is to blame
                failures |= dict.fromkeys((s.url for s in servers), str(error))
        return self._group

    async def _send_bucket(self, group: Group, batch: Sequence[NamedTensor], failures: Failures, flush: bool) -> bool:
        """Send it and return whether every server took it. If not, the group is ended."""

        refused = asyncio.Event()

        async def load(server: WeightServer) -> None:
            try:
                await server.load_broadcast([(n, t.dtype, tuple(t.shape)) for n, t in batch], group.name, flush)
            except WeightUpdateError:
                refused.set()
                raise

        if not any(server.joins_by_id for server in group.servers):
            batch = _aligned(batch)
        before = len(failures)
        loading = asyncio.create_task(each(group.servers, load, failures))
        sending = asyncio.create_task(in_thread(_broadcast, group, batch))
        patience = DEADLINE_SHARE * self._timeout
        refusal = asyncio.create_task(refused.wait())
        first = (loading, sending, refusal)
        done, _ = await asyncio.wait(first, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        refusal.cancel()
        if not done:
            self._broke = f"{BROKEN}: no broadcast ended within {patience:.0f} seconds"
        elif refused.is_set():
            await asyncio.wait((sending,), timeout=GRACE_SECONDS)
        elif sending.done() and sending.exception() is not None:
            await asyncio.wait((loading,), timeout=GRACE_SECONDS)
        else:
            await asyncio.wait((loading, sending), timeout=patience)
        if len(failures) == before and loading.done() and sending.done() and sending.exception() is None:
            return True
        if sending.done() and (error := sending.exception()) is not None:
            self._broke = f"{BROKEN}: {' '.join(str(error).split())[:200]}"
        await in_thread(group.abort)
        await asyncio.wait((sending,), timeout=GRACE_SECONDS)
        loading.cancel()
        sending.cancel()  # its thread is abandoned where even that did not end it
        await asyncio.gather(loading, sending, return_exceptions=True)
        return False


def _aligned(batch: Sequence[NamedTensor]) -> list[NamedTensor]:
    """A bucket in an order in which each tensor starts, without gaps, at a multiple of the size of its numbers."""
    return sorted(batch, key=lambda item: -item[1].element_size())


def _broadcast(group: Group, batch: Sequence[NamedTensor]) -> None:
    """Send a bucket: to SGLang as one tensor of bytes (its `flattened_bucket`), to vLLM tensor by tensor."""
    tensors = [tensor.contiguous() for _, tensor in batch]
    if not any(server.joins_by_id for server in group.servers):
        tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
    for tensor in tensors:
        with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
            group.broadcast(tensor)
    if batch[-1][1].is_cuda:
        torch.cuda.synchronize(batch[-1][1].device)  # one bucket in flight at most
