"""Rows read from files: .jsonl, .json (an array, or lines), both also gzipped, and .parquet. One file is one `Rows`.

Rows are written as Parquet only: to a temporary file that is then renamed, so that a file is whole or not there.
"""

import gzip
import json
import mmap
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.data.rows import Joined, Listed, Row, Rows, checked
from agentrl.errors import UserError
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from pyarrow import Table

TEXT_TYPES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
FILE_TYPES = (*TEXT_TYPES, ".parquet")
WANTED = "a .jsonl or .parquet file (or .json, .jsonl.gz, .json.gz)"


def file_type(path: Path) -> str | None:
    """Which of `FILE_TYPES` its name ends in; None for any other file."""
    return next((t for t in sorted(FILE_TYPES, key=len, reverse=True) if path.name.lower().endswith(t)), None)


def stem(path: Path) -> str:
    """Its name without the type."""
    return path.name[: len(path.name) - len(file_type(path) or "")]


def read_files(paths: Sequence[Path]) -> Rows:
    """The rows of files, one after another. Raises UserError: a file that is missing, empty, or cannot be
    read."""
    parts = [_read(path) for path in paths]
    return parts[0] if len(parts) == 1 else Joined(parts)


def _read(path: Path) -> Rows:
    kind = file_type(path)
    if kind is None:
        raise UserError(f"{path}: ends in {path.suffix!r}; expected {WANTED}")
    rows = _parquet(path) if kind == ".parquet" else _text(path, kind)
    if not len(rows):
        raise UserError(f"{path}: contains no row")
    return rows


def _text(path: Path, kind: str) -> Rows:
    content = _bytes(path, kind.endswith(".gz"))
    if kind.startswith(".jsonl") or content[:4096].lstrip()[:1] != b"[":
        return JsonLines(path, content)
    try:
        return Listed(json.loads(content[:]), str(path), 1, path.parent)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text: {error.reason}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error


def _bytes(path: Path, zipped: bool) -> bytes | mmap.mmap:
    """A file's content: mapped where it can be, so that a large one takes no memory."""
    try:
        if zipped:
            with gzip.open(path) as stream:
                return stream.read()
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: cannot be read as gzip: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


class JsonLines(Rows):
    """One JSON object a line; blank lines do not count."""

    def __init__(self, path: Path, content: bytes | mmap.mmap) -> None:
        import numpy as np

        self._path, self._content = path, content
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) if len(content) else np.empty(0, np.int64)
        self._starts = np.concatenate([[0], ends + 1])
        self._ends = np.append(ends, len(content))
        lines = range(len(self._starts))
        self._lines = np.array([i for i in lines if content[self._starts[i] : self._ends[i]].strip()], np.int64)

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Row:
        line = self._lines[index]
        try:
            value = json.loads(self._content[self._starts[line] : self._ends[line]].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.where(index)}: is not UTF-8 text: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.where(index)}: is not JSON: {error}") from error
        return checked(value, self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index] + 1}"

    def folder(self, index: int) -> Path | None:
        return self._path.parent


class Parquet(Rows):
    """A table in Arrow's memory; a row becomes Python objects when it is looked at."""

    sparse = True

    def __init__(self, path: Path, table: "Table") -> None:
        self._path, self.table = path, table
        self._columns = list(zip(table.column_names, table.columns, strict=True))

    def __len__(self) -> int:
        count: int = self.table.num_rows
        return count

    def row(self, index: int) -> Row:
        return {name: column[index].as_py() for name, column in self._columns}

    def where(self, index: int) -> str:
        return f"{self._path}, row {index + 1}"

    def folder(self, index: int) -> Path | None:
        return self._path.parent


def _parquet(path: Path) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, partitioning=None)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from error
    return Parquet(path, table.combine_chunks())


BATCH = 1000  # rows turned into one piece of a table


def write_parquet(path: Path, rows: Sequence[Mapping[str, Json]], progress: Callable[[int], None]) -> None:
    """Write rows to a Parquet file. `progress` is called with the number of each batch's rows. The first batch fixes
    the columns and their types. Raises UserError."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    left = iter(rows)
    writer: parquet.ParquetWriter | None = None
    try:
        while batch := list(islice(left, BATCH)):
            table = pyarrow.Table.from_pylist(batch, schema=writer.schema if writer else None)
            writer = writer or parquet.ParquetWriter(aside, table.schema)
            writer.write_table(table)
            progress(len(batch))
        if writer is None:
            raise UserError(f"{path}: there is no row to write")
        writer.close()
        aside.replace(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: the rows make no table: {' '.join(str(error).split())}") from error
    finally:
        aside.unlink(missing_ok=True)
