"""A user's own `map` and `filter` over rows, by `datasets`: in several processes, and each mistake with its row."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.data.files import Parquet
from agentrl.data.rows import Listed, Row, Rows, undecoded
from agentrl.errors import UserError, contained, describe
from agentrl.plugins.registry import load_path
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger("agentrl.data")
_NUMBER = "__row__"  # the column that remembers where a row came from


@dataclass(frozen=True, slots=True)
class Change:
    """map: an import path of a function from a row to the fields that it adds or replaces. filter: of one from a row,
    as `map` left it, to whether it is kept. workers: processes."""

    map: str | None = None
    filter: str | None = None
    workers: int = 1

    def apply(self, rows: Rows, what: str) -> Rows:
        """The rows changed; the same object where there is nothing to do. Raises UserError: which function
        failed at which row, or that no row is left."""
        if self.map is None and self.filter is None:
            return rows
        data = _dataset(rows, what)
        workers = max(1, min(self.workers, len(rows)))
        how: dict[str, object] = {"num_proc": workers if workers > 1 else None, "load_from_cache_file": False}
        if self.map is not None:
            data = data.map(_Map(self.map, what), desc=f"map {what}", **how)
        if self.filter is not None:
            data = data.filter(_Filter(self.filter, what), desc=f"filter {what}", **how)
            _log.warning("%s keeps %d of the %d rows of %s", self.filter, len(data), len(rows), what)
        if not len(data):
            raise UserError(f"{self.filter} keeps none of the {len(rows)} rows of {what}")
        return _Changed(rows, data)


@dataclass
class _Call:
    """A function by import path, called with rows by any process that unpickles this."""

    path: str
    what: str
    function: Callable[[Row], object] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "what": self.what, "function": None}

    def result(self, row: Mapping[str, Json]) -> object:
        if self.function is None:
            self.function = load_path(self.path, self._key)
        fields = {name: value for name, value in row.items() if name != _NUMBER}
        try:
            return self.function(fields)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; a cause may not pickle
            place = f"row {row[_NUMBER]} of {self.what}"
            raise UserError(
                f"{self._key} {self.path} raised at {place}: {describe(contained(error), place=False)}"
            ) from None

    @property
    def _key(self) -> str:
        return type(self).__name__.removeprefix("_").lower()


class _Map(_Call):
    def __call__(self, row: Mapping[str, Json]) -> Row:
        made = self.result(row)
        if made is not None and not isinstance(made, Mapping):
            raise UserError(
                f"map {self.path} returned {made!r:.60} at row {row[_NUMBER]} of {self.what}; expected a dict"
            )
        return dict(made or {})


class _Filter(_Call):
    def __call__(self, row: Mapping[str, Json]) -> bool:
        return bool(self.result(row))


def _dataset(rows: Rows, what: str) -> "Dataset":
    """The rows as a `datasets.Dataset`, with the number of each row in a column."""
    from datasets import Dataset

    if isinstance(rows, Parquet):
        data = undecoded(Dataset(rows.table))
    elif isinstance(rows, Listed) and isinstance(rows.content, Dataset):
        data = rows.content
    else:
        data = _table(list(rows), what)
    return data.add_column(_NUMBER, list(range(len(rows))))


def _table(rows: list[Row], what: str) -> "Dataset":
    import pyarrow
    from datasets import Dataset

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{what}: map and filter want columns of one type each, and they are not: {text}") from error


class _Changed(Rows):
    sparse = True

    def __init__(self, origin: Rows, data: "Dataset") -> None:
        self._origin, self._data = origin, undecoded(data)
        self._numbers = data[_NUMBER][:]

    def __len__(self) -> int:
        return len(self._data)

    def row(self, index: int) -> Row:
        return {name: value for name, value in self._data[index].items() if name != _NUMBER}

    def where(self, index: int) -> str:
        return self._origin.where(self._numbers[index])

    def number(self, index: int) -> int:
        return self._origin.number(self._numbers[index])

    def folder(self, index: int) -> Path | None:
        return self._origin.folder(self._numbers[index])
