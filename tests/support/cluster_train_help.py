"""Learning on real Ray workers beside learning in one process, with processes that one module of tests starts once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_plugins import FATES
from learner_help import REWARDS, make_model, save_tokenizer

from agentrl.cluster.dispatch import ONE_TO_ALL, register
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.session import Session
from agentrl.distributed.remote import RayRoles
from agentrl.distributed.worker import TrainWorker
from agentrl.recipe.schema import Recipe

UNEVEN: list[list[float]] = [*REWARDS, [1, 0.5], [0, 1, 0, 0, 1]]
"""Six groups of two to five samples: no number of workers divides them."""


def save_tiny(folder: Path) -> Path:
    make_model().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Again(TrainWorker):
    """A worker that becomes that of another recipe: the process is the same, all else is made anew."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.connect(300.0)

    def connect(self, timeout: float) -> None:
        if not torch.distributed.is_initialized():
            super().connect(timeout)

    @register(ONE_TO_ALL)
    def become(self, *arguments: Any) -> None:
        self.__dict__.clear()
        TrainWorker.__init__(self, *arguments)


@contextmanager
def two_workers(address: str, logs: Path) -> Iterator[WorkerGroup]:
    """Real processes of a Ray that runs already, joined by gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FATES, str(logs))
        with (
            Session(address),
            ResourcePool(2) as pool,
            WorkerGroup(pool, Again, name="trainer", logs=logs) as group,
        ):
            yield group


@contextmanager
def on_cluster(recipe: Recipe, logs: Path, group: WorkerGroup | None = None) -> Iterator[RayRoles]:
    """`RayRoles` in the Ray that runs already; on the processes of `group`, where one is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.distributed.remote.Session", lambda *_, **__: nullcontext(SimpleNamespace(address="")))
        if group is not None:
            pool = nullcontext(SimpleNamespace(workers=len(group)))
            patch.setattr("agentrl.distributed.remote.ResourcePool", lambda *_, **__: pool)
            patch.setattr("agentrl.distributed.remote.WorkerGroup", Borrowed.over(group))
        role_host = RayRoles(recipe, recipe, logs)
    try:
        yield role_host
    finally:
        role_host.close()


class Borrowed:
    """A group whose processes stay when it is closed."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @classmethod
    def over(cls, group: WorkerGroup) -> Any:
        def make(pool: Any, worker_class: type, *arguments: Any, sharing: int, **options: Any) -> "Borrowed":
            assert worker_class is TrainWorker
            group.shape = type(group.shape)(group.shape.workers, sharing)
            group.become(*arguments)
            return cls(group)

        return make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __len__(self) -> int:
        return len(self._group)

    def close(self) -> None:
        """Nothing."""
