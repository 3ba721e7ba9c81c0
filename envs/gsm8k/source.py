"""Where the tasks come from: the generator, a file, or the hub. Nothing is read before a split is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, overload

from agentrl_envs.gsm8k.problems import problem
from agentrl_envs.gsm8k.rows import Row, question_of, read_rows

from agentrl.data.source import Source as DataSource
from agentrl.data.source import open_source
from agentrl.plugins.types import Task, ToolKwargs

TRAIN_SIZE = 50_000
HELD_OUT_SIZE = 1_000
"""Of the generator: problems of `train`, and of each held-out split."""


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
class Data:
    """Rows in GSM8K's format, wherever they are read from. Of a lone file a tenth is held out, by what is asked."""

    source: DataSource
    _made: dict[str, Sequence[Task]] = field(default_factory=dict)

    @classmethod
    def open(cls, source: str, seed: int, config: str | None) -> "Data":
        """Raises UserError where the source is nothing."""
        return cls(open_source(source, config=config, seed=seed, key=question_of))

    @property
    def splits(self) -> tuple[str, ...]:
        return self.source.splits

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._made:
            self._made[split] = _tasks(split, read_rows(self.source.rows(split)))
        return self._made[split]


def _tasks(split: str, rows: list[Row]) -> list[Task]:
    return [_task(f"{split}-{r.number}", r.question, r.truth, {"split": split, "solution": r.solution}) for r in rows]


def _task(name: str, question: str, truth: Fraction, more: dict[str, object]) -> Task:
    kwargs = {"calc_gsm8k_reward": ToolKwargs(create_kwargs={"ground_truth": str(truth)})}
    return Task(id=name, data={"question": question, "answer": str(truth), **more}, tools_kwargs=kwargs)
