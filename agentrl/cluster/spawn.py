"""Starting the processes of a group: what each is told before its worker is made."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.cluster.host import Hello, Host, Start
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.worker import NODE

FORWARDED = ("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "AGENTRL_")
"""Variables of the controller that workers get too, on whatever machine they run."""


def spawn(pool: ResourcePool) -> list[Any]:
    """The actors, by rank: node by node."""
    import ray

    host = ray.remote(Host)
    return [
        host.options(max_restarts=0, max_task_retries=0, **pool.place(node)).remote()
        for node, count in enumerate(pool.by_node)
        for _ in range(count)
    ]


def environments(hellos: list[Hello], by_node: list[int]) -> list[dict[str, str]]:
    """The variables of each rank."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    if len(by_node) == 1:
        forwarded.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local = [(rank, count) for count in by_node for rank in range(count)]
    return [
        _environment(forwarded, hello, hellos[0], rank, len(hellos), *local[rank]) for rank, hello in enumerate(hellos)
    ]


def _environment(
    forwarded: Mapping[str, str], hello: Hello, first: Hello, rank: int, size: int, local_rank: int, local_size: int
) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, hello.cores // local_size)),
        **forwarded,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": first.node,
        "MASTER_PORT": str(first.port),
        NODE: hello.node,
    }


def starts(environments: list[dict[str, str]], worker: bytes, logs: Path, name: str) -> list[Start]:
    """What each rank's process is told."""
    folder = os.getcwd()
    return [
        Start(environment, folder, str(logs.absolute() / f"{name}_{rank}.log"), worker)
        for rank, environment in enumerate(environments)
    ]
