"""Documents on disk, read one at a time from a memory map: titles and texts as JSON lines, and where each begins."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from agentrl_tools.search.corpus import Document

_LINES, _STARTS = "documents.jsonl", "documents.npy"


class StoredDocuments(Sequence[Document]):
    """lines: the bytes of all documents, one after another; starts: where each begins, and the end of the last."""

    def __init__(self, lines: Any, starts: Any) -> None:
        self._lines, self._starts = lines, starts

    @classmethod
    def write(cls, folder: Path, documents: Sequence[Document]) -> None:
        import numpy

        starts = [0]
        with (folder / _LINES).open("wb") as file:
            for document in documents:
                starts.append(starts[-1] + file.write(json.dumps(document).encode() + b"\n"))
        numpy.save(folder / _STARTS, numpy.array(starts, dtype=numpy.int64))

    @classmethod
    def open(cls, folder: Path) -> "StoredDocuments":
        """Raises ValueError or OSError for files that do not fit each other."""
        import numpy

        lines = numpy.memmap(folder / _LINES, dtype=numpy.uint8, mode="r")
        starts = numpy.load(folder / _STARTS, mmap_mode="r")
        if len(starts) < 2 or starts[-1] != len(lines):
            raise ValueError(f"{_LINES} and {_STARTS} do not fit each other")
        return cls(lines, starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = index % len(self)
        return Document(*json.loads(self._lines[self._starts[at] : self._starts[at + 1]].tobytes()))
