"""`Texts`: what was said in stored samples, in lower case and beside each other, so that a search reads memory.

One file for each file of trajectories, in the user's cache: the texts of its samples one after another, and where each
begins. It is made once the file is searched, or before; where the cache cannot be written, the search reads the file of
trajectories. What was not searched for longest is removed where the cache grows beyond MOST.
"""

import hashlib
import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MOST = 4 << 30
"""Bytes of all texts on the disk."""
_HEAD = b"agentrl texts 1\n"
_NUMBER = 8  # bytes of a place


def cache_folder() -> Path:
    """Where texts are kept."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "agentrl" / "view"


class Texts:
    """The texts of files of trajectories. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def find(self, path: Path, version: str, text: str) -> list[int] | None:
        """The rows of a Parquet file of trajectories whose conversations contain a text, upper and lower case alike.
        version: changes when the file does. None: its texts cannot be kept. Raises UserError: the file is damaged."""
        from agentrl.rollout.trajectory_file import encode_plain

        wanted = encode_plain(text)[1:-1].lower().encode("utf-8", "surrogatepass")  # as it stands within JSON
        place = self._made(path, version)
        if place is None:
            return None
        try:
            with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _rows(data, wanted)
        except (OSError, ValueError):  # it was cut, or removed meanwhile
            with suppress(OSError):
                place.unlink()
            return None

    def keep(self, path: Path, version: str) -> None:
        """Make the texts of a file, if there are none yet. Raises UserError: the file is damaged."""
        self._made(path, version)

    def _made(self, path: Path, version: str) -> Path | None:
        try:
            place = self._place(path, version)
            with self._lock:
                if not place.is_file():
                    _write(place, path)
            return place
        except (OSError, RuntimeError):  # the disk refuses it, or there is no home
            return None

    def _place(self, path: Path, version: str) -> Path:
        name = hashlib.sha256(f"{path.absolute()}\n{version}".encode("utf-8", "surrogatepass")).hexdigest()
        return cache_folder() / f"{name[:40]}.texts"


def _write(place: Path, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    from agentrl.rollout.trajectory_file import read_table

    table = read_table(path, ["messages", "branches"])
    parts = [pc.fill_null(table[name], "").cast(pa.large_string()) for name in ("messages", "branches")]
    texts = pc.utf8_lower(pc.binary_join_element_wise(*parts, pa.scalar("\n", pa.large_string()))).combine_chunks()
    _, places, data = texts.buffers()
    count = len(texts)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _trim(place.parent, MOST)
    with tempfile.NamedTemporaryFile(dir=place.parent, prefix=".", delete=False) as file:  # of this user alone
        try:
            file.write(_HEAD + count.to_bytes(_NUMBER, "little"))
            first = texts.offset * _NUMBER
            file.write(memoryview(places)[first : first + (count + 1) * _NUMBER] if count else bytes(_NUMBER))
            file.write(memoryview(data) if data is not None else b"")
            file.flush()
            os.replace(file.name, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _rows(data: mmap.mmap, wanted: bytes) -> list[int]:
    start = len(_HEAD) + _NUMBER
    if data[: len(_HEAD)] != _HEAD:
        raise ValueError("other texts")
    count = int.from_bytes(data[len(_HEAD) : start], "little")
    body = start + (count + 1) * _NUMBER
    if body > len(data):
        raise ValueError("cut")
    places = memoryview(data)[start:body].cast("q")
    try:
        if body + places[count] != len(data):
            raise ValueError("cut")
        return _found(data, places, body, wanted) if wanted else list(range(count))
    finally:
        places.release()


def _found(data: mmap.mmap, places: Sequence[int], body: int, wanted: bytes) -> list[int]:
    found: list[int] = []
    at = data.find(wanted, body)
    while at >= 0:
        row = bisect_right(places, at - body) - 1
        end = body + places[row + 1]
        if at + len(wanted) <= end:
            found.append(row)
            at = data.find(wanted, max(end, at + 1))
        else:
            at = data.find(wanted, at + 1)
    return found


def _trim(folder: Path, most: int) -> None:
    """Remove the texts that were not read for longest, where there are too many."""
    with os.scandir(folder) as entries:
        there = [(max(s.st_atime, s.st_mtime), s.st_size, e.path) for e in entries if e.is_file() and (s := e.stat())]
    size = sum(one[1] for one in there)
    for _, own, path in sorted(there):
        if size <= most:
            break
        with suppress(OSError):
            os.unlink(path)
        size -= own
