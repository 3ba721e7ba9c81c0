"""Scans of stored samples: each scanner's findings as a column beside the file of trajectories that it read.

`RUN/scans/<file>.parquet` has a row for each sample, in the order of the file: its `request`, and a text for each
scanner, null where it found nothing; a judge's is its question, which its column names too. `why`, the page of runs and
comparisons read them by `read_findings`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.checkpoint.disk import flush_file
from agentrl.checkpoint.run_folder import SCANS, scan_path
from agentrl.errors import UserError
from agentrl.eval.scanners import SCANNERS
from agentrl.plugins.scanner import Scanned
from agentrl.plugins.scanner_process import ScannerProcess, found_of
from agentrl.plugins.types import Json
from agentrl.rollout.trajectory_file import Record, read_records, read_rows

REQUEST = "request"
"""The column that says which sample a row is of."""
SECONDS = 10.0
"""Seconds that a scanner of a stranger may take over a sample."""
_ERRORS = 3  # samples of a file over which a scanner may fail before it is given up
_JUDGE, _QUESTION = "judge", b"question"  # the column of a judge's first question, and what holds the question of one

Found = list[str | None]
"""What a scanner found in each sample of a file."""
Many = Callable[[Sequence[Scanned]], Sequence[str | None]]
"""A scanner of all samples of a file at once, such as a judge that is asked about many at a time."""


class Scan:
    """Scanners by name, at work. many: further ones, which take the samples of a file at once.

    seconds: that a scanner of a stranger may take over a sample. questions: of those among `many` that are judges.
    Leave it as a context: it ends the processes of strangers.
    """

    def __init__(
        self,
        names: Sequence[str],
        many: Mapping[str, Many] | None = None,
        seconds: float = SECONDS,
        questions: Mapping[str, str] | None = None,
    ) -> None:
        self._foreign = {name: ScannerProcess(name, seconds) for name in names if name not in SCANNERS}
        self._own = {name: SCANNERS[name] for name in names if name in SCANNERS}
        self._many, self._questions = dict(many or {}), dict(questions or {})
        self.notes: list[str] = []
        """What could not be scanned, as lines."""

    def __enter__(self) -> "Scan":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._foreign.values():
            process.close()

    def file(self, path: Path) -> dict[str, Found]:
        """What each scanner found in each sample of a file, which is kept beside it. Samples that the machinery lost
        are not scanned. Raises UserError: the file is damaged, or cannot be written beside."""
        records = read_records(path)
        samples = [_scanned(record, f"{path}, sample {number}") for number, record in enumerate(records, 1)]
        found: dict[str, Found] = {name: [None] * len(samples) for name in (*self._own, *self._foreign, *self._many)}
        there = [(index, sample) for index, sample in enumerate(samples) if sample is not None]
        for name, scanner in self._own.items():
            for index, sample in there:
                found[name][index] = found_of(scanner(sample))
        for name, process in self._foreign.items():
            if not self._foreign_scan(path, process, there, found[name]):
                del found[name]
        for name, many in self._many.items():
            for (index, _), note in zip(there, many([sample for _, sample in there]), strict=True):
                found[name][index] = note
        keep(path, [_request(record) for record in records], found, self._questions)
        return found

    def _foreign_scan(
        self, path: Path, process: ScannerProcess, there: Sequence[tuple[int, Scanned]], found: Found
    ) -> bool:
        """Fill in what a stranger's scanner finds; whether it got through the file."""
        errors = 0
        for index, sample in there:
            try:
                found[index] = process(_fields(sample))
            except UserError as error:
                errors += 1
                if errors == 1:
                    self.notes.append(f"{path.name}, sample {index + 1}: {error}")
                if errors >= _ERRORS:
                    self.notes.append(f"{path.name}: scanner {process.name!r} failed {errors} times and was given up")
                    return False
        return True


def _fields(sample: Scanned) -> dict[str, Json]:
    return {name: getattr(sample, name) for name in Scanned.__slots__}


def _scanned(record: Record, where: str) -> Scanned | None:
    """A record as scanners read it; None of a sample that the machinery lost."""
    if record.get("failure") or record.get("reward") is None:
        return None
    try:
        branches = record.get("branches") or ()
        messages = [message for branch in branches for message in branch] or record["messages"]
        if not all(isinstance(message, dict) for message in messages):
            raise TypeError("a message is no object")
        return Scanned(
            task=str(record["task"]), data=record.get("data") or {}, messages=messages,
            tools=record.get("tools") or (), tool_uses=record.get("tool_uses") or (), reward=float(record["reward"]),
            rewards=record.get("rewards") or {}, solved=record.get("solved"), finish=str(record["finish"]),
            extra=record.get("extra") or {},
        )  # fmt: skip
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{where}: damaged: {type(error).__name__}: {error}; move the file away") from error


def _request(record: Record) -> str:
    return str(record.get("request") or f"{record.get('task')}#{record.get('sample')}")


def keep(
    path: Path, requests: Sequence[str], found: Mapping[str, Found], questions: Mapping[str, str] | None = None
) -> None:
    """Write findings beside a file of trajectories; those of other scanners, of the same samples, stay. questions: of
    judges, by the name of their scanner."""
    table = _read(path, requests)
    if table is None:
        table = pa.table({REQUEST: pa.array(requests, pa.string())})
    for name, values in found.items():
        question = (questions or {}).get(name)
        field = pa.field(name, pa.string(), metadata=None if question is None else {_QUESTION: question})
        column, at = pa.array(values, pa.string()), table.schema.get_field_index(name)
        table = table.append_column(field, column) if at < 0 else table.set_column(at, field, column)
    place = scan_path(path)
    beside = place.with_name(f".{place.name}.new")
    try:
        place.parent.mkdir(exist_ok=True)
        pq.write_table(table, beside, compression="zstd")
        flush_file(beside)
        os.replace(beside, place)
    except OSError as error:
        raise UserError(f"{place}: the findings cannot be written: {error.strerror}") from error


def read_findings(path: Path) -> dict[str, Found]:
    """The findings of each scanner in the samples of a file of trajectories, in its order; empty where it was not
    scanned, or has other samples by now."""
    if not scan_path(path).is_file():
        return {}
    if path.suffix == ".parquet":
        requests = [str(row["request"]) for row in read_rows(path, ["request"])]
    else:
        requests = [_request(record) for record in read_records(path)]
    table = _read(path, requests)
    return {} if table is None else {name: table[name].to_pylist() for name in table.column_names if name != REQUEST}


def _read(path: Path, requests: Sequence[str]) -> pa.Table | None:
    """The findings beside a file of trajectories, and REQUEST; None where there are none of these samples."""
    try:
        table = pq.read_table(scan_path(path))
    except (OSError, pa.ArrowException):
        return None
    if REQUEST not in table.column_names or table[REQUEST].to_pylist() != list(requests):
        return None
    return table.select([field.name for field in table.schema if pa.types.is_string(field.type)])


def judge_column(run: Path, question: str) -> str:
    """The column of a judge's question in the scans of a run: the one that holds it already, or the first that holds
    no other: `judge`, `judge_2`, ..."""
    held: dict[str, set[str]] = {}
    for place in (run / SCANS).glob("*.parquet"):
        try:
            schema = pq.read_schema(place)
        except (OSError, pa.ArrowException):
            continue
        for field in schema:
            held.setdefault(field.name, set()).add((field.metadata or {}).get(_QUESTION, b"").decode())
    names = (_JUDGE if number == 1 else f"{_JUDGE}_{number}" for number in count(1))
    return next(name for name in names if held.get(name, {question}) == {question})


def shares(found: Mapping[str, Found], solved: Sequence[bool | None]) -> Iterator[tuple[str, int, int, int]]:
    """Yield of each scanner how many samples have a finding, and how many of these are solved and unsolved, the most
    frequent first. solved: of each sample; None where it was lost."""
    for name, notes in sorted(found.items(), key=lambda pair: -sum(note is not None for note in pair[1])):
        having = [one for note, one in zip(notes, solved, strict=True) if note is not None]
        yield name, len(having), having.count(True), having.count(False)
