"""The sources of tasks: the generator, or rows in GSM8K's format from a file or the hub.

Nothing is read before a split is asked for. A bad row raises an error that names it, and is never skipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from agentrl.data.rows import Rows
from agentrl.data.source import Source as DataSource
from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.types import Json, Task, ToolKwargs
from agentrl_envs.conversation import text_field
from agentrl_envs.gsm8k.grade import read_truth
from agentrl_envs.gsm8k.problems import HELD_OUT_SIZE, SPLITS, problem


@dataclass(frozen=True, slots=True)
class Row:
    """number: counted from 0 in its file or split. solution: the answer as the data has it; truth: its number."""

    number: int
    question: str
    """The text of the problem."""
    solution: str
    truth: Fraction


def read_rows(rows: Rows) -> list[Row]:
    """Return all of them. Raises UserError with file, line (or row) and field."""
    return [_row(rows.row(i), rows.where(i), rows.number(i)) for i in range(len(rows))]


def question_of(fields: Mapping[str, Json], where: str) -> str:
    """Return what a row asks. Raises UserError as `read_rows` does."""
    return _row(fields, where, 0).question


def _row(fields: Mapping[str, Json], where: str, count: int) -> Row:
    question, solution = (text_field(fields, name, where) for name in ("question", "answer"))
    try:
        return Row(count, question, solution, read_truth(solution))
    except ValueError as error:
        raise UserError(f"{where}, field 'answer': {error}") from error


TRAIN_SIZE = 50_000
"""Of the generator: problems of `train`."""


class Source(Protocol):
    """Gives the tasks of each split."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the held-out splits."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        ...


def generated(split: str, size: int, seed: int) -> LazyTasks:
    """Return a split of the generator."""
    return LazyTasks(size, lambda index: _generated(split, index, seed))


def _generated(split: str, index: int, seed: int) -> Task:
    made = problem(split, index, seed)
    origin = {"split": split, "index": index, "seed": seed, "kind": made.kind}
    return _task(f"{split}-{index}", made.question, Fraction(made.answer), origin)


@dataclass(frozen=True)
class Generator:
    """The generator. Train depends on the seed; the held-out splits never do, so that runs compare."""

    seed: int
    """Seed of the training problems."""
    splits: tuple[str, ...] = SPLITS[1:]

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split; those of training depend on the seed."""
        return generated("train", TRAIN_SIZE, self.seed) if split == "train" else generated(split, HELD_OUT_SIZE, 0)


@dataclass
class Data:
    """Rows in GSM8K's format, wherever they are read from. Of a lone file a tenth is held out, by what is asked."""

    source: DataSource
    """The rows."""
    _made: dict[str, Sequence[Task]] = field(default_factory=dict)

    @classmethod
    def open(cls, source: str, seed: int, config: str | None) -> "Data":
        """Open a source. Raises UserError where the source is nothing."""
        return cls(open_source(source, config=config, seed=seed, key=question_of))

    @property
    def splits(self) -> tuple[str, ...]:
        """The held-out splits of the data."""
        return self.source.splits

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, read once. Raises UserError for a bad row."""
        if split not in self._made:
            self._made[split] = _tasks(split, read_rows(self.source.rows(split)))
        return self._made[split]


def _tasks(split: str, rows: list[Row]) -> list[Task]:
    return [_task(f"{split}-{r.number}", r.question, r.truth, {"split": split, "solution": r.solution}) for r in rows]


def _task(name: str, question: str, truth: Fraction, more: dict[str, object]) -> Task:
    kwargs = {"calc_gsm8k_reward": ToolKwargs(create_kwargs={"ground_truth": str(truth)})}
    return Task(id=name, data={"question": question, "answer": str(truth), **more}, tools_kwargs=kwargs)
