"""A process group of the trainer (rank 0) and the ranks of servers, besides torch's default group and without it."""

import asyncio
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from agentrl.threads import in_thread
from agentrl.weights.server import WeightServer, WeightUpdateError
from agentrl.weights.transports.base import Failures, each


@dataclass(frozen=True, slots=True)
class Group:
    """Made by `open_group`; `broadcast` blocks."""

    name: str
    servers: tuple[WeightServer, ...]
    handle: Any
    store: Any

    def broadcast(self, tensor: Tensor) -> None:
        """To every rank of every server. Raises RuntimeError when one is gone or does not take it in time."""
        self.handle.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        """End it on this side at once; a broadcast under way raises."""
        self.handle.abort()
        if self.handle in c10d._world.pg_map:
            dist.destroy_process_group(self.handle)


async def open_group(servers: Sequence[WeightServer], backend: str, timeout: float, failures: Failures) -> Group:
    """All of them join, or WeightUpdateError is raised; who did not is in `failures`. timeout: seconds, also of each
    broadcast."""
    name = f"agentrl-{uuid.uuid4().hex[:12]}"  # of this group alone: a name that a server still knows would be refused
    port = _free_port()
    *offsets, world = _offsets([(await server.facts()).ranks for server in servers])
    first = dict(zip((s.url for s in servers), offsets, strict=True))

    async def join(server: WeightServer) -> None:
        await server.join_group(_address_for(server.url), port, first[server.url], world, name, backend)

    joining = asyncio.create_task(each(servers, join, failures))
    try:
        handle, store = await in_thread(_found, port, world, name, backend, timeout)
    except (RuntimeError, ValueError) as error:
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        line = " ".join(str(error).split())[:200]
        raise WeightUpdateError(f"the {backend} group of {len(servers)} servers did not form: {line}") from error
    joined = await joining
    group = Group(name, tuple(joined), handle, store)
    if len(joined) < len(servers):
        group.abort()
        raise WeightUpdateError(f"the {backend} group of {len(servers)} servers did not form")
    return group


def agree_with_servers() -> None:
    """Set up NCCL as SGLang does in its servers, or the two do not meet; before this process uses NCCL at all. What a
    person has set stands, and is what launched servers find too."""
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def _found(port: int, world: int, name: str, backend: str, timeout: float) -> tuple[Any, Any]:
    """Rank 0's side of what the servers do as they join. Blocks until all have."""
    limit = timedelta(seconds=timeout)
    if backend == "nccl":
        agree_with_servers()
    store = dist.TCPStore("0.0.0.0", port, world, is_master=True, timeout=limit)
    scoped = dist.PrefixStore(name, store)
    handle, _ = c10d._new_process_group_helper(
        world, 0, [], dist.Backend(backend), scoped, group_name=GroupName(name), timeout=limit
    )
    c10d._world.pg_group_ranks[handle] = {rank: rank for rank in range(world)}
    return handle, store


def _offsets(sizes: Sequence[int]) -> list[int]:
    """The first rank of each server, rank 0 being the trainer; then the number of all."""
    return list(accumulate(sizes, initial=1))


def _address_for(url: str) -> str:
    """The address of this machine that the server at `url` can reach."""
    parts = urlsplit(url)
    family = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname, parts.port or 80))
        return str(way.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
