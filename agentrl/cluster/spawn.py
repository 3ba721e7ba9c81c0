"""Start the processes of a group, and compute what each needs before its worker is constructed."""

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.cluster.errors import ClusterError
from agentrl.cluster.host import Host, ProcessInfo, Start
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.post_mortem import cause_of_death
from agentrl.cluster.worker import NODE
from agentrl.secrets import known

SPAWN_SECONDS = 180.0
"""Time for the processes to start; their workers load their models after it."""
FORWARDED = ("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "AGENTRL_")
"""Prefixes of the controller's environment variables that workers get too, on whatever machine they run."""


def spawn(pool: ResourcePool) -> list[Any]:
    """The actors, by rank: node by node."""
    import ray

    host = ray.remote(Host)
    return [
        host.options(max_restarts=0, max_task_retries=0, **pool.place(node)).remote()
        for node, count in enumerate(pool.by_node)
        for _ in range(count)
    ]


def wait_for_processes(actors: list[Any], group: str) -> list[ProcessInfo]:
    """Wait until the processes run. Raises ClusterError if some do not start in time, or at all."""
    import ray

    refs = [actor.describe.remote() for actor in actors]
    ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=SPAWN_SECONDS)
    if waiting:
        raise ClusterError(
            f"{len(waiting)} of the {len(refs)} processes of {group!r} did not start within {SPAWN_SECONDS:.0f} "
            f"seconds; see `ray status`, and whether every machine has agentrl"
        )
    try:
        return ray.get(ready)
    except ray.exceptions.RayError as error:
        raise ClusterError(f"a process of {group!r} did not start: {cause_of_death(error)}") from None


def pickled(worker_class: type, args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Pickle a worker's class and arguments. Raises TypeError for arguments that cannot leave this process."""
    from ray import cloudpickle

    try:
        worker: bytes = cloudpickle.dumps((worker_class, args, kwargs))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(f"an argument of {worker_class.__name__} cannot go to another process: {error}") from error
    return worker


def starts(
    processes: list[ProcessInfo], by_node: list[int], worker: bytes, logs: Path, group: str, *, gpu: bool = False
) -> list[Start]:
    """The `Start` of each rank. gpu: Ray gave each rank a GPU of its own."""
    folder = os.getcwd()
    return [
        Start(environment, folder, list(sys.path), str(logs.absolute() / f"{group}_{rank}.log"), worker, known())
        for rank, environment in enumerate(environments(processes, by_node, gpu))
    ]


def environments(processes: list[ProcessInfo], by_node: list[int], gpu: bool) -> list[dict[str, str]]:
    """The environment of each rank: what torchrun sets, and otherwise the user's own choice, if any."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    if len(by_node) == 1:  # else gloo looks for the interface of the machine's name, which may be anything
        forwarded.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if gpu and not any(name in forwarded for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        forwarded["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # micro-batches differ: blocks would fragment
    if not gpu:  # Ray leaves a worker that asked for none with all of them, and each would take the first
        forwarded["CUDA_VISIBLE_DEVICES"] = ""
    apart = len(by_node) > 1
    local = [(rank, count) for count in by_node for rank in range(count)]
    return [
        _environment(_interfaces(process, apart) | forwarded, process, processes[0], rank, len(processes), *local[rank])
        for rank, process in enumerate(processes)
    ]


def _interfaces(process: ProcessInfo, apart: bool) -> dict[str, str]:
    """The variables that name the interface by which the other machines reach this one, where there are others:
    gloo would take that of the machine's name, which Ubuntu gives a loopback address."""
    if not apart or not process.interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": process.interface, "NCCL_SOCKET_IFNAME": f"={process.interface}"}


def _environment(
    forwarded: Mapping[str, str],
    process: ProcessInfo,
    first: ProcessInfo,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, process.cores // local_size)),
        **forwarded,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": first.node,
        "MASTER_PORT": str(first.port),
        NODE: process.node,
    }
