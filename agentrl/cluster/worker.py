"""`Worker`: the base class of what runs in each process of a group. Its rank is known before `__init__` runs."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

NODE = "AGENTRL_NODE"
HEARTBEAT = "AGENTRL_HEARTBEAT"
COLLECTIVE_FACTOR = 2.0
"""Time-out of collectives, as a multiple of the group's time-out for an answer."""


def heartbeat_file(log: Path) -> Path:
    """The file beside a worker's log whose time of change is that of the worker's last sign of progress."""
    return log.with_suffix(".heartbeat")


def last_heartbeat(log: Path) -> float | None:
    """When the worker with that log last gave a sign of progress, by the clock of its machine; None: never."""
    try:
        return heartbeat_file(log).stat().st_mtime
    except OSError:
        return None


class Worker:
    """Base class of workers. Subclasses take the arguments that `WorkerGroup` passes on, and mark methods with
    `@register`. Several roles in one process are several objects of one worker; roles with processes of their own are
    groups in pools of their own."""

    memory_advice: ClassVar[str] = "give it less at once, or use more workers"
    """What users may change when a call runs out of memory; part of the error."""

    @property
    def rank(self) -> int:
        """Its rank in the group, from the variables that torchrun sets too; without them, that of a single worker."""
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """Number of workers of the group."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        """Its number among the workers on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def node(self) -> str:
        """The address of the machine it runs on."""
        return os.environ.get(NODE, "localhost")

    @property
    def device(self) -> "torch.device":
        """Its GPU, if Ray gave it one, else the CPU. A worker sees its own GPU only, as number 0."""
        import torch

        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def heartbeat(self) -> None:
        """Say that a long call makes progress: the group's timeout counts from here on. Costs microseconds."""
        if (file := os.environ.get(HEARTBEAT)) is not None:
            now = time.time_ns()  # of this machine: a file server may have another clock
            with suppress(OSError), open(file, "ab"):  # a full disk must not end the call
                os.utime(file, ns=(now, now))

    def connect(self, timeout: float) -> None:
        """Start torch's process group over all workers: gloo on CPUs; NCCL, and gloo for CPU tensors, on GPUs. Call it
        once, on every rank. timeout: seconds that the group waits for a sign of progress; collectives wait longer, so
        that the group finds out which rank hangs."""
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.init()  # else a device mesh chooses by LOCAL_RANK among devices of which Ray shows but one
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=timeout * COLLECTIVE_FACTOR)
        )

    def close(self) -> None:
        """Release the worker's resources. Called on every rank when a healthy group ends."""
        import sys

        if (torch := sys.modules.get("torch")) is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
