"""`ProcessGroup`: what an SPMD computation knows of its peers. Alone, every question has a trivial answer."""

from dataclasses import dataclass
from typing import Any, Protocol


class ProcessGroup(Protocol):
    """size: ranks whose gradients are averaged, so that each scales its share of a loss by it."""

    @property
    def size(self) -> int: ...

    def most(self, count: int) -> int:
        """The maximum of `count` over the ranks, all of which call this: so many passes does every one of them make."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """One process."""

    size: int = 1

    def most(self, count: int) -> int:
        return count


SINGLE_PROCESS = SingleProcess()


class TorchProcessGroup:
    """The ranks of torch's default process group; a collective over tensors on `device`."""

    def __init__(self, device: Any = "cpu") -> None:
        import torch.distributed as dist

        self._device = device
        self.size: int = dist.get_world_size()

    def most(self, count: int) -> int:
        import torch
        import torch.distributed as dist

        found = torch.tensor([count], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)
