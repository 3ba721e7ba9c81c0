"""`Group`: a process group of the trainer (rank 0) and the ranks of servers, independent of torch's default group."""

import asyncio
import ctypes
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.cuda import nccl as _nccl
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from agentrl.addresses import own_address
from agentrl.cluster.host import interface_of
from agentrl.containment.threads import in_thread
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import WeightServer
from agentrl.weights.transports.base import Failures, each

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
CPU = torch.device("cpu")
ABORTED = b"agentrl: aborted"
nccl: Any = _nccl  # torch leaves it untyped


@dataclass(frozen=True, slots=True)
class Group:
    """Made by `open_group`."""

    name: str
    """The name by which servers know it."""
    servers: tuple[WeightServer, ...]
    """Those that joined."""
    handle: dist.ProcessGroup
    """torch's process group."""
    store: TCPStore | None
    """torch's store, which must live as long as the group; None: the group has none."""
    backend: str
    """`nccl` or `gloo`."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` to every rank of every server; blocks. Raises RuntimeError when one is gone or does not take it
        in time. On gloo from the CPU, wherever the tensor is."""
        self.handle.broadcast(tensor if self.backend == "nccl" else tensor.cpu(), 0).wait()

    def abort(self) -> None:
        """End it on this side at once; a broadcast in flight raises."""
        self.handle.abort()
        if self.handle in c10d._world.pg_map:
            dist.destroy_process_group(self.handle)


@dataclass(frozen=True, slots=True)
class NcclGroup(Group):
    """A bare NCCL communicator of one GPU, as vLLM's engine `nccl` uses one. handle: torch's, a capsule. Not tried on a
    GPU."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` to every rank of every server; blocks until `abort` where one is gone."""
        nccl.broadcast([tensor], 0, comms=[self.handle])
        torch.cuda.current_stream(tensor.device).synchronize()

    def abort(self) -> None:
        """End it on this side, once: a broadcast in flight returns. torch, which has no call for that, no longer frees
        it."""
        python = ctypes.pythonapi
        python.PyCapsule_GetName.restype, python.PyCapsule_GetPointer.restype = ctypes.c_char_p, ctypes.c_void_p
        capsule = ctypes.py_object(self.handle)
        name = python.PyCapsule_GetName(capsule)
        if name == ABORTED:
            return
        pointer = python.PyCapsule_GetPointer(capsule, name)
        python.PyCapsule_SetDestructor(capsule, None)
        python.PyCapsule_SetName(capsule, ABORTED)
        nccl_library().ncclCommAbort(ctypes.c_void_p(pointer))


def nccl_library() -> ctypes.CDLL:
    """Torch's NCCL, which is loaded already."""
    return ctypes.CDLL("libnccl.so.2")


async def open_group(
    servers: Sequence[WeightServer], backend: str, timeout: float, failures: Failures, device: torch.device = CPU
) -> Group:
    """Have all servers join a new group. Raises WeightUpdateError unless all do; those that did not are in `failures`.
    timeout: seconds, also of each broadcast. device: of the tensors."""
    name = f"agentrl-{uuid.uuid4().hex[:12]}"  # unique: a server refuses a name that it still knows
    port = _free_port()
    *offsets, world = _offsets([(await server.facts()).ranks for server in servers])
    first = dict(zip((s.url for s in servers), offsets, strict=True))

    by_id = any(server.joins_by_id for server in servers)
    if by_id and backend != "nccl":
        raise WeightUpdateError("vLLM joins groups of GPUs only; on a CPU use engine.args.weights=from_disk")
    if by_id and len(await each(servers, lambda server: server.check_nccl(), failures)) < len(servers):
        raise WeightUpdateError(f"no {backend} group of {len(servers)} servers can be formed")
    unique_id = nccl.unique_id() if by_id else None

    refused = asyncio.Event()

    async def join(server: WeightServer) -> None:
        if unique_id is not None:
            try:
                await server.join_nccl(unique_id, first[server.url], world)
            except WeightUpdateError:
                refused.set()
                raise
            return
        parts = urlsplit(server.url)
        address = own_address(parts.hostname or "", parts.port or 80)
        await server.join_group(address, port, first[server.url], world, name, backend)

    joining = asyncio.create_task(each(servers, join, failures))
    try:
        if unique_id is None:
            with _reached_by([server.url for server in servers]):
                handle, store = await in_thread(_start, port, world, name, backend, timeout)
        else:
            handle, store = await _started_by_id(unique_id, world, device, refused, timeout), None
    except (RuntimeError, ValueError) as error:
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        line = " ".join(str(error).split())[:200]
        raise WeightUpdateError(f"the {backend} group of {len(servers)} servers did not form: {line}") from error
    joined = await joining
    group = (Group if unique_id is None else NcclGroup)(name, tuple(joined), handle, store, backend)
    if len(joined) < len(servers):
        group.abort()
        raise WeightUpdateError(f"the {backend} group of {len(servers)} servers did not form")
    return group


@contextmanager
def _reached_by(urls: Sequence[str]) -> Iterator[None]:
    """Have gloo listen, inside, where these servers reach this process, whichever interface it otherwise uses: on one
    machine that is loopback."""
    parts = [urlsplit(url) for url in urls]
    names = {interface_of(own_address(part.hostname or "", part.port or 80)) for part in parts}
    before = os.environ.get(GLOO_INTERFACE)
    if len(names) == 1 and (name := names.pop()) and before in (None, "lo", "lo0"):
        os.environ[GLOO_INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(GLOO_INTERFACE, None)
        if before is not None:
            os.environ[GLOO_INTERFACE] = before


def agree_with_servers() -> None:
    """Set up NCCL as SGLang does in its servers, or the two do not connect; call it before this process uses NCCL. What
    a user has set stands, and launched servers inherit it."""
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def _start(port: int, world: int, name: str, backend: str, timeout: float) -> tuple[dist.ProcessGroup, TCPStore]:
    """Do rank 0's side of what servers do as they join. Blocks until all have."""
    limit = timedelta(seconds=timeout)
    if backend == "nccl":
        agree_with_servers()
    store = TCPStore("0.0.0.0", port, world, is_master=True, timeout=limit)
    scoped = PrefixStore(name, store)
    handle, _ = c10d._new_process_group_helper(
        world, 0, [], dist.Backend(backend), scoped, group_name=GroupName(name), timeout=limit
    )
    c10d._world.pg_group_ranks[handle] = {rank: rank for rank in range(world)}
    return handle, store


async def _started_by_id(
    unique_id: bytes, world: int, device: torch.device, refused: asyncio.Event, timeout: float
) -> Any:
    """Do rank 0's side while servers join. refused: is set once one did not. Raises RuntimeError once that can no
    longer succeed: NCCL itself waits for its ranks without an end, and then in a thread that is abandoned."""
    starting, giving_up = (
        asyncio.create_task(work) for work in (in_thread(_start_by_id, unique_id, world, device), refused.wait())
    )
    await asyncio.wait((starting, giving_up), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    giving_up.cancel()
    if not starting.done():
        starting.cancel()
        raise RuntimeError("a server did not join" if refused.is_set() else f"not within {timeout:.0f} seconds")
    return starting.result()


def _start_by_id(unique_id: bytes, world: int, device: torch.device) -> Any:
    """Do what vLLM's workers do as they join: they add up one number first of all."""
    agree_with_servers()
    with torch.cuda.device(device):  # of this thread
        handle = nccl.init_rank(world, unique_id, 0)
        nccl.all_reduce([torch.zeros(1, device=device)], comms=[handle])
        torch.cuda.current_stream().synchronize()
    return handle


def _offsets(sizes: Sequence[int]) -> list[int]:
    """The first rank of each server, rank 0 being the trainer, and then the world size."""
    return list(accumulate(sizes, initial=1))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
