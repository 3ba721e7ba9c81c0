"""Trajectories on disk: one Parquet file a step or evaluation, of one schema (docs/reference/trajectories.md).

What older versions wrote, JSON lines, is read too, as the same records. Files may be damaged, or a stranger's: what is
wrong with one is a UserError.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from os import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard

from agentrl.checkpoint.disk import flush_file
from agentrl.constraint import Allowed
from agentrl.errors import UserError, contained
from agentrl.images import FOLDER as IMAGES
from agentrl.images import STORE, hashes
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json, Message
from agentrl.secrets import known, masked_text, without_known
from agentrl.trajectory import FinishReason, InvariantError, Learned, ToolUse, Trajectory, Turn

VERSION = 2
"""Of the schema; that of the JSON lines is 1."""
IN_FLIGHT = "in_flight.jsonl"
"""The finished groups of a step that is not whole yet: the columns of FACTS, one sample a line."""
TRAIN = "train"
"""The split of training steps."""

_ABOUT = b"agentrl.trajectories"  # key of the file's metadata; its value is the version
_TOOLS = b"agentrl.tools"  # likewise; its value is the JSON of the schemas of the tools that samples of the file had
_MOST_NAMES = 10_000  # of tools whose schemas are remembered
_MOST_SCHEMAS = 1_000_000  # characters of them in all
_SECONDS = ("total", "engine", "tools", "environment", "hooks")
_SPAN = [("start", pa.int32()), ("end", pa.int32())]
_PART = [("name", pa.string()), ("value", pa.float64()), ("weight", pa.float64())]
_TURN = [*_SPAN, ("reward", pa.float64()), ("trained", pa.bool_()), ("state", pa.string())]
_USE = [
    ("name", pa.string()), ("turn", pa.int32()), ("seconds", pa.float64()), ("error", pa.string()), ("cut", pa.bool_()),
    ("metrics", pa.string()),
]  # fmt: skip

_IMAGE = [
    ("start", pa.int32()), ("tokens", pa.int32()), ("time", pa.int32()), ("height", pa.int32()), ("width", pa.int32()),
    ("hash", pa.string()),
]  # fmt: skip
_CALL = [("role", pa.string()), ("asked", pa.string()), ("untrained", pa.string())]
_WAIT = [("part", pa.string()), ("start", pa.float64()), ("end", pa.float64())]

FACTS: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "evaluation": pa.bool_(),
    "split": pa.string(),
    "environment": pa.string(),
    "task": pa.string(),
    "group": pa.int32(),
    "sample": pa.int32(),
    "seed": pa.int64(),
    "request": pa.string(),
    "reward": pa.float64(),
    "rewards": pa.list_(pa.struct(_PART)),
    "solved": pa.bool_(),
    "finish": pa.string(),
    "left_out": pa.string(),
    "boundary": pa.string(),
    "error": pa.string(),
    "prompt_tokens": pa.int32(),
    "sampled_tokens": pa.int32(),
    "tokens": pa.int32(),
    "tool_errors": pa.int32(),
    "turns": pa.list_(pa.struct(_TURN)),
    "segments": pa.list_(pa.struct([*_SPAN, ("parent", pa.int32())])),
    "tools": pa.list_(pa.string()),
    "tool_uses": pa.list_(pa.struct(_USE)),
    "seconds": pa.struct([(name, pa.float64()) for name in _SECONDS]),
    "spans": pa.list_(pa.struct(_WAIT)),
    "task_data": pa.string(),
    "messages": pa.string(),
    "branches": pa.string(),
    "extra": pa.string(),
    "images": pa.list_(pa.struct(_IMAGE)),
    "calls": pa.list_(pa.struct(_CALL)),
    "seats": pa.list_(pa.struct([("name", pa.string()), ("reward", pa.float64())])),
}
"""Columns of a sample as a whole, and their types."""
TOKENS: dict[str, pa.DataType] = {
    "ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.uint8()),
    "logprobs": pa.list_(pa.float32()),
    "trainer_logprobs": pa.list_(pa.float32()),
    "advantages": pa.list_(pa.float32()),
    "weight_version": pa.list_(pa.int32()),
}
"""Columns of lists with an entry for each token, and their types."""
ALLOWED = "allowed"
"""The column of `Trajectory.allowed`: for each token what `constraint.packed` made of the ids that were allowed, null
where it was not sampled under a constraint; null for a sample without such tokens."""
SCHEMA = pa.schema([*FACTS.items(), *TOKENS.items(), (ALLOWED, pa.list_(pa.binary()))], {_ABOUT: str(VERSION).encode()})

_SHORT = [name for name, kind in FACTS.items() if not pa.types.is_nested(kind)]
_ADDED = ("spans", "images", "calls", "seats", ALLOWED)
"""Columns that files of the first writers of this version lack; they are null there."""
_SHORT = [name for name in _SHORT if name not in ("task_data", "messages", "branches", "extra")]
_FEW_VALUES = ["split", "environment", "task", "finish", "left_out", "boundary"]
_FEW_VALUES += [f"{name}.list.element" for name in TOKENS if "logprobs" not in name]
_FEW_VALUES += [f"{ALLOWED}.list.element"]
_PIECE = 128  # samples of a row group; one conversation is read without the rest
_CHARACTERS = 64_000_000  # of the JSON of a row group, beyond which it holds fewer samples

_DEPTH = 100  # lists and mappings in each other that are written out
_VALUES = 100_000  # values in all that are written out, of one thing
_LETTERS = 50_000_000  # characters of texts in all that are written out, of one thing
_BITS = 10_000  # of an integer; Python reads and writes no longer ones as text

_offered: dict[str, str] = {}  # name of a tool -> the JSON of its schema, of all that were offered in this process

Row = dict[str, Json]
"""A sample by the columns of FACTS."""
Record = dict[str, Json]
"""A sample as readers see it; see `read_records`."""


def row(trajectory: Trajectory, *, environment: str = "", solved: bool | None = None) -> Row:
    """The facts of a sample, without secrets and those of its place (`step`, `evaluation`, `split`, `group`,
    `left_out`).

    environment: that of its task. solved: the environment's word, None where it was not asked for. Raises
    InvariantError: a number is not finite.
    """
    t = trajectory
    found: Row = {
        "step": None,
        "evaluation": None,
        "split": None,
        "environment": _text(environment),
        "task": _text(t.task.id),
        "group": None,
        "sample": t.sample,
        "seed": t.seed,
        "request": _text(t.request_id),
        "reward": t.reward if t.valid else None,
        "rewards": [
            {"name": _text(name), "value": float(value), "weight": float(t.weights.get(name, 1.0))}
            for name, value in t.rewards.items()
        ],
        "solved": solved,
        "finish": str(t.finish),
        "left_out": None,
        "boundary": None if t.failure is None else str(t.failure.boundary),
        "error": None if t.failure is None else _line(t.failure.message),
        "prompt_tokens": t.prompt_length,
        "sampled_tokens": t.sampled_tokens,
        "tokens": len(t.ids),
        "tool_errors": sum(use.error is not None for use in t.tool_uses),
        "turns": [_turn(turn) for turn in t.turns],
        "segments": [{"start": s.start, "end": s.end, "parent": s.parent} for s in t.segments],
        "tools": [_text(name) for name in t.tools],
        "tool_uses": [_tool_use(use) for use in t.tool_uses],
        "seconds": {name: round(t.seconds.get(name, 0.0), 6) for name in _SECONDS},
        "spans": [{"part": s.part, "start": round(s.start, 6), "end": round(s.end, 6)} for s in t.spans] or None,
        "task_data": as_json(t.task.data),
        "messages": as_json(t.messages),
        "branches": as_json(t.branches) if t.branches else None,
        "extra": as_json({key: _lines(value) for key, value in t.extra.items()}),
        "images": [
            {"start": i.start, "tokens": i.tokens, "hash": i.hash}
            | dict(zip(("time", "height", "width"), i.grid, strict=True))
            for i in t.images
        ]
        or None,
        "calls": [_call(turn) for turn in t.turns] if any(map(_is_call, t.turns)) else None,
        "seats": [{"name": name, "reward": float(value)} for name, value in t.seats.items()] or None,
    }
    _check_finite(found)
    masked: Row = _masked(found) if known() else found
    return masked


def _turn(turn: Turn) -> Row:
    return {
        "start": turn.start,
        "end": turn.end,
        "reward": float(turn.reward),
        "trained": turn.trained,
        "state": turn.state or None,
    }


def _tool_use(use: ToolUse) -> Row:
    return {
        "name": _text(use.name),
        "turn": use.turn,
        "seconds": round(use.seconds, 6),
        "error": None if use.error is None else _line(use.error),
        "cut": use.cut,
        "metrics": as_json(use.metrics) if use.metrics else "{}",
    }


def _is_call(turn: Turn) -> bool:
    return bool(turn.role or turn.asked or turn.untrained)


def _call(turn: Turn) -> Row:
    asked = as_json(turn.asked) if turn.asked else None
    return {"role": turn.role or None, "asked": asked, "untrained": turn.untrained or None}


def _masked(value: object) -> Json:
    """A row, or a part of one, without secrets, which may stand in JSON too."""
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return without_known(value) if isinstance(value, str) else value


def _check_finite(row: Row) -> None:
    numbers = [row["reward"] or 0.0, *row["seconds"].values(), *(turn["reward"] for turn in row["turns"])]
    numbers += [part[key] for part in row["rewards"] for key in ("value", "weight")]
    numbers += [use["seconds"] for use in row["tool_uses"]]
    numbers += [seat["reward"] for seat in row["seats"] or ()]
    if not all(map(math.isfinite, numbers)):
        raise InvariantError(f"{row['request']}: a reward or a time is not finite, and is not written down")


FILTERED, SURPLUS = "filtered", "surplus"
"""Why a whole group was left out of its step: by `algorithm.filter`, or since there were enough by then."""


def left_out(trajectory: Trajectory, learned: Learned | None, group: str | None) -> str | None:
    """Why a sample of a training step was not trained on; None where it was. learned: None where it is no valid
    sample. group: why its group teaches nothing by comparison, None where its rewards differ."""
    if not trajectory.valid:
        return "aborted" if trajectory.finish is FinishReason.ABORTED else "failed"
    if learned is None or learned.trained:
        return None
    if learned.advantages.any():
        return "not_updated"
    return group or "no_advantage"


def note_schemas(schemas: Iterable[Mapping[str, Json]]) -> None:
    """Remember the schemas of tools, so that files of samples that have these tools hold them."""
    for schema in schemas:
        name = _tool_name(schema)
        if name is not None and (name in _offered or len(_offered) < _MOST_NAMES):
            _offered[name] = without_known(as_json(schema))


def read_schemas(path: Path) -> list[dict[str, Json]]:
    """The schemas of the tools that the samples of a Parquet file had; those that are not stored are missing. Raises
    UserError: the file is damaged."""
    with _opened(path, []) as file:
        text = (file.schema_arrow.metadata or {}).get(_TOOLS, b"[]")
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        return []
    return [one for one in found if _tool_name(one) is not None] if isinstance(found, list) else []


def _tool_name(schema: Json) -> str | None:
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _with_schemas(names: Iterable[str]) -> dict[bytes, bytes]:
    """What the metadata of a file says of these tools."""
    known = [_offered[name] for name in sorted(set(names)) if name in _offered]
    if not known or sum(map(len, known)) > _MOST_SCHEMAS:
        return {}
    return {_TOOLS: f"[{','.join(known)}]".encode("utf-8", "replace")}


def write_trajectories(
    path: Path, rows: Sequence[Row], trajectories: Sequence[Trajectory], learned: Sequence[Learned | None] = ()
) -> None:
    """Write a file whole or not at all: aside, flushed to the disk, renamed. rows: of `trajectories`, complete. Their
    images are put into the folder beside that of the file.

    learned: what the update made of each; empty where there was none. Raises InvariantError (a number is not finite),
    OSError.
    """
    learned = learned or [None] * len(rows)
    for t in trajectories:
        for messages in (t.messages, *t.branches):
            STORE.copy(hashes(messages), path.parent.parent / IMAGES)
    with _writer(path, _with_schemas(name for row in rows for name in row["tools"])) as writer:
        for start, end in _pieces(rows):
            writer.write_batch(_batch(rows[start:end], trajectories[start:end], learned[start:end]))


def join_trajectories(path: Path, parts: Sequence[Path]) -> None:
    """Write the samples of all `parts` as one file, by group and sample; of those that come twice, the last. `path` may
    be one of the parts. Raises UserError: one of them is damaged."""
    tables = [read_table(part) for part in parts]
    every = pa.concat_tables(tables)
    places = zip(every["group"].to_pylist(), every["sample"].to_pylist(), strict=True)
    last = {place: index for index, place in enumerate(places)}
    every = every.take(pa.array([last[place] for place in sorted(last)], pa.int64()))
    rows = every.select(_TEXTS).to_pylist()
    note_schemas(schema for part in parts for schema in read_schemas(part))
    names = pc.list_flatten(every["tools"]).unique().to_pylist()
    with _writer(path, _with_schemas(names)) as writer:
        for start, end in _pieces(rows):
            writer.write_table(every.slice(start, end - start), row_group_size=_PIECE)


@contextmanager
def _writer(path: Path, more: Mapping[bytes, bytes]) -> Iterator[pq.ParquetWriter]:
    """Give what writes a file: aside, flushed to the disk, renamed, unless the block raises. more: metadata of it."""
    beside = path.with_name(f".{path.name}.new")
    try:
        schema = SCHEMA.with_metadata({**SCHEMA.metadata, **more})
        with pq.ParquetWriter(
            beside, schema, compression="zstd", use_dictionary=_FEW_VALUES, write_statistics=_SHORT, version="2.6"
        ) as writer:
            yield writer
        flush_file(beside)
        replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


_TEXTS = ["task_data", "messages", "branches", "extra"]


def _pieces(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """Yield the first and last + 1 of the rows of each row group."""
    start = letters = 0
    for index, row in enumerate(rows):
        own = sum(len(row[name] or "") for name in _TEXTS)
        if index > start and (index - start == _PIECE or letters + own > _CHARACTERS):
            yield start, index
            start, letters = index, 0
        letters += own
    if rows:
        yield start, len(rows)


def _batch(
    rows: Sequence[Row], trajectories: Sequence[Trajectory], learned: Sequence[Learned | None]
) -> pa.RecordBatch:
    facts = [pa.array([row[name] for row in rows], kind) for name, kind in FACTS.items()]
    given: dict[str, list[npt.NDArray[np.generic] | None]] = {
        name: [getattr(t, name) for t in trajectories] for name in ("ids", "loss_mask", "logprobs", "weight_version")
    }
    given["trainer_logprobs"] = [None if one is None else one.logprobs for one in learned]
    given["advantages"] = [None if one is None else one.advantages for one in learned]
    for name in ("logprobs", "trainer_logprobs", "advantages"):
        for t, column in zip(trajectories, given[name], strict=True):
            if column is not None and not np.isfinite(column).all():
                raise InvariantError(f"{t.request_id}: its {name} are not all finite, and are not written down")
    tokens = [_lists(given[name], kind) for name, kind in TOKENS.items()]
    allowed = [None if t.allowed is None else t.allowed.tolist() for t in trajectories]
    return pa.record_batch([*facts, *tokens, pa.array(allowed, SCHEMA.field(ALLOWED).type)], schema=SCHEMA)


def _lists(columns: Sequence[npt.NDArray[np.generic] | None], kind: pa.DataType) -> pa.Array:
    there = [column for column in columns if column is not None]
    offsets = np.zeros(len(columns) + 1, np.int32)
    np.cumsum([0 if column is None else len(column) for column in columns], out=offsets[1:])
    values = np.concatenate(there).astype(kind.value_type.to_pandas_dtype(), copy=False) if there else np.zeros(0)
    missing = pa.array([column is None for column in columns])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type), type=kind, mask=missing)


class Stored(NamedTuple):
    """A file of trajectories."""

    split: str
    """TRAIN, or the split that was evaluated."""
    step: int
    """The step, or the one after which it was evaluated."""
    evaluation: bool
    """Whether it is of an evaluation, not of a training step."""
    path: Path
    """The file."""


_NAME = re.compile(r"(?:(step)|eval_(.+))_(\d+)\.(parquet|jsonl|jsonl\.zst)", re.DOTALL)


def stored_files(folder: Path) -> list[Stored]:
    """The files in a folder of trajectories, by step; of several forms of one, the newest."""
    found: dict[tuple[int, bool, str], Stored] = {}
    if not folder.is_dir():
        return []
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix == ".parquet"):
        if m := _NAME.fullmatch(path.name):
            one = Stored(TRAIN if m[1] else m[2], int(m[3]), m[1] is None, path)
            found[one.step, one.evaluation, one.split] = one
    return [found[key] for key in sorted(found)]


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a Parquet file; columns: the names of those that are read, None for all.

    Raises UserError: the file is damaged, of a later version, or something else.
    """
    rows: list[Row] = read_table(path, columns).to_pylist()
    return rows


def read_table(path: Path, columns: Sequence[str] | None = None, row: int | None = None) -> pa.Table:
    """The columns of a Parquet file as pyarrow holds them. row: only this one; those far from it are not read.

    Raises UserError as `read_rows` does, and where there is no such row.
    """
    wanted = list(SCHEMA.names if columns is None else columns)
    with _opened(path, wanted) as file:
        names = set(file.schema_arrow.names)
        there = [name for name in wanted if name in names]
        if row is None:
            return _whole(file.read(there, use_threads=False), wanted)
        for piece in range(file.num_row_groups):
            if row < (count := file.metadata.row_group(piece).num_rows):
                return _whole(file.read_row_group(piece, there, use_threads=False).slice(row, 1), wanted)
            row -= count
        raise UserError(f"{path}: has no such row")


def read_columns(
    path: Path, facts: Sequence[str], tokens: Sequence[str]
) -> tuple[list[Row], dict[str, list[npt.NDArray[np.generic]]]]:
    """The rows of a Parquet file by columns of FACTS, and by name columns of TOKENS: an array [T] a row.

    Raises UserError: as `read_rows`; a row has no array.
    """
    table = read_table(path, [*facts, *tokens])
    columns: dict[str, list[npt.NDArray[np.generic]]] = {}
    for name in tokens:
        column = table[name].combine_chunks()
        if column.null_count or column.values.null_count:
            raise UserError(f"{path}: damaged: its column {name} has nulls; move the file away")
        values, ends = column.values.to_numpy(), column.offsets.to_numpy()
        columns[name] = [values[start:end].copy() for start, end in pairwise(ends.tolist())]
    rows: list[Row] = table.select(list(facts)).to_pylist()
    return rows, columns


def read_allowed(path: Path) -> list[Allowed | None]:
    """The column ALLOWED of a Parquet file. Raises UserError, as `read_rows`."""
    rows: list[list[bytes | None] | None] = read_table(path, [ALLOWED])[ALLOWED].to_pylist()
    return [None if row is None else np.array(row, object) for row in rows]


def read_batches(path: Path, columns: Sequence[str], size: int = 1024) -> Iterator[pa.RecordBatch]:
    """Yield these columns of a Parquet file, at most `size` samples at once. Raises UserError, as `read_rows`."""
    with _opened(path, columns) as file:
        yield from file.iter_batches(size, columns=list(columns), use_threads=False)


@contextmanager
def _opened(path: Path, wanted: Sequence[str]) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file that has these columns; what is wrong with it is a UserError, while it is read too."""
    try:
        with pq.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(_ABOUT, b"").decode(errors="replace")
            if not version.isdecimal():
                raise UserError(f"{path}: not a file of trajectories (its metadata lacks {_ABOUT.decode()})")
            if int(version[:9]) > VERSION:
                raise UserError(
                    f"{path}: a later agentrl wrote it (schema {version[:9]}, and this one reads up to {VERSION}): "
                    "update agentrl"
                )
            kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            for name in wanted:
                if kinds.get(name) != SCHEMA.field(name).type and (name in kinds or name not in _ADDED):
                    raise UserError(f"{path}: damaged: its column {name} is missing or of another type")
            yield file
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(_unreadable(path, error)) from error


def _whole(table: pa.Table, wanted: Sequence[str]) -> pa.Table:
    """A table with all columns that were wanted, in their order."""
    for name in wanted:
        if name not in table.schema.names:
            table = table.append_column(SCHEMA.field(name), pa.nulls(table.num_rows, SCHEMA.field(name).type))
    return table.select(list(wanted))


def _unreadable(path: Path, error: BaseException) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    why = f"a sample lacks {why}" if isinstance(error, KeyError) else why
    return f"{path}: cannot be read: {why or type(error).__name__}; move it away to go on without it"


def read_records(path: Path, *, tokens: bool = False) -> list[Record]:
    """The samples of a file of either form, its JSON texts parsed. Raises UserError.

    IN_FLIGHT is read too. A record has the columns of FACTS, but `rewards` and `weights` as mappings, `data` for
    `task_data`, `failure` (boundary and message, or None) for `boundary` and `error`, and `tokens` as counts (prompt,
    sampled, all). Those of JSON lines have no `step`, `evaluation`, `split`, `environment`, `group`, `seed`,
    `left_out`, `branches`. tokens: with the columns of TOKENS, which JSON lines lack.
    """
    if path.suffix != ".parquet":
        return _of_lines(path)
    rows = read_rows(path, [*FACTS, *TOKENS] if tokens else list(FACTS))
    return [_record(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def record(row: Row) -> Record:
    """A row as a record."""
    return _record(dict(row), str(row["request"]))


_OTHERWISE = ("boundary", "error", "task_data", "prompt_tokens", "sampled_tokens")  # columns that a record has nested


def _record(row: Row, where: str) -> Record:
    found = {name: value for name, value in row.items() if name not in _OTHERWISE}
    try:
        found["data"] = loads(row["task_data"])
        found["messages"] = messages_of(loads(row["messages"]))
        found["branches"] = [messages_of(one) for one in loads(row["branches"] or "[]")]
        found["extra"] = loads(row["extra"])
        for use in found["tool_uses"]:
            use["metrics"] = loads(use["metrics"])
        for call in found.get("calls") or ():
            call["asked"] = loads(call["asked"] or "{}")
        found["seats"] = {seat["name"]: seat["reward"] for seat in row.get("seats") or ()}
        found["rewards"] = {part["name"]: part["value"] for part in row["rewards"]}
        found["weights"] = {part["name"]: part["weight"] for part in row["rewards"]}
        if not all(-1 <= s["parent"] < index for index, s in enumerate(row["segments"])):
            raise ValueError("its segments are no tree")
        if found["branches"] and len(found["branches"]) != len(row["segments"]):
            raise ValueError("its branches are not those of its segments")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: damaged: {' '.join(str(error).split())}; move the file away") from error
    failed = row["boundary"] is not None
    found["failure"] = {"boundary": row["boundary"], "message": row["error"] or ""} if failed else None
    counts = {"prompt": row["prompt_tokens"], "sampled": row["sampled_tokens"], "all": row["tokens"]}
    return {**found, "tokens": counts}


def messages_of(value: Json) -> list[Message]:
    """Messages as they are stored. Raises ValueError for what is none."""
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise ValueError("its messages are not a list of objects with a role")
    return value


def _of_lines(path: Path) -> list[Record]:
    try:
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.decompress(data)
        if path.name == IN_FLIGHT:  # its last line may be written right now, or was cut by a kill
            data = data[: data.rfind(b"\n") + 1]
        found = [loads(line) for line in data.split(b"\n") if line]
        if path.name == IN_FLIGHT:
            return [record(one) for one in found]
        for one in found:
            messages_of(one["messages"])
            if not isinstance(one["task"], str):
                raise ValueError("a task's id is no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, zstandard.ZstdError) as error:
        raise UserError(_unreadable(path, error)) from error
    return found


@dataclass(frozen=True, slots=True)
class Told:
    """A conversation of a record, or what it adds to another."""

    messages: list[dict[str, Json]]
    """In the format of the OpenAI API."""
    heading: str = ""
    """Which conversation of a tree it is, and where it leaves another; empty where there is only one."""
    segments: tuple[int, ...] = ()
    """The segments that it adds; empty where there is only one conversation."""


def conversations(record: Mapping[str, Json]) -> list[Told]:
    """Every conversation of a record, in the order in which they begin to differ; what a later one has in common
    with an earlier one is left out."""
    branches = record.get("branches")
    if not branches:
        return [Told(record["messages"])]
    parents = [segment["parent"] for segment in record["segments"]]
    depths = record.get("extra", {}).get("depths", ())
    leaves = sorted(set(range(len(parents))) - set(parents))
    shown: dict[int, int] = {}  # segment -> the conversation that shows it
    found: list[Told] = []
    for number, leaf in enumerate(leaves, 1):
        path = path_to(leaf, parents)
        new = [index for index in path if index not in shown]
        before = path[: len(path) - len(new)]
        heading = f"conversation {number} of {len(leaves)}" if len(leaves) > 1 else ""
        heading += " (sub-agent)" if leaf < len(depths) and depths[leaf] else ""
        if before:
            count = sum(len(branches[index]) for index in before)
            heading += f", which leaves conversation {shown[before[-1]]} after message {count}"
        shown |= dict.fromkeys(new, number)
        found.append(Told([message for index in new for message in branches[index]], heading, tuple(new)))
    return found


def path_to(index: int, parents: Sequence[int]) -> list[int]:
    """The segments that lead to one, from the root, and itself; none to -1."""
    found = []
    while index >= 0:
        found.append(index)
        index = parents[index]
    return found[::-1]


def as_json(value: object) -> str:
    """Anything as JSON: see `_written`. Lone surrogates, which UTF-8 does not have, stand as escapes."""
    plain = value
    try:
        text = encode_plain(value) if _is_plain(value) else None
    except (ValueError, RecursionError):  # NaN, or nested too deeply
        text = None
    if text is None:
        plain = _written(value, (), _Room())
        text = encode_plain(plain)
    return text if _encodes(text) else dumps(plain, allow_nan=False)


encode_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode
"""The JSON of a value without circles, in a third less time."""


def _is_plain(value: Json) -> bool:
    """Whether a value is of JSON's own types and not too large, as nearly all are; see `_written`."""
    values = letters = 0
    waiting = [value]
    while waiting and values <= _VALUES:
        one = waiting.pop()
        kind = type(one)
        if kind is str:
            letters += len(one)
        elif kind is dict:
            values += len(one)
            for key, item in one.items():
                if type(key) is not str:
                    return False
                letters += len(key)
                if type(item) is str:
                    letters += len(item)
                else:
                    waiting.append(item)
        elif kind is list or kind is tuple:
            values += len(one)
            waiting += one
        elif not (kind is int or kind is float or kind is bool or one is None):
            return False
    return values <= _VALUES and letters <= _LETTERS


def _encodes(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(text: str) -> str:
    return text if _encodes(text) else text.encode("utf-8", "backslashreplace").decode()


def _line(text: str) -> str:
    """A line of the machinery, without what looks like a secret in it."""
    return _text(masked_text(text))


def _lines(value: object) -> Json:
    """Lines of the machinery likewise, and anything else as it is."""
    if not isinstance(value, tuple):
        return value
    return [masked_text(line) if isinstance(line, str) else line for line in value]


@dataclass(slots=True)
class _Room:
    """What may still be written of one thing."""

    values: int = field(default=_VALUES)
    letters: int = field(default=_LETTERS)


def _written(value: object, inside: tuple[object, ...], room: _Room) -> Json:
    """Convert anything to JSON's own types: what has no such form (an image, an object, a list in itself) is written as
    its name, and so is what raises as it is read. inside: what it is in, outermost first."""
    room.values -= 1
    if room.values < 0:
        return "<left out>"
    if isinstance(value, str):
        return _held(value, room)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _BITS else f"<integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return value if math.isfinite(value) else f"<{value}>"
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if not isinstance(value, Mapping | Sequence):
        return f"<{type(value).__name__}>"
    if len(inside) == _DEPTH or any(one is value for one in inside):
        return f"<{type(value).__name__} nested too deeply>"
    inside = (*inside, value)
    try:
        if isinstance(value, Mapping):
            return {_held(str(key), room): _written(item, inside, room) for key, item in _some(value.items(), room)}
        return [_written(item, inside, room) for item in _some(value, room)]
    except BaseException as error:  # noqa: BLE001 - boundary: somebody's own mapping or sequence may do anything here
        contained(error)
        return f"<{type(value).__name__}>"


def _held(text: str, room: _Room) -> str:
    """A text, as long as there is room."""
    if len(text) > room.letters:
        return f"<{len(text)} characters left out>"
    room.letters -= len(text)
    return text


def _some(items: Any, room: _Room) -> Iterator[Json]:
    """`items`, as long as there is room."""
    for item in items:
        yield item
        room.values -= 1
        if room.values < 0:
            return
