"""Roles to save: tiny models with an optimizer that has learned a little, in one process or sharded over several."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from meeting import meet
from tiny_models import qwen3
from torch import Tensor

from agentrl.learner.optimizer import Optimizer

RATE = 1e-2
SMALL_FILES = 20_000
"""Bytes: so small that a tiny model takes several files."""


@dataclass
class Role:
    """What `save_roles` asks of an actor or a critic."""

    model: Any
    optimizer: Optimizer

    @classmethod
    def of(cls, model: Any) -> "Role":
        return cls(model, Optimizer(model.named_parameters(), (0.9, 0.95), 0.01, 1.0))


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    shape = {"vocab_size": 51, "hidden_size": 30, "intermediate_size": 42, **changes}
    return qwen3(seed, tie_word_embeddings=True, initializer_range=0.2, **shape).to(dtype)


def learn(role: Role, seed: int) -> None:
    """One step on ids that depend on `seed` alone, the same on every rank; and a few random numbers are used up."""
    ids = torch.randint(0, 51, (2, 7), generator=torch.Generator().manual_seed(seed))
    role.model(input_ids=ids, labels=ids).loss.backward()
    role.optimizer.step(RATE)
    torch.rand(3)


def learned(*seeds: int, model: Any = None) -> Role:
    role = Role.of(model if model is not None else tiny())
    for seed in seeds:
        learn(role, seed)
    return role


def as_ranks_write(folder: Path) -> None:
    """Write the state of a checkpoint's actor, which one process has written, in the form in which several do."""
    from agentrl.checkpoint import sharded, state_file

    place = folder / "trainer" / "actor"
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in state_file.describe(place).items()}
    state_file.read(tensors, place)
    (place / state_file.FILE).unlink()
    sharded.write(tensors, place)


def whole(tensor: Tensor) -> Tensor:
    """On every rank (a collective where it is sharded)."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().clone()


def everything(role: Role) -> dict[str, Tensor]:
    """All that is trained, whole: weights and what the optimizer keeps."""
    role.model.state_dict()
    found = {name: whole(p) for name, p in role.model.named_parameters()}
    return found | {name: whole(t) for name, t in role.optimizer.named_state().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def spread(model: Any, mesh: Any) -> Any:
    """Sharded by FSDP2, in place."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """work(rank, size, *arguments) in `size` processes joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        started = torch.multiprocessing.start_processes(
            _join, (size, Path(folder, "meeting"), work, arguments), nprocs=size, start_method="fork"
        )
    assert started is None  # it waits for them, and raises what one of them raised


def _join(rank: int, size: int, file: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    meet(rank, file, size)
    work(rank, size, *arguments)
    dist.destroy_process_group()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
