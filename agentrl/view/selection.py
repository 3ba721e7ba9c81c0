"""Chosen samples as a file: a table of their short facts (CSV, Parquet), or their conversations, for `agentrl sft`."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError
from agentrl.jsonable import dumps
from agentrl.plugins.types import Json
from agentrl.view.store import RunStore, column

_MOST_COLUMNS = 200
_MOST_TOLD = 5000  # conversations of one file


@dataclass(frozen=True, slots=True)
class Chosen:
    """Samples of one file of trajectories."""

    run: RunStore
    """Of this run."""
    file: str
    """The file's name."""
    rows: Sequence[int]
    """Which of its samples."""


def chosen(find: Callable[[str], RunStore], value: Json) -> list[Chosen]:
    """The selection that a page sends: a list of `run`, `file` and `rows`. find: a run by its name. Raises UserError:
    it is none."""
    if not isinstance(value, list):
        raise UserError("samples: expected a list")
    found = []
    for one in value:
        run, file, rows = (one.get(key) for key in ("run", "file", "rows")) if isinstance(one, Mapping) else (None,) * 3
        if (
            not isinstance(run, str)
            or not isinstance(file, str)
            or not isinstance(rows, list)
            or not all(type(row) is int for row in rows)
        ):
            raise UserError("samples: expected the names of a run and a file, and its rows")
        found.append(Chosen(find(run), file, rows))
    return found


def as_table(samples: Sequence[Chosen], names: Json) -> Any:
    """A table of pyarrow: where each sample stands, and the columns with these names: of the index, `part.NAME`, or a
    field of the tasks. Raises UserError: a file is damaged or gone, or changed so that it has no such row."""
    import pyarrow as pa

    if not isinstance(names, list) or len(names) > _MOST_COLUMNS or not all(isinstance(name, str) for name in names):
        raise UserError(f"columns: expected at most {_MOST_COLUMNS} names")
    said = {id(one.run): one.run.notes() for one in samples} if {"label", "note", "notes"} & set(names) else {}
    values: dict[str, list[Json]] = {
        name: [] for name in dict.fromkeys(["run", "file", "row", "split", "step", *names])
    }
    for one in samples:
        one.run.path(one.file)
        facts = one.run.index([one.file])[one.file]
        if "error" in facts:
            raise UserError(facts["error"])
        if not all(0 <= row < facts["rows"] for row in one.rows):
            raise UserError(f"{one.file}: changed meanwhile: choose again")
        place = next(file for file in one.run.state()["files"] if file["name"] == one.file)
        whole = place["step"] >= 0
        fixed = {"run": one.run.name, "file": one.file, "split": place["split"] if whole else "in flight"}
        fixed["step"] = place["step"] if whole else None
        notes = said.get(id(one.run), {}).get(one.file, {})
        for name, into in values.items():
            if name in fixed:
                into += [fixed[name]] * len(one.rows)
            elif name == "row":
                into += one.rows
            else:
                of = _column(facts, name, notes)
                into += [of(row) for row in one.rows]
    return pa.table({name: _array(pa, each) for name, each in values.items()})


def _column(facts: Json, name: str, notes: Mapping[str, Json]) -> Callable[[int], Json]:
    """What a column holds at a row."""
    if name == "label":
        return lambda row: (
            " ".join(dict.fromkeys(label for label, _ in notes.get(str(row), {}).get("labels", ()))) or None
        )
    if name == "note":
        return lambda row: "\n".join(note["text"] for note in notes.get(str(row), {}).get("notes", ())) or None
    if name == "notes":
        return lambda row: len(notes.get(str(row), {}).get("notes", ()))
    if name.startswith("part."):
        part = facts["parts"].get(name.removeprefix("part."))
        return lambda row: part[row] if isinstance(part, list) else part
    if name in facts and name not in ("tasks", "parts", "rows"):
        own = column(facts, name)
        return lambda row: own[row]
    tasks, field = column(facts, "task"), name.removeprefix("data.")
    return lambda row: facts["tasks"].get(tasks[row], {}).get(field)


def _array(pa: Any, values: list[Json]) -> Any:
    """A column; values of several types as texts."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return pa.array([value if value is None or isinstance(value, str) else dumps(value) for value in values])
    except UnicodeEncodeError:
        return pa.array([None if value is None else str(value).encode("utf-8", "replace").decode() for value in values])


def as_csv(samples: Sequence[Chosen], names: Json) -> bytes:
    """The table as CSV."""
    from pyarrow.csv import write_csv

    into = io.BytesIO()
    write_csv(as_table(samples, names), into)
    return into.getvalue()


def as_parquet(samples: Sequence[Chosen], names: Json) -> bytes:
    """The table as Parquet."""
    from pyarrow.parquet import write_table

    into = io.BytesIO()
    write_table(as_table(samples, names), into, compression="zstd")
    return into.getvalue()


def as_conversations(samples: Sequence[Chosen], names: Json) -> bytes:
    """The conversations as JSON lines, as `agentrl sft` reads them; turns that are labelled `bad` are not learned.

    Raises UserError: they are too many, or a file is damaged or gone.
    """
    from agentrl.eval.labelled import conversation
    from agentrl.eval.notes import read_notes
    from agentrl.rollout.trajectory_file import read_records

    if sum(len(one.rows) for one in samples) > _MOST_TOLD:
        raise UserError(f"at most {_MOST_TOLD} conversations at once: choose fewer, or label them: `agentrl data RUN`")
    lines = []
    for one in samples:
        path = one.run.path(one.file)
        records = read_records(path)
        said = read_notes(one.run.folder)
        if not all(0 <= row < len(records) for row in one.rows):
            raise UserError(f"{one.file}: changed meanwhile: choose again")
        for row in one.rows:
            notes = said.get(str(records[row].get("request")))
            unlearned = notes.turns("bad") if notes else ()
            lines += [dumps(told) for told in conversation(records[row], path, unlearned)]
    return "".join(line + "\n" for line in lines).encode()


FORMATS: dict[str, tuple[str, Callable[[Sequence[Chosen], Json], bytes]]] = {
    "csv": ("text/csv", as_csv),
    "parquet": ("application/vnd.apache.parquet", as_parquet),
    "jsonl": ("application/jsonl", as_conversations),
}
"""Ending of a file -> its content type, and what makes it of samples and names of columns."""
