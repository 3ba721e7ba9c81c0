"""Where the tasks come from: the generator, or rows of files, the hub or a function."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.data.source import Names, open_source
from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.types import Task
from agentrl_envs.code import generate
from agentrl_envs.code.rows import read_row

TRAIN_SIZE = 50_000


class TaskSource(Protocol):
    @property
    def splits(self) -> tuple[str, ...]: ...

    def tasks(self, split: str) -> Sequence[Task]: ...


class Generated:
    """The generator. Train depends on the seed; the held-out splits never do, so that runs compare."""

    splits = generate.SPLITS[1:]

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in generate.SPLITS:
            raise UserError(f"code has no split {split!r} for this source{nearest(split, generate.SPLITS)}")
        seed = self._seed if split == "train" else 0
        return LazyTasks(
            TRAIN_SIZE if split == "train" else generate.HELD_OUT_SIZE, lambda index: _generated(split, index, seed)
        )


class FromRows:
    """Rows in the shape of MBPP or HumanEval."""

    def __init__(self, source: str, splits: Mapping[str, Names] | None, config: str | None, seed: int) -> None:
        self._source = open_source(source, splits=splits, config=config, seed=seed)

    @property
    def splits(self) -> tuple[str, ...]:
        return self._source.splits

    def tasks(self, split: str) -> Sequence[Task]:
        rows = self._source.rows(split)
        return [_task(rows.row(i), rows.where(i), f"{split}-{i}") for i in range(len(rows))]


def _generated(split: str, index: int, seed: int) -> Task:
    made = generate.problem(split, index, seed)
    data = {
        "split": split, "index": index, "seed": seed, "kind": made.kind, "question": made.text,
        "entry_point": made.entry_point, "tests": made.tests,
    }  # fmt: skip
    return Task(id=f"{split}-{index}", data=data)


def _task(fields: Mapping[str, Any], where: str, name: str) -> Task:
    row = read_row(fields, where)
    data = {
        "question": row.question, "entry_point": row.entry_point, "setup": row.setup, "script": row.tests, "row": where,
    }  # fmt: skip
    return Task(id=name, data=data)
