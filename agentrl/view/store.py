"""`RunStore`: what the page shows of a run's folder, read from its files as they are at that moment.

Files are anybody's, are being written, and may be damaged: what is wrong with one file is a line beside it, and the
others are shown.
"""

import json
import os
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from agentrl.checkpoint.run_folder import CHECKPOINTS, ERRORS, LOCK, LOG, LOGS, METRICS, RECIPE, TRAJECTORIES, scan_path
from agentrl.errors import UserError
from agentrl.images import FOLDER as IMAGES
from agentrl.images import shown
from agentrl.plugins.types import Json
from agentrl.view.texts import Texts

Why = Callable[[Path, Path | None, Callable[[int], str] | None], Json]
"""From a file of trajectories, that of the first evaluation of its split (if it is another), and a function from a
token id to its text (if there is a tokenizer): why samples are unsolved."""

IN_FLIGHT = "in_flight.jsonl"
_SHORT = (
    "task", "group", "sample", "environment", "reward", "solved", "finish", "left_out", "boundary", "tokens",
    "sampled_tokens", "tool_errors",
)  # fmt: skip
_RECIPES = re.compile(r"recipe(?:\.resumed_(\d+))?\.yaml")
_CHECKPOINT = re.compile(r"step_(\d+)")
_MOST_LINES = 16 << 20  # bytes of metrics that one answer holds
_MOST_LOG = 512 << 10  # bytes of a log that one answer holds
_MOST_LOGS = 200
_FIELD = 80  # characters of a value of a task's data by which one can filter
_PARTS = 64  # reward parts by which one can filter
_PREVIEW = 200  # characters of a prompt in the table
_STILL = 3600  # seconds after which a run of another machine that writes nothing counts as over


def is_run(folder: Path) -> bool:
    """Whether a run or an evaluation lies there."""
    return any((folder / name).exists() for name in (METRICS, TRAJECTORIES, RECIPE))


class RunStore:
    """Reads one run folder, or one of an evaluation. Safe to call from several threads."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._indices: dict[str, tuple[str, Json]] = {}  # file's name -> its version, and its index
        self._previews: dict[str, tuple[str, Json]] = {}
        self._read_recipes: dict[str, tuple[str, Json]] = {}
        self._reasons: dict[str, tuple[str, Json]] = {}
        self._texts = Texts()
        self._reading: defaultdict[tuple[int, str], threading.Lock] = defaultdict(threading.Lock)
        self._pieces: tuple[str, Callable[[Sequence[int]], list[str]]] | None = None

    # --- what there is -------------------------------------------------------------------------------------------

    def state(self) -> Json:
        """What changes as a run goes on: files and their versions, recipes, checkpoints, whether it trains."""
        return {
            "name": self.name,
            "folder": str(self.folder.absolute()),
            "training": is_training(self.folder),
            "files": (files := self._files()),
            "stored": len(files),
            "recipes": self.recipes(),
            "checkpoints": self._checkpoints(),
            "notes": version_of(self.folder / "notes.jsonl"),
            "others": [
                name for name in ("report.html", "error.log", "evaluation.json") if (self.folder / name).is_file()
            ],
        }

    def _files(self) -> list[Json]:
        from agentrl.rollout.trajectory_file import TRAIN, Stored, stored_files

        folder = self.folder / TRAJECTORIES
        try:
            stored = stored_files(folder)
        except OSError:
            stored = []
        if (folder / IN_FLIGHT).is_file():
            stored.append(Stored(TRAIN, -1, False, folder / IN_FLIGHT))
        found = []
        for one in stored:
            if version := _file_version(one.path):
                facts = {"name": one.path.name, "split": one.split, "step": one.step, "evaluation": one.evaluation}
                found.append({**facts, "version": version})
        return found

    def recipes(self) -> list[Json]:
        """The recipe and those that the run was resumed with, in order, each without secrets."""
        found = []
        for path in _entries(self.folder):
            if m := _RECIPES.fullmatch(path.name):
                found.append((int(m[1] or 0), {"name": path.name, **self._recipe(path)}))
        return [recipe for _, recipe in sorted(found, key=lambda pair: pair[0])]

    def _recipe(self, path: Path) -> Json:
        version = version_of(path)
        known = self._read_recipes.get(path.name)
        if known is None or known[0] != version:
            known = self._read_recipes[path.name] = version, _recipe(path)
        return known[1]

    def _checkpoints(self) -> list[Json]:
        best = read_json(self.folder / CHECKPOINTS / "best.json")
        best_step = best.get("step") if isinstance(best, dict) else None
        steps = sorted(int(m[1]) for p in _entries(self.folder / CHECKPOINTS) if (m := _CHECKPOINT.fullmatch(p.name)))
        return [{"step": step, "best": step == best_step} for step in steps]

    # --- metrics -------------------------------------------------------------------------------------------------

    def metrics(self, start: int = 0, of: str = "") -> Json:
        """The rows of metrics.jsonl from byte `start` on; from its beginning if it is not the file `of`.

        `next` and `of` are what the next call is given. A last line that is not whole yet is left for it; whole lines
        that are no rows are counted in `damaged`.
        """
        path = self.folder / METRICS
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                here = f"{stat.st_dev}-{stat.st_ino}"
                if of != here or start > stat.st_size:
                    start = 0
                file.seek(start)
                data = file.read(_MOST_LINES)
                more = start + len(data) < stat.st_size
        except FileNotFoundError:
            return {"of": "", "start": 0, "next": 0, "rows": [], "damaged": 0, "more": False}
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        whole = data[: data.rfind(b"\n") + 1]
        rows, damaged = _rows(whole)
        found = {"of": here, "start": start, "next": start + len(whole), "rows": rows, "damaged": damaged}
        return {**found, "more": more and bool(whole)}

    # --- logs ----------------------------------------------------------------------------------------------------

    def logs(self) -> list[Json]:
        """What was written of what the run, its workers and its servers said: names and sizes, the run's own first."""
        return [{"name": name, "size": _size(path)} for name, path in self._logs().items()]

    def log(self, name: str, start: int = 0, of: str = "") -> Json:
        """The text of a log from byte `start` on; from its beginning if it is not the file `of`, or its last part where
        that is long. `next` and `of` are what the next call is given. Raises UserError: there is none, or no longer."""
        path = self._logs().get(name)
        if path is None:
            raise UserError(f"{name[:100]}: no such log")
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                here = f"{stat.st_dev}-{stat.st_ino}"
                if of != here or start > stat.st_size:
                    start = 0
                first = max(start, stat.st_size - _MOST_LOG)
                file.seek(first)
                data = file.read(_MOST_LOG)
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {error.strerror}") from error
        found = {"of": here, "start": start, "left_out": first - start, "next": first + len(data)}
        return {**found, "text": data.decode("utf-8", "replace")}

    def _logs(self) -> dict[str, Path]:
        places = [self.folder / LOG, self.folder / ERRORS, *_entries(self.folder), *_entries(self.folder / LOGS)]
        found = {path.relative_to(self.folder).as_posix(): path for path in places if path.suffix == ".log"}
        found["of the sweep"] = self.folder.with_name(f"{self.folder.name}.log")  # what a trial's processes said
        there = [(name, path) for name, path in found.items() if path.is_file()]
        return dict(there[:_MOST_LOGS])

    # --- samples -------------------------------------------------------------------------------------------------

    def index(self, names: Iterable[str]) -> dict[str, Json]:
        """Of each of these files the short facts of its samples, column by column, or `error`.

        Names of files that are not there are left out. A column whose values are all equal is that value alone. What is
        `tasks` gives each task's short data, by which one can filter.
        """
        there = self._paths()
        return {name: self._cached(self._indices, name, _index) for name in names if name in there}

    def previews(self, name: str) -> Json:
        """The beginning of the first prompt of each task of a file: task -> text."""
        self.path(name)
        return self._cached(self._previews, name, _previews)

    def sample(self, name: str, row: int) -> Json:
        """One sample with every conversation and its tokens. Raises UserError: damaged, or no such one."""
        return self._with_pieces(_sample(self.path(name), row))

    def samples(self, name: str, rows: Sequence[int]) -> list[Json | None]:
        """Several samples of a file likewise; None for one that is damaged."""
        if not rows:
            return []
        read = _samples(self.path(name), rows)
        return [None if found is None else self._with_pieces(found) for found in read]

    def _with_pieces(self, found: Json) -> Json:
        if "ids" in found:
            try:
                found["pieces"] = self._reader()(found["ids"])
            except UserError as error:
                found["pieces"], found["pieces_missing"] = None, str(error)
        return found

    def spans(self, name: str) -> Json:
        """`rows`: of each sample of a file when it waited for what: [part, start, end], in seconds since `zero`, when
        the first one began; None for those of which it is not known."""
        return _spans(self.path(name))

    def tools(self, name: str) -> list[Json]:
        """The schemas of the tools that the samples of a file had, as they were stored."""
        from agentrl.rollout.trajectory_file import read_schemas

        path = self.path(name)
        return read_schemas(path) if path.suffix == ".parquet" else []

    def search(self, text: str, names: Iterable[str]) -> dict[str, list[int]]:
        """File -> the rows whose conversations contain a text, upper and lower case alike."""
        paths = self._paths()
        return {name: self._find(paths[name], text) for name in names if name in paths}

    def _find(self, path: Path, text: str) -> list[int]:
        if path.suffix == ".parquet":
            try:
                found = self._texts.find(path, version_of(path), text)
            except UserError:
                return []  # the page says what is wrong with the file
            if found is not None:
                return found
        return _search(path, text)

    def prepare(self, wanted: Callable[[], bool]) -> None:
        """Read ahead what the page will ask for, the newest first, as long as it is wanted."""
        files = [file["name"] for file in reversed(self._files())]
        for number, name in enumerate(files):
            if not wanted():
                return
            self.index([name])
            if number == 0:
                self.previews(name)
        for name in files:
            if not wanted():
                return
            path = self.folder / TRAJECTORIES / name
            with suppress(UserError):
                if path.suffix == ".parquet":
                    self._texts.keep(path, version_of(path))

    def notes(self) -> Json:
        """What people said of samples: file -> row -> `labels` (label and turn each) and `notes`."""
        from agentrl.eval.notes import read_notes, rows_of

        said = read_notes(self.folder)
        found: dict[str, dict[str, Json]] = {}
        for name, path in self._paths().items() if said else ():
            try:
                rows = rows_of(path, said)
            except UserError:
                continue  # the page says what is wrong with the file
            for row, request in rows.items():
                one = said[request]
                notes = [
                    {"id": n.id, "text": n.text, "turn": n.turn, "by": n.by, "at": n.at} for n in one.notes.values()
                ]
                found.setdefault(name, {})[str(row)] = {"labels": [list(pair) for pair in one.labels], "notes": notes}
        return found

    def write_note(self, value: Json) -> Json:
        """Take a change of notes and labels that a page sends, and return all of them. Raises UserError: it is none, or
        cannot be written."""
        import getpass

        from agentrl.eval.notes import change_of, write_change

        change = change_of(value)
        self.path(change.file)
        write_change(self.folder, replace(change, by=getpass.getuser(), at=time.time()))
        return self.notes()

    def evaluations(self) -> list[Json]:
        """The accuracy of each stored evaluation with its 95 % interval, by split and step."""
        found = []
        for file in self._files():
            if file["evaluation"]:
                facts = self.index([file["name"]]).get(file["name"], {})
                if "error" not in facts and (row := _accuracy(facts)) is not None:
                    found.append({"split": file["split"], "step": file["step"], "file": file["name"], **row})
        return found

    def why(self, name: str, why: Why) -> Json:
        """Why samples of a file are unsolved, by `why`; see it."""
        self.path(name)
        return self._cached(self._reasons, name, lambda path: why(path, self._first(name), self._piece()))

    def _first(self, name: str) -> Path | None:
        """The file of the first evaluation of the same split; None where it is this one, or a training step."""
        there = self._files()
        split = next((file["split"] for file in there if file["name"] == name and file["evaluation"]), None)
        first = next((file["name"] for file in there if file["split"] == split and file["evaluation"]), name)
        return None if first == name else self.folder / TRAJECTORIES / first

    def path(self, name: str) -> Path:
        """The path of a stored file by its name. Raises UserError: it is not (or no longer) there."""
        if (path := self._paths().get(name)) is None:
            raise UserError(f"{name[:100]}: not stored there, or no longer")
        return path

    def _paths(self) -> dict[str, Path]:
        return {file["name"]: self.folder / TRAJECTORIES / file["name"] for file in self._files()}

    def _cached(self, cache: dict[str, tuple[str, Json]], name: str, read: Callable[[Path], Json]) -> Json:
        path = self.folder / TRAJECTORIES / name
        version = _file_version(path)
        with self._reading[id(cache), name]:  # what is being read ahead is not read twice
            known = cache.get(name)
            if known is not None and known[0] == version:
                return known[1]
            try:
                found = read(path)
            except UserError as error:
                found = {"error": str(error)}
            cache[name] = version, found
            return found

    # --- tokens --------------------------------------------------------------------------------------------------

    def _reader(self) -> Callable[[Sequence[int]], list[str]]:
        """A function from token ids to the text of each. Raises UserError: there is no tokenizer."""
        path = self._tokenizer()
        if path is None:
            raise UserError("neither a checkpoint nor the recipe names a tokenizer that lies on this machine")
        if self._pieces is None or self._pieces[0] != str(path):
            from agentrl.view.pieces import reader

            self._pieces = str(path), reader(path)
        return self._pieces[1]

    def _piece(self) -> Callable[[int], str] | None:
        try:
            read = self._reader()
        except UserError:
            return None
        return lambda token: read([token])[0]

    def _tokenizer(self) -> Path | None:
        """The tokenizer.json of the newest checkpoint, or of the recipe's model."""
        saved = [self.folder / CHECKPOINTS / f"step_{c['step']}" for c in reversed(self._checkpoints())]
        named = [recipe["tree"] for recipe in self.recipes() if isinstance(recipe.get("tree"), dict)]
        model = named[-1].get("model") if named else None
        where = model.get("path") if isinstance(model, dict) else None
        if isinstance(where, str):
            from agentrl.models import EMBEDDED, embedded_path

            saved.append(embedded_path(where) if where in EMBEDDED else Path(where))
        return next((folder / "tokenizer.json" for folder in saved if (folder / "tokenizer.json").is_file()), None)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def version_of(path: Path) -> str:
    """What changes when a file does; an empty string where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _file_version(path: Path) -> str:
    """What changes when a file of trajectories does, or what scanners found in it."""
    version = version_of(path)
    return f"{version} {version_of(scan_path(path))}".strip() if version else ""


def is_training(folder: Path) -> bool:
    """Whether a process says that it trains there, and lives; of another machine's it is not known, which counts as
    long as the run wrote something within _STILL. (Asking the kernel for the lock would keep a run that starts at that
    moment from getting it.)"""
    try:
        text = (folder / LOCK).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return False
    m = re.fullmatch(r"process (\d{1,9}) on (.+)", text.strip())
    if m is None:
        return False
    if m[2] != socket.gethostname():
        return time.time() - _last_written(folder) < _STILL
    try:
        os.kill(int(m[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _last_written(folder: Path) -> float:
    """When a run last wrote something."""
    stored = folder / TRAJECTORIES
    names = (LOCK, METRICS, LOG, CHECKPOINTS)
    found = [0.0]
    for path in (*(folder / name for name in names), stored, stored / IN_FLIGHT, *_entries(folder / LOGS)):
        with suppress(OSError):
            found.append(path.stat().st_mtime)
    return max(found)


def read_json(path: Path) -> Json:
    """What a file holds; None where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _recipe(path: Path) -> Json:
    """A recipe's tree, without what looks like a secret, and the comment that it begins with; or `error`."""
    from agentrl.recipe.secrets import masked

    try:
        text = path.read_text(encoding="utf-8")
        tree = masked(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        json.dumps(tree, allow_nan=False)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        return {"error": f"cannot be read: {' '.join(str(error).split())[:200]}"}
    return {"tree": tree, "comment": text.partition("\n")[0][1:].strip() if text.startswith("#") else ""}


def _rows(data: bytes) -> tuple[list[Json], int]:
    rows, damaged = [], 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        else:
            damaged += 1
    return rows, damaged


# --- one file of samples -----------------------------------------------------------------------------------------


def _index(path: Path) -> Json:
    columns = _index_of_table(path) if path.suffix == ".parquet" else _index_of_records(path)
    rows = len(columns["task"])
    found = _findings(path)
    columns["scan"] = [
        " ".join(name for name, notes in found.items() if notes[row] is not None) or None for row in range(rows)
    ]
    return {"rows": rows, **{name: _packed(values) for name, values in columns.items()}}


def _findings(path: Path) -> Mapping[str, Sequence[str | None]]:
    """What each scanner found in each sample."""
    if not scan_path(path).is_file():
        return {}
    from agentrl.eval.scan import read_findings  # which brings plugins

    return read_findings(path)


def _packed(values: Json) -> Json:
    """A column, or the one value that all samples have."""
    if isinstance(values, list) and values and all(value == values[0] for value in values):
        return values[0]
    return values


def column(facts: Json, name: str) -> list[Json]:
    """A column of an index with one value a sample."""
    values = facts[name]
    return values if isinstance(values, list) else [values] * facts["rows"]


def _index_of_table(path: Path) -> Json:
    import pyarrow.compute as pc

    from agentrl.rollout.trajectory_file import read_table

    nested = ["turns", "tool_uses", "seconds", "segments", "task_data", "advantages", "rewards"]
    table = read_table(path, [*_SHORT, *nested])
    found: dict[str, Json] = {name: table[name].to_pylist() for name in _SHORT}
    found["turns"] = pc.list_value_length(table["turns"]).to_pylist()
    found["calls"] = pc.list_value_length(table["tool_uses"]).to_pylist()
    found |= _tools_of(table["tool_uses"].combine_chunks())
    found["parts"] = _parts_of(table["rewards"].combine_chunks())
    found["branches"] = pc.list_value_length(table["segments"]).to_pylist()
    for name in ("total", "engine", "tools", "environment", "hooks"):
        found[f"{name}_s"] = _numbers(pc.struct_field(table["seconds"], [name]).to_numpy(), 3)
    found["reward"] = _numbers(table["reward"].to_numpy(), 6)
    found["advantage"] = _advantages(table["advantages"].combine_chunks(), table["sampled_tokens"].to_numpy())
    found["tasks"] = _tasks(zip(found["task"], table["task_data"].to_pylist(), strict=True))
    return found


def _tools_of(uses: Any) -> dict[str, list[str | None]]:
    """The names of the tools that each sample called, and of those of which a call failed."""
    import numpy as np
    import pyarrow.compute as pc

    flat = pc.list_flatten(uses)
    name, error = (pc.struct_field(flat, [field]) for field in ("name", "error"))
    codes = pc.fill_null(name, "?").dictionary_encode()
    names = [name[:_FIELD] for name in codes.dictionary.to_pylist()]
    pairs = np.stack([pc.list_parent_indices(uses).to_numpy(), codes.indices.to_numpy(zero_copy_only=False)], axis=1)
    failed = error.is_valid().to_numpy(zero_copy_only=False)
    return {"tool": _joined(pairs, names, len(uses)), "failed_tool": _joined(pairs[failed], names, len(uses))}


def _joined(pairs: Any, names: Sequence[str], count: int) -> list[str | None]:
    """Of each sample its names as one text. pairs: of sample and number of a name."""
    import numpy as np

    found: list[str | None] = [None] * count
    for row, code in np.unique(pairs, axis=0).tolist():
        found[row] = names[code] if found[row] is None else f"{found[row]} {names[code]}"
    return found


def _parts_of(rewards: Any) -> dict[str, list[float | None]]:
    """The values of each reward part."""
    import numpy as np
    import pyarrow.compute as pc

    flat = pc.list_flatten(rewards)
    parents = pc.list_parent_indices(rewards).to_numpy()
    codes = pc.fill_null(pc.struct_field(flat, ["name"]), "?").dictionary_encode()
    values = pc.struct_field(flat, ["value"]).to_numpy(zero_copy_only=False)
    found = {}
    for number, name in enumerate(codes.dictionary.to_pylist()[:_PARTS]):
        column = np.full(len(rewards), np.nan)
        own = codes.indices.to_numpy(zero_copy_only=False) == number
        column[parents[own]] = values[own]
        found[name] = _packed(_numbers(column, 6))
    return found


def _advantages(column: Any, trained: Any) -> list[float | None]:
    """The mean advantage over the trained tokens of each sample; None where there are none."""
    import numpy as np

    offsets = column.offsets.to_numpy()
    sums = np.concatenate([[0.0], np.cumsum(column.values.to_numpy(zero_copy_only=False), dtype=np.float64)])
    totals = sums[offsets[1:]] - sums[offsets[:-1]]
    there = column.is_valid().to_numpy(zero_copy_only=False) & (trained > 0)
    return _numbers(np.where(there, totals / np.maximum(trained, 1), np.nan), 5)


def _numbers(values: Any, digits: int) -> list[float | None]:
    """The numbers of an array rounded, None for those that are not finite."""
    import numpy as np

    found: list[float | None] = np.round(values, digits).tolist()
    for index in np.flatnonzero(~np.isfinite(values)).tolist():
        found[index] = None
    return found


def _number(value: Json, digits: int) -> float | None:
    """A number rounded, None where it is not finite."""
    if not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        return None
    return round(value, digits)


def _tasks(pairs: Iterable[tuple[str, str | None]]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for task, text in pairs:
        if task not in found:
            try:
                data = json.loads(text or "{}", parse_constant=lambda _: None)
            except (ValueError, RecursionError):
                data = None
            found[task] = _short_data(data)
    return found


def _short_data(data: Json) -> dict[str, Json]:
    if not isinstance(data, Mapping):
        return {}
    return {
        key[:_FIELD]: value
        for key, value in list(data.items())[:30]
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _FIELD)
    }


def _index_of_records(path: Path) -> Json:
    """The same of JSON lines, which hold less."""
    from agentrl.rollout.trajectory_file import read_records

    records = read_records(path)
    found: dict[str, Json] = {name: [record.get(name) for record in records] for name in _SHORT}
    counts = [_mapping(record.get("tokens")) for record in records]
    found["tokens"], found["sampled_tokens"] = ([c.get(key) for c in counts] for key in ("all", "sampled"))
    found["boundary"] = [_mapping(record.get("failure")).get("boundary") for record in records]
    uses = [_list(record.get("tool_uses")) for record in records]
    found["tool_errors"] = [sum(isinstance(u, dict) and u.get("error") is not None for u in one) for one in uses]
    found["calls"] = [len(one) for one in uses]
    for name, failed in (("tool", False), ("failed_tool", True)):
        of = [
            {str(u.get("name")) for u in one if isinstance(u, dict) and (u.get("error") or not failed)} for one in uses
        ]
        found[name] = [" ".join(sorted(names)) or None for names in of]
    rewards = [_mapping(record.get("rewards")) for record in records]
    parts = dict.fromkeys(part for one in rewards for part in one)
    found["parts"] = {part: _packed([_number(one.get(part), 6) for one in rewards]) for part in list(parts)[:_PARTS]}
    found["turns"] = [len(_list(record.get("turns"))) for record in records]
    found["branches"] = [len(_list(record.get("segments"))) for record in records]
    for name in ("total", "engine", "tools", "environment", "hooks"):
        found[f"{name}_s"] = [_number(_mapping(record.get("seconds")).get(name), 3) for record in records]
    found["reward"] = [_number(v, 6) for v in found["reward"]]
    found["advantage"] = [None] * len(records)
    found["tasks"] = {record["task"]: _short_data(record.get("data")) for record in records}
    return found


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _accuracy(facts: Json) -> Json | None:
    """Tasks, samples, accuracy and mean reward of an evaluation with their intervals; None where nobody said what is
    solved."""
    from agentrl.eval.statistics import accuracy_interval, mean_interval

    tasks: dict[str, tuple[int, int]] = {}
    rewards: dict[str, list[float]] = {}
    columns = (column(facts, name) for name in ("task", "solved", "reward"))
    for task, solved, reward in zip(*columns, strict=True):
        if isinstance(solved, bool):
            correct, samples = tasks.get(task, (0, 0))
            tasks[task] = correct + solved, samples + 1
            if isinstance(reward, int | float):
                rewards.setdefault(task, []).append(reward)
    if not tasks:
        return None
    value, low, high = accuracy_interval(*zip(*tasks.values(), strict=True))
    failed = sum(boundary is not None for boundary in column(facts, "boundary"))
    samples = sum(count for _, count in tasks.values())
    found = {"tasks": len(tasks), "samples": samples, "failed": failed}
    names = ("reward", "reward_low", "reward_high")
    mean = dict(zip(names, mean_interval(list(rewards.values())), strict=True)) if rewards else {}
    return {**found, "accuracy": value, "low": low, "high": high, **mean}


def _previews(path: Path) -> Json:
    if path.suffix != ".parquet":
        from agentrl.rollout.trajectory_file import read_records

        return {record["task"]: preview(record["messages"]) for record in read_records(path)}
    from agentrl.rollout.trajectory_file import read_table

    table = read_table(path, ["task", "messages"])
    first: dict[str, int] = {}
    for row, task in enumerate(table["task"].to_pylist()):
        first.setdefault(task, row)
    texts = table["messages"].take(list(first.values())).to_pylist()
    found = {}
    for task, text in zip(first, texts, strict=True):
        try:
            found[task] = preview(json.loads(text or "[]"))
        except (ValueError, RecursionError):
            found[task] = ""
    return found


def preview(messages: Json) -> str:
    """The beginning of the first message of a user as one line."""
    for message in _list(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            texts = [text for part in parts if isinstance(text := _mapping(part).get("text"), str)]
            return " ".join(" ".join(texts)[: 4 * _PREVIEW].split())[:_PREVIEW]
    return ""


def _spans(path: Path) -> Json:
    from agentrl.rollout.trajectory_file import read_table

    if path.suffix != ".parquet":
        return {"zero": 0.0, "rows": []}
    rows = read_table(path, ["spans"])["spans"].to_pylist()
    zero = min((span["start"] for spans in rows for span in spans or ()), default=0.0)
    told = [
        spans and [[s["part"], _number(s["start"] - zero, 4), _number(s["end"] - zero, 4)] for s in spans]
        for spans in rows
    ]
    return {"zero": _number(zero, 6) or 0.0, "rows": told}


def _sample(path: Path, row: int) -> Json:
    from agentrl.rollout.trajectory_file import read_records, read_table, record

    if path.suffix == ".parquet":
        return _told(path, record(read_table(path, row=row).to_pylist()[0])) | _scanned(path, row)
    records = read_records(path)
    if row >= len(records):
        raise UserError(f"{path}: has no such row")
    return _told(path, records[row]) | _scanned(path, row)


def _scanned(path: Path, row: int) -> dict[str, Json]:
    """What scanners found in a sample, by name."""
    found = {name: notes[row] for name, notes in _findings(path).items() if notes[row] is not None}
    return {"scan": found} if found else {}


def _samples(path: Path, rows: Sequence[int]) -> list[Json | None]:
    from agentrl.rollout.trajectory_file import read_records, read_table, record

    if path.suffix == ".parquet":
        table = read_table(path)
        found = [table.slice(row, 1).to_pylist()[0] for row in rows]
    else:
        records = read_records(path)
        found = [records[row] for row in rows]
    told: list[Json | None] = []
    for one in found:
        try:
            told.append(_told(path, record(one) if path.suffix == ".parquet" else one))
        except UserError:
            told.append(None)
    return told


def _told(path: Path, record: Mapping[str, Json]) -> Json:
    """A record as the page reads it: with every conversation as `told`, and log-probs of five digits."""
    from agentrl.rollout.trajectory_file import conversations

    found = dict(record)
    try:
        told = conversations(found)
        found["seed"] = None if found.get("seed") is None else str(found["seed"])  # a browser's numbers have 53 bits
        pictures = path.parent.parent / IMAGES
        found["told"] = [
            {
                "heading": t.heading,
                "messages": [shown(m, pictures) for m in t.messages],
                "segments": t.segments,
                "counts": [len(found["branches"][segment]) for segment in t.segments],
            }
            for t in told
        ]
        for name in ("logprobs", "trainer_logprobs", "advantages"):
            if found.get(name) is not None:
                found[name] = [float(f"{value:.5g}") for value in found[name]]
        json.dumps(found, allow_nan=False)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path.name}: damaged: this sample cannot be shown ({why})") from error
    for name in ("messages", "branches"):  # `told` holds them
        found.pop(name, None)
    return found


def _search(path: Path, text: str) -> list[int]:
    if path.suffix != ".parquet":
        from agentrl.rollout.trajectory_file import read_records

        try:
            return [
                row for row, one in enumerate(read_records(path)) if text.lower() in json.dumps(one["messages"]).lower()
            ]
        except UserError:
            return []
    import pyarrow.compute as pc

    from agentrl.rollout.trajectory_file import encode_plain, read_table

    wanted = encode_plain(text)[1:-1]  # as it stands within JSON
    try:
        wanted.encode()
    except UnicodeEncodeError:
        return []
    try:
        table = read_table(path, ["messages", "branches"])
    except UserError:
        return []
    hits = pc.fill_null(pc.match_substring(table["messages"], wanted, ignore_case=True), False)
    if table["branches"].null_count < table.num_rows:
        more = pc.match_substring(table["branches"], wanted, ignore_case=True)
        hits = pc.or_(hits, pc.fill_null(more, False))
    return [row for row, hit in enumerate(hits.to_pylist()) if hit]
