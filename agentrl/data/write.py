"""Rows to parquet: written aside and renamed, so that a file is whole or not there."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.errors import UserError

BATCH = 1000  # rows turned into one piece of a table


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], progress: Callable[[int], None]) -> None:
    """`progress` is told of each batch's rows. The first batch fixes the columns and their types. Raises UserError."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    left = iter(rows)
    writer: Any = None
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
