"""Notes and labels that people put on stored samples and on their turns: `RUN/notes.jsonl`.

A line is one change, and lines are only ever appended, under a lock: two pages may write at once, and what both do adds
up. A sample is named by its `request`, which is unique within a run and stays as a step that was in flight is written
whole. The file is anybody's: lines that are none are passed over.
"""

import fcntl
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.errors import UserError
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json
from agentrl.rollout.trajectory_file import IN_FLIGHT, read_records, read_rows

NOTES = "notes.jsonl"
LABEL = re.compile(r"\w[\w.-]{0,39}")
"""What a label looks like."""
LONGEST = 4000
"""Characters of a note."""
_MOST_BYTES = 16 << 20  # of the file
_MOST_TURN = 1_000_000
_REQUEST = 1000  # characters of a sample's id

Kind = Literal["label", "unlabel", "note", "forget"]


@dataclass(frozen=True, slots=True)
class Change:
    """What somebody does to a sample, or to one of its turns."""

    kind: Kind
    """Put a label on or take it off, write a note or take it away."""
    request: str
    """Which sample."""
    value: str
    """The label, the text of the note, or the id of the note that goes."""
    turn: int | None = None
    """The turn of the model, from 0; None: the whole sample."""
    file: str = ""
    """The file of trajectories where it was seen."""
    by: str = ""
    """Who did it."""
    at: float = 0.0
    """When, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Note:
    """A text about a sample or a turn."""

    id: str
    """By which it can be taken away."""
    text: str
    """As it was written."""
    turn: int | None
    """The turn of the model; None: the whole sample."""
    by: str
    """Who wrote it."""
    at: float
    """When, in seconds since 1970."""


@dataclass(slots=True)
class Notes:
    """What people said of a sample."""

    file: str
    """The file where it was seen last."""
    labels: dict[tuple[str, int | None], None] = field(default_factory=dict)
    """Labels and their turns, in the order in which they came."""
    notes: dict[str, Note] = field(default_factory=dict)
    """The notes by their ids."""

    def labelled(self, label: str) -> bool:
        """Whether the sample as a whole has a label."""
        return (label, None) in self.labels

    def turns(self, label: str) -> set[int]:
        """The turns that have a label."""
        return {turn for name, turn in self.labels if name == label and turn is not None}


def change_of(value: Json) -> Change:
    """A change as a page sends it. Raises UserError: it is none."""
    if not isinstance(value, Mapping):
        raise UserError("a change of notes is an object")
    kind, said, turn, request = (value.get(key) for key in ("kind", "value", "turn", "request"))
    if kind not in ("label", "unlabel", "note", "forget"):
        raise UserError("kind: expected label, unlabel, note or forget")
    if not isinstance(request, str) or not 0 < len(request) <= _REQUEST:
        raise UserError("request: which sample is meant?")
    if turn is not None and (type(turn) is not int or not 0 <= turn <= _MOST_TURN):
        raise UserError("turn: expected the number of a turn, or null")
    if not isinstance(said, str) or not said.strip():
        raise UserError(f"{kind}: it is empty")
    if kind in ("label", "unlabel") and not LABEL.fullmatch(said):
        raise UserError(f"label {said[:40]!r}: use letters, digits, '_', '.' and '-', at most 40")
    if len(said) > LONGEST:
        raise UserError(f"a note has at most {LONGEST} characters, this one has {len(said)}")
    file, by, at = (value.get(key) for key in ("file", "by", "at"))
    return Change(
        kind, request, said, turn, file if isinstance(file, str) else "", by if isinstance(by, str) else "",
        float(at) if isinstance(at, int | float) and math.isfinite(at) else 0.0,
    )  # fmt: skip


def write_change(folder: Path, change: Change) -> str:
    """Append a change to the notes of a run folder, and return the id of its line. Raises UserError: it cannot be."""
    path = folder / NOTES
    key = os.urandom(6).hex()
    told = {name: getattr(change, name) for name in Change.__slots__ if getattr(change, name) is not None}
    line = dumps({"id": key, **told}).encode() + b"\n"
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path}: not a file")
            fcntl.flock(file, fcntl.LOCK_EX)
            size = os.fstat(file.fileno()).st_size
            if size + len(line) > _MOST_BYTES:
                raise UserError(f"{path}: full ({_MOST_BYTES >> 20} MiB): move it away to begin a new one")
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line  # a writer was killed within its line
            file.write(line)
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    return key


def read_notes(folder: Path) -> dict[str, Notes]:
    """What people said of the samples of a run folder, by their requests; of those that anything is said of still."""
    try:
        with open(os.open(folder / NOTES, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError:
        return {}
    found: dict[str, Notes] = {}
    for line in data.split(b"\n"):
        try:
            told = loads(line)
            change, key = change_of(told), str(told.get("id", ""))
        except (UserError, ValueError, RecursionError):
            continue
        one = found.setdefault(change.request, Notes(change.file))
        one.file = change.file
        match change.kind:
            case "label":
                one.labels[change.value, change.turn] = None
            case "unlabel":
                one.labels.pop((change.value, change.turn), None)
            case "note":
                one.notes[key] = Note(key, change.value, change.turn, change.by, change.at)
            case "forget":
                one.notes.pop(change.value, None)
    return {request: one for request, one in found.items() if one.labels or one.notes}


def rows_of(path: Path, said: Mapping[str, Notes]) -> dict[int, str]:
    """The rows of a file of trajectories that anything is said of, and their requests. What was said of a step in
    flight is said of what it became. Raises UserError: the file is damaged."""
    wanted = {request for request, one in said.items() if one.file in (path.name, IN_FLIGHT)}
    if not wanted:
        return {}
    if path.suffix == ".parquet":
        requests = [row["request"] for row in read_rows(path, ["request"])]
    else:
        requests = [record.get("request") for record in read_records(path)]
    return {row: request for row, request in enumerate(requests) if request in wanted}
