"""Where the tasks come from: the generator, a file, or the hub. Nothing is read before a split is asked for."""

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Protocol, overload

from agentrl_envs.gsm8k.problems import problem
from agentrl_envs.gsm8k.rows import Row, read_file, read_hub

from agentrl.errors import UserError
from agentrl.plugins.types import Task, ToolKwargs

_log = logging.getLogger("agentrl.envs.gsm8k")

TRAIN_SIZE = 50_000
HELD_OUT_SIZE = 1_000
"""Of the generator: problems of `train`, and of each held-out split."""

_HELD_OUT_SHARE = 0.1  # of a file that has no test file beside it
_WORD = r"(?<![a-zA-Z]){}(?![a-zA-Z])"  # `test` in `gsm8k_test-2`, not in `latest`


class Source(Protocol):
    splits: tuple[str, ...]

    def tasks(self, split: str) -> Sequence[Task]: ...


class Generated(Sequence[Task]):
    """A split of the generator, made as it is looked at."""

    def __init__(self, split: str, size: int, seed: int) -> None:
        self._split, self._size, self._seed = split, size, seed

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        at = index + self._size if index < 0 else index
        if not 0 <= at < self._size:
            raise IndexError(f"{self._split} has {self._size} problems, asked for {index}")
        made = problem(self._split, at, self._seed)
        origin = {"split": self._split, "index": at, "seed": self._seed, "kind": made.kind}
        return _task(f"{self._split}-{at}", made.question, Fraction(made.answer), origin)


@dataclass(frozen=True)
class Generator:
    """The generator. Train depends on the seed; the held-out splits never do, so that runs compare."""

    seed: int
    splits: tuple[str, ...] = ("test", "phrasing", "large")

    def tasks(self, split: str) -> Sequence[Task]:
        return Generated("train", TRAIN_SIZE, self.seed) if split == "train" else Generated(split, HELD_OUT_SIZE, 0)


@dataclass
class FileSource:
    """A file. Its test split is the test file beside it, or a seeded tenth of its rows; a test file is all test."""

    path: Path
    seed: int
    splits: tuple[str, ...] = ("test",)
    _read: dict[str, list[Row]] = field(default_factory=dict)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._read:
            self._read.update(self._load())
        if split not in self._read:
            raise UserError(f"env.source: {self.path} is a test file with no train file beside it: nothing to train on")
        return _tasks(split, self._read[split])

    def _load(self) -> dict[str, list[Row]]:
        sibling = self._sibling()
        if self._is_test:
            return {"test": read_file(self.path)} | ({"train": read_file(sibling)} if sibling else {})
        rows = read_file(self.path)
        if sibling:
            return {"train": rows, "test": read_file(sibling)}
        held_out = [row for row in rows if self._is_held_out(row)]
        train = [row for row in rows if not self._is_held_out(row)]
        if not held_out or not train:
            raise UserError(f"{self.path}: {len(rows)} rows are too few to hold some out; put a test file beside it")
        _log.warning(
            "%s has no test file beside it: %d of its %d rows are held out (seed %d) and not trained on",
            self.path,
            len(held_out),
            len(rows),
            self.seed,
        )
        return {"train": train, "test": held_out}

    def _sibling(self) -> Path | None:
        """`train.jsonl` for `test.jsonl` and the other way round, where that file exists."""
        ours, theirs = ("test", "train") if self._is_test else ("train", "test")
        stem, found = re.subn(_WORD.format(ours), theirs, self.path.stem)
        other = self.path.with_name(stem + self.path.suffix)
        return other if found and other.is_file() else None

    @property
    def _is_test(self) -> bool:
        return re.search(_WORD.format("test"), self.path.stem) is not None

    def _is_held_out(self, row: Row) -> bool:
        """By what is asked, so that the same question never stands on both sides."""
        digest = hashlib.sha256(f"{self.seed}/{row.question}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


@dataclass
class HubSource:
    """A dataset of the hub with the splits `train` and `test`."""

    name: str
    config: str | None
    splits: tuple[str, ...] = ("test",)
    _read: dict[str, Sequence[Task]] = field(default_factory=dict)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._read:
            self._read[split] = _tasks(split, read_hub(self.name, self.config, split))
        return self._read[split]


def _tasks(split: str, rows: list[Row]) -> list[Task]:
    return [_task(f"{split}-{r.number}", r.question, r.truth, {"split": split, "solution": r.solution}) for r in rows]


def _task(name: str, question: str, truth: Fraction, more: dict[str, object]) -> Task:
    kwargs = {"calc_gsm8k_reward": ToolKwargs(create_kwargs={"ground_truth": str(truth)})}
    return Task(id=name, data={"question": question, "answer": str(truth), **more}, tools_kwargs=kwargs)
