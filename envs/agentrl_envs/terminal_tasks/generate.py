"""Any job of any split by its index, the same everywhere. No instruction of a held-out split is trained on: a hash of
it decides on which side it falls."""

import hashlib
from collections.abc import Mapping
from random import Random

from agentrl.plugins.types import Json, Task
from agentrl_envs.terminal_tasks.job import Job
from agentrl_envs.terminal_tasks.kinds import KINDS, Draw, Sizes
from agentrl_envs.terminal_tasks.unseen import GIT, UNSEEN

SPLITS = ("train", "test", "large", "unseen", "validation")
"""test, validation: instructions never seen; large: those in larger folders and files; unseen: kinds never seen."""
TRAIN_SIZE, HELD_OUT_SIZE = 1_000_000, 1_000
_SMALL, _LARGE = Sizes((3, 5), (2, 5)), Sizes((12, 30), (20, 60))
_HELD_OUT_SHARE = 48  # of 256


def kinds_of(split: str, git: bool) -> dict[str, Draw]:
    """The kinds of a split. git: those of git are among them."""
    return UNSEEN if split == "unseen" else {**KINDS, **(GIT if git else {})}


def make_task(git: bool, split: str, index: int, seed: int) -> Task:
    """The task at `index` of a split; the kinds take turns."""
    kinds = list(kinds_of(split, git))
    kind = kinds[index % len(kinds)]
    data = {"kind": kind, "split": split, "index": index, "seed": seed}
    return Task(f"{split}-{seed}-{index}", {**data, "instruction": job_of(data).instruction})


def job_of(data: Mapping[str, Json]) -> Job:
    """The job of a task's data."""
    split, kind = str(data["split"]), str(data["kind"])
    rng = Random(f"terminal_tasks/{data['seed']}/{split}/{data['index']}")
    draw = {**KINDS, **GIT, **UNSEEN}[kind]
    while True:
        job = draw(rng, _LARGE if split == "large" else _SMALL)
        if kind in UNSEEN or is_held_out(job) == (split != "train"):
            return job


def is_held_out(job: Job) -> bool:
    """Whether its instruction is one of those that are never trained on."""
    return hashlib.sha256(job.instruction.encode()).digest()[0] < _HELD_OUT_SHARE
