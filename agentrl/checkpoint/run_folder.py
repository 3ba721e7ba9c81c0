"""The run folder and its lock. Every run has a new one; a folder that holds a run is never overwritten."""

import fcntl
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from os import replace
from pathlib import Path

from agentrl import __version__
from agentrl.checkpoint.disk import write_whole
from agentrl.errors import UserError
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json

RECIPE, METRICS, TRAJECTORIES, CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "trajectories", "checkpoints"
SCANS = "scans"
"""Folder of what scanners found in the files of TRAJECTORIES."""
EVALUATION, EVALUATIONS = "evaluation.json", "evals"
"""The figures of an evaluation that is over, in its folder; the folder of a run's evaluations."""
LOG, LOGS = "run.log", "logs"
"""What the run said, with the time of each line; the folder of what its workers and servers said."""
ERRORS = "error.log"
"""Traceback of the error that ended the run, which is printed in one line."""
FORMAT = 2
"""What the first line of a run's recipe says of its folder. 1: as before 0.2.0, without that line; its trajectories may
be JSON lines. Both are read; a later one is refused."""
LOCK = ".lock"
MODEL = "model"
"""Folder of the model that `agentrl sft` makes."""
_HEAD = f"# run folder of format {FORMAT}, written by agentrl {__version__}\n"
_FORMAT = re.compile(r"# run folder of format (\d{1,9})\b.*(?:\n|$)")
_LATER = re.compile(r"recipe\.resumed_(\d+)\.yaml")
"""Recipe of a resumed run, if it differs from the one before."""
_MODEL = ("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json")
_OF_A_STEP = re.compile(
    r"(?:step|eval_.+)_(\d+)\.(?:parquet|jsonl|jsonl\.zst)|in_flight\.jsonl|\..+\.parquet\.new", re.DOTALL
)
"""Names of files of trajectories, and their step; without one, of what is not whole."""


def recipe_of(path: str) -> tuple[str, str | None]:
    """The recipe's path, and the run folder if `path` is one."""
    folder = Path(path)
    return (str(RunFolder(folder).recipe()), path) if (folder / RECIPE).is_file() else (path, None)


class RunFolder:
    """Paths of one run, and its append-only `metrics.jsonl`."""

    def __init__(self, path: Path):
        self.path = path.absolute()  # a plugin may change the working directory
        self._recipe: str | None = None

    @classmethod
    def create(cls, output: str | None, name: str, root: Path = Path("runs")) -> "RunFolder":
        """Make `output`, or runs/<name>-<number> with the next free number. Raises UserError if it is in use."""
        cls.check_free(output, root)
        if output is None:
            return cls(_next_numbered(root, name))
        path = Path(output)
        _make(path)
        return cls(path)

    @classmethod
    def within(cls, root: Path, name: str) -> "RunFolder":
        """Make root/<name>-<number> with the next free number, also where `root` holds a run itself."""
        return cls(_next_numbered(root, name))

    @staticmethod
    def check_free(output: str | None, root: Path = Path("runs")) -> None:
        """Raises UserError if `output` cannot take a new run. Makes nothing: call it before costly work."""
        path = root if output is None else Path(output)
        if (path / RECIPE).exists() or (path / METRICS).exists():
            raise UserError(f"output: {path} already holds a run; name another folder, or go on with --resume {path}")
        _check_writable(path, "output:", "output=...")

    @classmethod
    def existing(cls, path: str) -> "RunFolder":
        """The folder of a run to resume. Raises UserError if it holds none."""
        folder = cls(Path(path))
        if not (folder.path / RECIPE).exists():
            places = (Path("runs", path), *Path(path).parents[:-1])  # a name, or what lies in a run
            meant = next((f"; did you mean {one}?" for one in places if (one / RECIPE).is_file()), "")
            raise UserError(f"--resume {path}: no run there ({RECIPE} is missing){meant}")
        return folder

    @property
    def gone(self) -> bool:
        """Whether it was deleted, or its recipe, without which it cannot be resumed."""
        return not (self.path / RECIPE).exists()

    def remember(self) -> None:
        """Keep the recipe in memory, for `put_back`."""
        self._recipe = (self.path / RECIPE).read_text(encoding="utf-8")

    def put_back(self) -> bool:
        """Make a deleted folder again, with its recipe, so that the run can be saved and resumed there; return whether
        it was gone. Raises UserError: it cannot be made or written to."""
        if not self.gone or self._recipe is None:
            return False
        _make(self.path)
        self.write_recipe(self._recipe)
        return True

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def recipe(self) -> Path:
        """The path of the recipe in force: the first one, or the one that the run was last resumed with. Raises
        UserError: a later agentrl wrote the folder."""
        path = self._later()[1]
        if (number := self._format()) > FORMAT:
            raise UserError(
                f"{self.path}: a later agentrl wrote this run (format {number}; {__version__} reads up to {FORMAT}): "
                f"read it with that version"
            )
        return path

    def _format(self) -> int:
        try:
            with (self.path / RECIPE).open(encoding="utf-8", errors="replace") as file:
                head = _FORMAT.match(file.readline(200))
        except OSError:  # whoever reads the recipe says so
            return FORMAT
        return int(head[1]) if head else 1

    def _later(self) -> tuple[int, Path]:
        """How often the run was resumed with another recipe, and the path of the last recipe."""
        found = [(int(m[1]), path) for path in self.path.iterdir() if (m := _LATER.fullmatch(path.name))]
        return max(found, default=(0, self.path / RECIPE))

    def write_recipe(self, text: str, step: int = 0) -> None:
        """Write the recipe in force after `step`. The first one is never overwritten: another is kept beside it. Raises
        UserError: the disk refuses it."""
        number, path = self._later()
        try:
            if path.exists():
                if path.read_text(encoding="utf-8").endswith(text):
                    return
                path = self.path / f"recipe.resumed_{number + 1}.yaml"
                text = f"# of step {step + 1} and later\n{text}"
            elif not _FORMAT.match(text):
                text = _HEAD + text
            write_whole(path, text)
        except (OSError, ValueError) as error:
            raise UserError(f"output: cannot write into {self.path}: {getattr(error, 'strerror', error)}") from error

    def append_metrics(self, metrics: Mapping[str, Json]) -> list[str]:
        """Append one line. Returns the keys whose values are NaN or infinite, which JSON does not have: the line lists
        them as `not_finite` instead."""
        bad = [key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
        row = {key: value for key, value in metrics.items() if key not in bad} | ({"not_finite": bad} if bad else {})
        with (self.path / METRICS).open("a") as file:
            file.write(dumps(row, allow_nan=False) + "\n")
        return bad

    def metrics(self) -> list[dict[str, Json]]:
        """Every row; a last line that a kill cut short is left out. Raises UserError for any other bad line."""
        path = self.path / METRICS
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        rows = [_row(line, path, number, last=number == len(lines)) for number, line in enumerate(lines, 1) if line]
        return [row for row in rows if row is not None]

    def rewind(self, step: int) -> None:
        """Drop metrics and trajectories after `step`, so that a resumed run writes each step once."""
        for path in (self.path / TRAJECTORIES).glob("*"):
            named = _OF_A_STEP.fullmatch(path.name)
            if named and path.is_file() and (named[1] is None or int(named[1]) > step):
                path.unlink()
        self._write_metrics([row for row in self.metrics() if row["step"] <= step])

    def evaluated(self, step: int) -> bool:
        """Whether the row of a step has what an evaluation found."""
        return any(key.startswith("eval/") for row in self.metrics() if row["step"] == step for key in row)

    def add_metrics(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Add metrics to the row of a step."""
        self._write_metrics([{**row, **metrics} if row["step"] == step else row for row in self.metrics()])

    def _write_metrics(self, rows: Iterable[Mapping[str, Json]]) -> None:
        beside = self.path / (METRICS + ".new")
        beside.write_text("".join(dumps(row) + "\n" for row in rows))
        replace(beside, self.path / METRICS)

    @property
    def trajectories(self) -> Path:
        """The folder of the trajectories, which is made if it does not exist."""
        folder = self.path / TRAJECTORIES
        folder.mkdir(exist_ok=True)
        return folder


def scan_path(path: Path) -> Path:
    """Where the findings of a file of trajectories stand."""
    return path.parent.parent / SCANS / f"{path.stem}.parquet"


def _row(line: bytes, path: Path, number: int, last: bool) -> dict[str, Json] | None:
    """Parse one line; None: the last one, cut short."""
    try:
        row = loads(line)
    except (ValueError, RecursionError):
        if last:
            return None
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise UserError(
            f"{path}:{number}: not a row of metrics (an object with an integer `step`): correct or remove the line"
        )
    return row


def check_export(folder: str) -> None:
    """Raise UserError if a model cannot be copied to `folder`. Makes nothing: call it before costly work."""
    _check_writable(Path(folder), "--out", "--out DIR")
    if held := next((name for name in _MODEL if (Path(folder) / name).exists()), None):
        raise UserError(f"--out {folder}: holds a model already ({held}): remove it, or name another folder")


def _check_writable(path: Path, owner: str, how: str) -> None:
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir():
        raise UserError(f"{owner} {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{owner} {there} cannot be written to; name another folder by {how}")


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot make the folder {path}: {error.strerror}") from error


def _next_numbered(root: Path, name: str) -> Path:
    _make(root)
    pattern = re.compile(re.escape(name) + r"-(\d+)$")
    taken = [int(m[1]) for p in root.iterdir() if (m := pattern.match(p.name))]
    number = max(taken, default=0) + 1
    while True:  # another run may take the same number at the same time
        path = root / f"{name}-{number:03d}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"output: cannot make the folder {path}: {error.strerror}") from error


class FolderLock:
    """Lets one process at a time train in a run folder: acquired when constructed, held until `release`.

    The kernel holds the lock, so it ends with its process, however that ends; a killed process leaves at most the
    file, which locks nothing. A file system without locks gives none. Raises UserError: another process holds the
    lock, or the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._handle = self._open()
        while not self._has_name():  # its holder removed the file between our opening and our locking
            os.close(self._handle)
            self._handle = self._open()

    def _open(self) -> int:
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"output: cannot write into {self._path.parent}: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise UserError(
                f"{self._path.parent}: {holder} trains in this folder; end that run, or wait for it, and go on with "
                f"--resume {self._path.parent}, or give this one a folder of its own (output=...)"
            ) from None
        except OSError:  # some network file systems have no locks
            return handle
        with suppress(OSError):  # a full disk is reported when something is lost
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return handle

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._handle), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the file, while nobody else can hold the lock, and release it."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._handle)
