"""The run folder: a new one a run; one that holds a run is never written over."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.training.saving.disk import write_whole

RECIPE, METRICS, TRAJECTORIES, CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "trajectories", "checkpoints"
MODEL = "model"  # that a warm start leaves


def recipe_of(path: str) -> tuple[str, str | None]:
    """The recipe at `path`, and the run's folder where it is one."""
    folder = Path(path)
    return (str(folder / RECIPE), path) if folder.is_dir() and (folder / RECIPE).is_file() else (path, None)


class RunFolder:
    """Paths of one run, and its append-only `metrics.jsonl`."""

    def __init__(self, path: Path):
        self.path = path

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
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def write_recipe(self, text: str) -> None:
        """Raises UserError: the disk refuses it."""
        try:
            write_whole(self.path / RECIPE, text)
        except OSError as error:
            raise UserError(f"output: cannot write into {self.path}: {error.strerror}") from error

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line so far; a last line that a kill cut short is left out."""
        rows = []
        path = self.path / METRICS
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

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
