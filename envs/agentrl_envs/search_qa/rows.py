"""Rows in the shape of Search-R1's data: a question, and the answers that count as right."""

from collections.abc import Mapping, Sequence

from agentrl.data.rows import Row, Rows
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Task


def read_tasks(rows: Rows, split: str) -> list[Task]:
    """Convert rows to tasks. Raises UserError with file, line (or row) and field."""
    return [_task(rows.row(i), rows.where(i), split, rows.number(i)) for i in range(len(rows))]


def question_of(row: Row, where: str) -> str:
    """The field `question`, or that of `extra_info`, or what follows `Question:` in the last message of
    `prompt`."""
    inner = row.get("extra_info")
    question = row.get("question") or (inner.get("question") if isinstance(inner, Mapping) else None)
    if question is None and isinstance(row.get("prompt"), Sequence) and row["prompt"]:
        last = row["prompt"][-1]
        content = last.get("content") if isinstance(last, Mapping) else None
        question = content.rpartition("Question:")[2] if isinstance(content, str) else None
    if not isinstance(question, str) or not question.strip():
        has = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where}: has no text in the field 'question'; its fields: {has:.200}")
    return question.strip()


def answers_of(row: Row, where: str) -> tuple[str, ...]:
    """The field `golden_answers`, or `reward_model.ground_truth.target`: a text or a list of texts."""
    name, value = "golden_answers", row.get("golden_answers")
    if value is None:
        name, value = "reward_model.ground_truth.target", _at(row, "reward_model", "ground_truth", "target")
    if value is None:
        raise UserError(f"{where}: has neither 'golden_answers' nor 'reward_model.ground_truth.target'")
    answers = [value] if isinstance(value, str) else value
    good = isinstance(answers, Sequence) and len(answers) > 0
    if not good or not all(isinstance(a, str) and a.strip() for a in answers):
        raise UserError(f"{where}, field {name!r}: expected a text or a list of texts, got {value!r:.60}")
    return tuple(answers)


def _at(value: object, *path: str) -> Json:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _task(row: Row, where: str, split: str, number: int) -> Task:
    data = {
        "question": question_of(row, where),
        "answers": answers_of(row, where),
        "data_source": str(row.get("data_source") or ""),
        "split": split,
    }
    return Task(id=f"{split}-{number}", data=data)
