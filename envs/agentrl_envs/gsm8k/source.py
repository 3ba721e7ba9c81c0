"""The sources of tasks: the generator, or rows in GSM8K's format from a file or the hub.

Nothing is read before a split is asked for. A bad row raises an error that names it, and is never skipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from agentrl_tools.rewards.grade import read_truth

from agentrl.data.rows import Rows
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Task, ToolKwargs
from agentrl_envs.conversation import text_field
from agentrl_envs.gsm8k.problems import problem


@dataclass(frozen=True, slots=True)
class Row:
    """number: counted from 0 in its file or split. solution: the answer as the data has it; truth: its number."""

    number: int
    question: str
    """The text of the problem."""
    solution: str
    truth: Fraction


def question_of(fields: Mapping[str, Json], where: str) -> str:
    """What a row asks. Raises UserError as `read_tasks` does."""
    return _row(fields, where, 0).question


def _row(fields: Mapping[str, Json], where: str, count: int) -> Row:
    question, solution = (text_field(fields, name, where) for name in ("question", "answer"))
    try:
        return Row(count, question, solution, read_truth(solution))
    except ValueError as error:
        raise UserError(f"{where}, field 'answer': {error}") from error


TRAIN_SIZE = 50_000
"""Of the generator: problems of `train`."""


def generated(split: str, index: int, seed: int) -> Task:
    """The task of a generated problem."""
    made = problem(split, index, seed)
    origin = {"split": split, "index": index, "seed": seed, "kind": made.kind}
    return _task(f"{split}-{index}", made.question, Fraction(made.answer), origin)


def read_tasks(rows: Rows, split: str) -> list[Task]:
    """The tasks of rows. Raises UserError with file, line (or row) and field."""
    read = [_row(rows.row(i), rows.where(i), rows.number(i)) for i in range(len(rows))]
    return [_task(f"{split}-{r.number}", r.question, r.truth, {"split": split, "solution": r.solution}) for r in read]


def _task(name: str, question: str, truth: Fraction, more: dict[str, object]) -> Task:
    kwargs = {"calc_gsm8k_reward": ToolKwargs(create_kwargs={"ground_truth": str(truth)})}
    return Task(id=name, data={"question": question, "answer": str(truth), **more}, tools_kwargs=kwargs)
