"""Rows in GSM8K's format, checked. A bad row is named, never skipped."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agentrl.data.rows import Rows
from agentrl.errors import UserError
from agentrl_envs.gsm8k.grade import read_truth


@dataclass(frozen=True, slots=True)
class Row:
    """number: counted from 0 in its file or split. solution: the answer as the data has it; truth: its number."""

    number: int
    question: str
    solution: str
    truth: Fraction


def read_rows(rows: Rows) -> list[Row]:
    """All of them. Raises UserError with file, line (or row) and field."""
    return [_row(rows.row(i), rows.where(i), rows.number(i)) for i in range(len(rows))]


def question_of(fields: Mapping[str, Any], where: str) -> str:
    """What a row asks. Raises UserError as `read_rows` does."""
    return _row(fields, where, 0).question


def _row(fields: Mapping[str, Any], where: str, count: int) -> Row:
    question, solution = (_text(fields, name, where) for name in ("question", "answer"))
    try:
        return Row(count, question, solution, read_truth(solution))
    except ValueError as error:
        raise UserError(f"{where}, field 'answer': {error}") from error


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    if name not in fields:
        raise UserError(f"{where}: has no field {name!r}; it has {', '.join(map(repr, fields)) or 'none'}")
    value = fields[name]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}, field {name!r}: wants text, got {value!r:.60}")
    return value
