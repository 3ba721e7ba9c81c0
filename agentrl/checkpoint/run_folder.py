"""The run folder: a new one a run; one that holds a run is never written over."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.checkpoint.disk import write_whole
from agentrl.errors import UserError

RECIPE, METRICS, TRAJECTORIES, CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "trajectories", "checkpoints"
ERRORS = "error.log"
"""Tracebacks of what ended the run, which is told in one line."""
MODEL = "model"  # that a warm start leaves
_LATER = re.compile(r"recipe\.resumed_(\d+)\.yaml")
"""What a resumed run goes by, where that is not what it went by before."""


def recipe_of(path: str) -> tuple[str, str | None]:
    """The recipe at `path`, and the run's folder where it is one."""
    folder = Path(path)
    return (str(RunFolder(folder).recipe()), path) if (folder / RECIPE).is_file() else (path, None)


class RunFolder:
    """Paths of one run, and its append-only `metrics.jsonl`."""

    def __init__(self, path: Path):
        self.path = path
        self._recipe: str | None = None

    @classmethod
    def create(cls, output: str | None, name: str, root: Path = Path("runs")) -> "RunFolder":
        """`output` as it is, or runs/<name>-<number> with the next free number. Raises UserError for one in use."""
        cls.check_free(output, root)
        if output is None:
            return cls(_next_numbered(root, name))
        path = Path(output)
        _make(path)
        return cls(path)

    @staticmethod
    def check_free(output: str | None, root: Path = Path("runs")) -> None:
        """Raises UserError when `output` cannot take a new run. Makes nothing: to be asked before costly work."""
        path = root if output is None else Path(output)
        if (path / RECIPE).exists() or (path / METRICS).exists():
            raise UserError(f"output: {path} already holds a run; name another folder, or go on with --resume {path}")
        there = next(p for p in (path, *path.parents) if p.exists())
        if not there.is_dir():
            raise UserError(f"output: {there} is a file; a run needs a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"output: {there} cannot be written to; name another folder by output=...")

    @classmethod
    def existing(cls, path: str) -> "RunFolder":
        """The folder of a run to go on with. Raises UserError when it holds none."""
        folder = cls(Path(path))
        if not (folder.path / RECIPE).exists():
            raise UserError(f"--resume {path}: no run there ({RECIPE} is missing)")
        return folder

    @property
    def gone(self) -> bool:
        """Whether it was deleted, or so much of it that nothing can be resumed there."""
        return not (self.path / RECIPE).exists()

    def remember(self) -> None:
        """Keep in memory what `put_back` writes."""
        self._recipe = (self.path / RECIPE).read_text(encoding="utf-8")

    def put_back(self) -> bool:
        """Make a folder that is gone anew, with its recipe, so that the run can be saved and resumed there. Returns
        whether it was gone. Raises UserError: it cannot be made, or not be written to."""
        if not self.gone or self._recipe is None:
            return False
        _make(self.path)
        self.write_recipe(self._recipe)
        return True

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def recipe(self) -> Path:
        """The file of the recipe that the run goes by: what it began with, or what it was resumed with last."""
        return self._later()[1]

    def _later(self) -> tuple[int, Path]:
        """How often the run was resumed with another recipe, and the last one."""
        found = [(int(m[1]), path) for path in self.path.iterdir() if (m := _LATER.fullmatch(path.name))]
        return max(found, default=(0, self.path / RECIPE))

    def write_recipe(self, text: str, step: int = 0) -> None:
        """What the run goes by after `step`. The recipe that it began with is never written over: another one is kept
        beside it. Raises UserError: the disk refuses it."""
        number, path = self._later()
        try:
            if path.exists():
                if path.read_text(encoding="utf-8").endswith(text):
                    return
                path = self.path / f"recipe.resumed_{number + 1}.yaml"
                text = f"# of step {step + 1} and later\n{text}"
            write_whole(path, text)
        except (OSError, ValueError) as error:
            raise UserError(f"output: cannot write into {self.path}: {getattr(error, 'strerror', error)}") from error

    def append_metrics(self, metrics: Mapping[str, Any]) -> list[str]:
        """A line of its own. Returns the keys whose values are NaN or infinite, which JSON does not have: the line
        holds these names, as `not_finite`, in their place."""
        bad = [key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
        row = {key: value for key, value in metrics.items() if key not in bad} | ({"not_finite": bad} if bad else {})
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        return bad

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line so far; a last line that a kill cut short is left out. Raises UserError: any other line that
        is no row."""
        path = self.path / METRICS
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        rows = [_row(line, path, number, last=number == len(lines)) for number, line in enumerate(lines, 1) if line]
        return [row for row in rows if row is not None]

    def rewind(self, step: int) -> None:
        """Drop metrics after `step`, so that a resumed run writes each step once."""
        rows = [row for row in self.metrics() if row["step"] <= step]
        beside = self.path / (METRICS + ".new")
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        beside.replace(self.path / METRICS)

    @property
    def trajectories(self) -> Path:
        folder = self.path / TRAJECTORIES
        folder.mkdir(exist_ok=True)
        return folder


def _row(line: bytes, path: Path, number: int, last: bool) -> dict[str, Any] | None:
    """None: the last line, which has no end, and is cut short."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        if last:
            return None
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise UserError(
            f"{path}:{number}: is no row of metrics (an object with a whole `step`): mend or remove the line"
        )
    return row


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
