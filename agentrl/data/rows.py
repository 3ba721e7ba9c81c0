"""Rows of data, by number: parsed when they are looked at, and each knows where it stands for whoever must mend it."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from agentrl.errors import UserError
from agentrl.plugins.types import Json

Row = dict[str, Json]


class Rows(Sequence[Row]):
    """A sequence of rows with random access. `row` raises UserError with the place of a row that cannot be read."""

    sparse: bool = False
    """Whether fields that a row, or an object in it, does not have are read as None: those of a table's type."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """A row, 0 <= index < len."""

    @abstractmethod
    def where(self, index: int) -> str:
        """The place of a row for people: `data/train.jsonl, line 7`."""

    def number(self, index: int) -> int:
        """Its number in what it was read from, from 0: stable whatever was left out around it."""
        return index

    def folder(self, index: int) -> Path | None:
        """The folder of the file that it stands in; None where it stands in none."""
        return None

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        size = len(self)
        if isinstance(index, slice):
            return [self.row(i) for i in range(*index.indices(size))]
        if not -size <= index < size:
            raise IndexError(f"there are {size} rows, asked for {index}")
        return self.row(index % size)


def checked(value: object, where: str) -> Row:
    """A row as a dict of its fields. Raises UserError for anything that is not an object."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: is not an object with named fields, but {value!r:.60}")
    return dict(value)


def undecoded(data: object) -> Any:
    """A dataset of the package `datasets` whose images come as `{bytes, path}`: a row would decode all of its
    own, and a broken one raise. One with a format of its own is left as it is."""
    from datasets import Dataset, Image

    def plain(feature: Any) -> Any:
        if isinstance(feature, Image):
            return Image(decode=False)
        if isinstance(feature, dict):
            return type(feature)({name: plain(one) for name, one in feature.items()})
        if hasattr(feature, "feature"):
            return replace(feature, feature=plain(feature.feature))
        return [plain(one) for one in feature] if isinstance(feature, list) else feature

    if not isinstance(data, Dataset) or data.format["type"] is not None:
        return data
    features = plain(data.features)
    if features == data.features:
        return data
    info = data.info.copy()
    info.features = features
    return Dataset(data.data, info=info, split=data.split, indices_table=data._indices)


class Listed(Rows):
    """Rows from a sequence that somebody else made: a function, a JSON array, a dataset of the hub.

    Images of a dataset are not decoded: a row has their `bytes` or `path`.
    """

    def __init__(self, rows: Sequence[object], what: str, first: int = 0, folder: Path | None = None) -> None:
        self.what, self._first, self._folder = what, first, folder
        self.sparse = hasattr(rows, "features")  # a table of the hub's
        self.content = undecoded(rows) if self.sparse else rows

    def __len__(self) -> int:
        return len(self.content)

    def row(self, index: int) -> Row:
        return checked(self.content[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.what}, row {index + self._first}"

    def folder(self, index: int) -> Path | None:
        return self._folder


class Joined(Rows):
    """Several in a row."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self.sparse = any(part.sparse for part in parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, index: int) -> tuple[Rows, int]:
        which = bisect_right(self._ends, index)
        return self._parts[which], index - (self._ends[which - 1] if which else 0)

    def row(self, index: int) -> Row:
        part, at = self._find(index)
        return part.row(at)

    def where(self, index: int) -> str:
        part, at = self._find(index)
        return part.where(at)

    def folder(self, index: int) -> Path | None:
        part, at = self._find(index)
        return part.folder(at)


class Chosen(Rows):
    """Some of others, by their numbers there."""

    def __init__(self, rows: Rows, chosen: Sequence[int]) -> None:
        self._rows, self._chosen = rows, chosen
        self.sparse = rows.sparse

    def __len__(self) -> int:
        return len(self._chosen)

    def row(self, index: int) -> Row:
        return self._rows.row(self._chosen[index])

    def where(self, index: int) -> str:
        return self._rows.where(self._chosen[index])

    def number(self, index: int) -> int:
        return self._rows.number(self._chosen[index])

    def folder(self, index: int) -> Path | None:
        return self._rows.folder(self._chosen[index])
