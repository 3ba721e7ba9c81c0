"""`Trial`: a run of a sweep, and the processes that train several of them at once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.checkpoint.run_folder import CHECKPOINTS, RunFolder
from agentrl.cluster.placement import VISIBLE, visible
from agentrl.errors import UserError
from agentrl.plugins.types import Json

_POLL = 0.2  # seconds
_PATIENCE = 120.0
"""Seconds that an interrupted run has to save its last whole step."""
FIGURES = "accuracy", "accuracy_low", "accuracy_high", "reward/mean", "reward_low", "reward_high"
"""What is told of a run on a held-out split."""
_LAST = 4000  # bytes of a log that its last line is sought in
_BOOT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
"""Has the run interrupted, and so saved, when this process is gone, however that ended."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep."""

    configuration: int
    """Index of its configuration."""
    keys: tuple[str, ...]
    """`KEY=VALUE` of its configuration and its seed."""
    folder: Path
    """Its run folder."""

    @property
    def log(self) -> Path:
        """What its processes said."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def rows(self) -> list[dict[str, Json]]:
        """Its metrics; none where it has not begun. Raises UserError: they are damaged."""
        return RunFolder(self.folder).metrics() if self.folder.is_dir() else []

    @property
    def steps(self) -> int:
        """Training steps done."""
        return max((int(row["step"]) for row in self.rows()), default=0)

    def saved(self) -> int | None:
        """The step of the last checkpoint; None where there is none."""
        names = (path.name for path in (self.folder / CHECKPOINTS).glob("*"))
        found = (re.fullmatch(r"step_(\d+)|\.step_(\d+)\.old", name) for name in names)  # old: it is being replaced
        return max((int(one[1] or one[2]) for one in found if one), default=None)

    def held_out(self, step: int) -> dict[str, dict[str, float]]:
        """Split -> accuracy and mean reward after a step, each with its 95 % interval."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows():
            for key, value in row.items() if row["step"] == step else ():
                kind, _, rest = key.partition("/")
                split, _, name = rest.partition("/")
                if kind == "eval" and name in FIGURES:
                    found.setdefault(split, {})[name] = value
        return found

    def done(self, step: int) -> bool:
        """Whether it is trained for so many steps, evaluated and saved."""
        return (self.saved() or 0) >= step and bool(self.held_out(step))

    def trouble(self) -> str:
        """The last line that its processes said."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LAST))
            lines = file.read().decode(errors="replace").split("\n")
            return next((" ".join(line.split())[:300] for line in reversed(lines) if line.strip()), "")
        return ""

    def command(self, base: Path, step: int, more: Sequence[str]) -> list[str]:
        """What trains it up to a step and evaluates it: anew, or from its last checkpoint. base: the sweep's recipe."""
        keys = [f"train.steps={step}", *more]
        if self.saved() is not None:
            return ["train", "--resume", str(self.folder), *keys]
        if self.folder.exists():  # it ended before its first checkpoint
            shutil.rmtree(self.folder)
        return ["train", str(base), *self.keys, *keys, f"output={self.folder}"]


@dataclass(slots=True)
class Processes:
    """Trains trials, several at once, each in a process of its own."""

    base: Path
    """The recipe that all of them change."""
    parallel: int
    """Runs at once."""
    more: tuple[str, ...]
    """Keys of every run, of the machine rather than of the sweep."""
    say: Callable[[str], None]
    """Told what begins and ends."""
    deadline: float = float("inf")
    """The time, by the monotonic clock, at which runs are interrupted."""
    devices: Sequence[str] = ()
    """The GPUs that runs share, as CUDA_VISIBLE_DEVICES names them; empty: each run sees what this process sees."""

    def train(self, trials: Sequence[Trial], step: int) -> bool:
        """Train trials up to a step; return whether all have been tried. False: time is over.

        Raises KeyboardInterrupt once all runs have saved what they did.
        """
        waiting = [trial for trial in trials if not trial.done(step)]
        running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
        try:
            while waiting or running:
                if time.monotonic() >= self.deadline:
                    return False
                free = [slot for slot in range(self.parallel) if slot not in running]
                for slot in free[: len(waiting)]:
                    running[slot] = (trial := waiting.pop(0)), self._start(trial, step, slot)
                time.sleep(_POLL)
                for slot, (trial, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        self._ended(trial, step, process.returncode)
            return True
        finally:
            _interrupt([process for _, process in running.values()])

    def _start(self, trial: Trial, step: int, slot: int) -> subprocess.Popen[bytes]:
        words = trial.command(self.base, step, self.more)
        self.say(f"{trial.folder.name}: {'goes on' if '--resume' in words else 'begins'}, up to step {step}")
        command = [sys.executable, "-c", _BOOT, str(os.getpid()), "-m", "agentrl.cli.main", *words]
        where = self._environment(slot)
        try:
            trial.folder.parent.mkdir(exist_ok=True)
            with trial.log.open("ab") as log:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=where, start_new_session=True
                )
        except OSError as error:
            raise UserError(f"{trial.folder}: cannot be trained: {error.strerror}") from error

    def _environment(self, slot: int) -> dict[str, str]:
        """The environment of a run: its share of the GPUs; one, where there are fewer than runs."""
        if not self.devices or self.parallel == 1:
            return dict(os.environ)
        return os.environ | {VISIBLE: ",".join(self.devices[slot % len(self.devices) :: self.parallel])}

    def _ended(self, trial: Trial, step: int, code: int) -> None:
        if trial.done(step):
            told = ", ".join(f"{split} {found['accuracy']:.1%}" for split, found in trial.held_out(step).items())
            self.say(f"{trial.folder.name}: {told} after step {step}")
        else:
            self.say(f"{trial.folder.name}: failed (exit code {code}): {trial.trouble()}; {trial.log}")


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (shown := visible()) is not None:
        return shown
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _interrupt(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Have runs save their last whole step, and end those that do not in time."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_json(path: Path) -> Mapping[str, Json]:
    """A file of the sweep. Raises UserError: it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: not what a sweep writes")
    return found
