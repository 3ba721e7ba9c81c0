"""Rows of real data, checked: a GSM8K-format file or a hub dataset. A bad row is named, never skipped."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from agentrl_envs.gsm8k.grade import read_truth

from agentrl.errors import UserError

FILE_TYPES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """number: counted from 0 in its file or split. solution: the answer as the data has it; truth: its number."""

    number: int
    question: str
    solution: str
    truth: Fraction


def is_file(source: str) -> bool:
    """Whether a source is a file. Raises UserError when it is neither a file nor like a hub name."""
    path = Path(source)
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise UserError(f"env.source: {source} ends in {path.suffix!r}; wants a {' or '.join(FILE_TYPES)} file")
        return True
    if path.suffix in FILE_TYPES or not _HUB_NAME.fullmatch(source) or path.exists():
        raise UserError(
            f"env.source: there is no file {source}; wants 'generated', a .jsonl or .parquet file, or a hub name"
        )
    return False


def read_file(path: Path) -> list[Row]:
    """All rows of a file. Raises UserError with file, line (or row) and field."""
    rows = list(_jsonl(path) if path.suffix == ".jsonl" else _parquet(path))
    if not rows:
        raise UserError(f"{path}: holds no row")
    return rows


def read_hub(name: str, config: str | None, split: str) -> list[Row]:
    """All rows of a split of a hub dataset. Raises UserError when it cannot be loaded, or for a bad row."""
    from datasets import load_dataset

    try:
        data = load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        what = " ".join(str(error).split())
        raise UserError(
            f"env.source: {name} (config {config}, split {split}) cannot be loaded from the hub: {what}"
        ) from error
    return _checked(data, f"{name} {split}", "row", 0)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        try:
            numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not UTF-8 text: {error.reason}") from error
    for count, (number, line) in enumerate(numbered):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: is not JSON: {error}") from error
        yield _row(fields, where, count)


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from error
    return _checked(table.to_pylist(), str(path), "row", 1)


def _checked(rows: Iterable[Any], what: str, unit: str, first: int) -> list[Row]:
    return [_row(fields, f"{what}, {unit} {count + first}", count) for count, fields in enumerate(rows)]


def _row(fields: Any, where: str, count: int) -> Row:
    if not isinstance(fields, Mapping):
        raise UserError(f"{where}: is not an object with the fields 'question' and 'answer'")
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
