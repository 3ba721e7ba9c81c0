"""Processes of a test that become the ranks of one group."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def meet(rank: int, file: Path, size: int = 2) -> None:
    """Join a group over gloo that meets at a file which is not there yet: a port that was free when it was looked for
    may be another's by the time that somebody listens there. A hang is a failure after five minutes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=file.as_uri(), rank=rank, world_size=size, timeout=timedelta(minutes=5))
