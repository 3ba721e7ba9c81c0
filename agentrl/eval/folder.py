"""`EvaluationFolder`: an evaluation on disk: every conversation, what became of each task, and the figures.

It has the form of a run folder without checkpoints. What ends is written in parts (`trajectories/.eval_...part_N`), so
that little is lost when the process is killed; they become one file once their split is done.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl.checkpoint.code import record_code
from agentrl.checkpoint.disk import write_whole
from agentrl.checkpoint.run_folder import EVALUATION, EVALUATIONS, RECIPE, TRAJECTORIES, FolderLock
from agentrl.errors import UserError
from agentrl.eval.outcome import Outcome, by_task, read_outcomes
from agentrl.eval.result import TaskResult
from agentrl.jsonable import dumps
from agentrl.plugins.types import Json
from agentrl.recipe.load import differing, dump_recipe, load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory_file import Row, join_trajectories, left_out, row, write_trajectories
from agentrl.trajectory import Trajectory

API = "openai:"
"""How a model behind OpenAI's API, or the one of OPENAI_BASE_URL, is named: `openai:gpt-5-mini`."""
TASKS = "tasks.jsonl"
PART_SECONDS, PART_SHARE = 1.0, 0.02
"""Least time between two parts, in seconds and as a share of the time so far: their number stays in the hundreds."""


def new_folder(run: str | None, what: str) -> Path:
    """Make and return RUN/evals/<n>_<what>, or evals/<what>-<n> without a run. Raises UserError: it cannot be made."""
    root = Path(run or ".", EVALUATIONS)
    what = re.sub(r"[^\w.=-]+", "_", what).strip("._")[-60:] or "model"
    try:
        root.mkdir(exist_ok=True)
        number = 1 + max((_number(path.name, run) for path in root.iterdir()), default=0)
        while True:  # another evaluation may take the same number at the same time
            path = root / (f"{number}_{what}" if run else f"{what}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1
    except OSError as error:
        why = f"{root}: an evaluation cannot be kept there: {error.strerror}"
        raise UserError(f"{why}; name a folder by --output DIR, or go without by --no-keep") from error


def _number(name: str, run: str | None) -> int:
    found = re.match(r"(\d{1,9})_", name) if run else re.search(r"-(\d{1,9})$", name)
    return int(found[1]) if found else 0


@dataclass(slots=True)
class EvaluationFolder:
    """The folder of one evaluation, which this process alone writes to."""

    path: Path
    """The folder."""
    _lock: FolderLock | None = None
    _made: bool = False
    _began: bool = False

    @classmethod
    def new(cls, path: Path) -> "EvaluationFolder":
        """An empty folder, which is made. Raises UserError: it cannot be made, or holds something."""
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any((path / name).exists() for name in (TRAJECTORIES, RECIPE, EVALUATION)):
                raise UserError(f"--output {path}: holds conversations already; name another folder, or --resume it")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be made: {error.strerror}") from error
        return cls(path, _made=made)

    @classmethod
    def existing(cls, path: Path) -> "EvaluationFolder":
        """The folder of an evaluation to go on with. Raises UserError: there is none."""
        if (path / "metrics.jsonl").exists() or (path / "checkpoints").exists():
            raise UserError(f"--resume {path}: a training run, not an evaluation: agentrl train --resume {path}")
        if not (path / RECIPE).is_file():
            raise UserError(f"--resume {path}: no evaluation there ({RECIPE} is missing)")
        return cls(path)

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe that it plays, with `overrides`. Raises UserError: it cannot be read, or one of them is of
        what must stay as it was."""
        before, now = load_recipe(self.path / RECIPE), load_recipe(self.path / RECIPE, overrides)
        if fixed := [key for key in differing(before, now) if not key.startswith(FREE)]:
            raise UserError(f"--resume {self.path}: {fixed[0]} cannot change: what was played stays part of the result")
        for key in ("tasks", "samples"):
            had, wanted = getattr(before.eval, key), getattr(now.eval, key)
            if wanted < had:
                raise UserError(f"--resume {self.path}: eval.{key}={wanted} is less than the {had} that were asked for")
        return now

    def begin(self, recipe: Recipe) -> None:
        """Take the folder for this process, and write the recipe that is played. Raises UserError."""
        self._lock = FolderLock(self.path)
        self._began = True
        try:
            (self.path / TRAJECTORIES).mkdir(exist_ok=True)
            write_whole(self.path / RECIPE, dump_recipe(recipe))
            record_code(self.path)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: cannot be written to: {getattr(error, 'strerror', error)}") from error

    def file(self, split: str) -> Path:
        """The path of the conversations of a split."""
        return self.path / TRAJECTORIES / f"eval_{split}_0.parquet"

    def parts(self, split: str) -> list[Path]:
        """What holds conversations of a split: its file, then what was written since, the oldest first."""
        form = re.compile(rf"\.eval_{re.escape(split)}_0\.part_(\d+)\.parquet", re.DOTALL)
        folder = self.path / TRAJECTORIES
        found = [(int(m[1]), path) for path in folder.iterdir() if (m := form.fullmatch(path.name))]
        return [*([self.file(split)] if self.file(split).exists() else []), *(path for _, path in sorted(found))]

    def stored(self, split: str) -> list[Outcome]:
        """The outcomes that are stored of a split, of each sample the last one. Raises UserError: damaged."""
        parts = self.parts(split)
        return list({(one.group, one.sample): one for path in parts for one in read_outcomes(path)}.values())

    def join(self, split: str) -> None:
        """Put what is stored of a split into one file. Raises UserError: damaged, or the disk refuses it."""
        parts = self.parts(split)
        if not parts or parts == [self.file(split)]:
            return
        try:
            join_trajectories(self.file(split), parts)
            for path in parts:
                if path != self.file(split):
                    path.unlink()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written to: {error.strerror}") from error

    def write(self, found: dict[str, Json], outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        """Write the figures, and what became of each task. Raises UserError: the disk refuses it."""
        lines = [
            dumps({"split": split, **asdict(TaskResult.of(task))})
            for split, those in outcomes.items()
            for task in by_task(those)
        ]
        try:
            write_whole(self.path / TASKS, "".join(line + "\n" for line in lines))
            write_whole(self.path / EVALUATION, dumps(found, indent=2) + "\n")
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: cannot be written to: {getattr(error, 'strerror', error)}") from error

    def close(self) -> None:
        """Let others have it; a folder that was made for nothing is removed."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._made and not self._began:
            with suppress(OSError):
                self.path.rmdir()


FREE = (
    "eval.tasks", "eval.samples", "eval.splits", "eval.every", "train.", "track.", "cluster.",
    "rollout.concurrency", "rollout.retries", "engine.args.prices", "engine.args.max_batch", "engine.args.timeout",
    "engine.args.retries", "engine.args.api_key_env", "model.device",
)  # fmt: skip
"""How the keys begin that may change as an evaluation is gone on with: they change no sample."""


@dataclass(slots=True)
class Keeper:
    """Writes what ends of a split, in parts."""

    folder: EvaluationFolder
    """Where they are written."""
    split: str
    """The split that is played."""
    environment: Callable[[Trajectory], str]
    """The name of that of a trajectory's task."""
    _waiting: list[tuple[Trajectory, Row]] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _wrote: float = field(default_factory=time.monotonic)
    _next: int = 1

    def __post_init__(self) -> None:
        names = [path.name.split(".part_") for path in self.folder.parts(self.split)]
        self._next += max((int(name[1].split(".")[0]) for name in names if len(name) > 1), default=0)

    def add(self, trajectory: Trajectory, outcome: Outcome) -> None:
        """Keep a sample. Raises UserError: the disk refuses it."""
        facts = row(trajectory, environment=self.environment(trajectory), solved=outcome.solved)
        place = {"step": 0, "evaluation": True, "split": self.split, "group": outcome.group}
        self._waiting.append((trajectory, {**facts, **place, "left_out": left_out(trajectory, None, None)}))
        now = time.monotonic()
        if now - self._wrote >= max(PART_SECONDS, PART_SHARE * (now - self._started)):
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises UserError: the disk refuses it."""
        if not self._waiting:
            return
        path = self.folder.path / TRAJECTORIES / f".eval_{self.split}_0.part_{self._next}.parquet"
        try:
            write_trajectories(path, [facts for _, facts in self._waiting], [t for t, _ in self._waiting])
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written to: {error.strerror}") from error
        self._waiting.clear()
        self._next += 1
        self._wrote = time.monotonic()
