"""Checkpoints: `step_N/` is written aside, flushed, then renamed, so what bears its name is whole.

A folder is a Hugging Face model (weights, tokenizer, chat template) with the trainer's state in `trainer/`: that of
each role (see `saving/roles.py`), `state.json`, and `checksums.json` of all of it. It is written while the run goes on;
one at a time.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.checkpoint import disk, sharded
from agentrl.checkpoint.huggingface import ADAPTER, save_model
from agentrl.checkpoint.pending import Pending, PendingLike
from agentrl.checkpoint.roles import TRAINER, check_whole
from agentrl.errors import UserError

__all__ = ["ADAPTER", "Checkpoints", "NotSaved", "Saved", "save_model"]

BEST = "best.json"
STATE = "state.json"
CHECKSUMS = "checksums.json"
"""Below `trainer/`: the sha256 of every other file of the checkpoint."""
_NAME = re.compile(r"step_(\d+)")


class NotSaved(UserError):  # noqa: N818 - what happened reads better than NotSavedError
    """A checkpoint was lost, in one line that says which one stands."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk; `path` is a folder that `transformers` loads."""

    step: int
    path: Path

    @property
    def extra(self) -> dict[str, Any]:
        """What was given to `begin`. Raises UserError."""
        return dict(self._state()["extra"])

    @property
    def accuracy(self) -> float | None:
        """On `split`, where it was evaluated at this step."""
        return self._rating("accuracy")

    @property
    def split(self) -> str | None:
        """The split that checkpoints were chosen on when this one was saved; None: of no accuracy, or not known."""
        return self._rating("split")

    def _rating(self, key: str) -> Any:
        with suppress(UserError):
            return self._state().get(key)
        return None

    def _state(self) -> dict[str, Any]:
        path = self.path / TRAINER / STATE
        state = self._json(path)
        if not isinstance(state, dict) or not isinstance(state.get("extra"), dict):
            raise self.damaged(f"{TRAINER}/{STATE} is not what this version writes")
        accuracy = state.get("accuracy")
        if accuracy is not None and (type(accuracy) not in (int, float) or not 0 <= accuracy <= 1):
            raise self.damaged(f"{TRAINER}/{STATE} is not what this version writes: its accuracy is no share")
        return {**state, "accuracy": accuracy}

    def verify(self) -> None:
        """Raises UserError: a file is missing, or has other bytes than were written. Where older versions wrote it
        nothing is known of its bytes. Reads all of it."""
        path = self.path / TRAINER / CHECKSUMS
        if not path.exists():
            return
        sums = self._json(path)
        if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
            raise self.damaged(f"{TRAINER}/{CHECKSUMS} is not what this version writes")
        for name in sums:
            if not disk.lies_in(self.path, name):
                raise self.damaged(f"{TRAINER}/{CHECKSUMS} names {name!r}, which is no file of it")
        try:
            found = disk.checksums(self.path, list(sums))
        except OSError as error:
            raise self.damaged(f"{error.filename}: {error.strerror}") from error
        if changed := [name for name in sums if found[name] != sums[name]]:
            raise self.damaged(
                f"{changed[0]} is not what was written (its checksum differs"
                + (f", and those of {len(changed) - 1} more files)" if len(changed) > 1 else ")")
            )

    def damaged(self, what: str) -> UserError:
        """The error that says so, in one line."""
        return UserError(f"{self.path}: the trainer's state cannot be restored: {what}")

    def _json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.damaged(sharded.line(error)) from error


class Checkpoints:
    """Those of one run, in `folder`. The last `keep` are kept, and the best by its accuracy. `tokenizer` is saved with
    each. The process of the loop alone uses this; workers write parts (see `save_roles`).
    """

    def __init__(self, folder: str | Path, keep: int, tokenizer: Any = None) -> None:
        self.folder, self.keep, self.tokenizer = Path(folder), keep, tokenizer
        self._open: Pending | None = None
        self._names = threading.Lock()

    def latest(self) -> Saved | None:
        with self._names:
            self._put_back()
            return max(self._all(), key=lambda saved: saved.step, default=None)

    def best(self) -> Saved | None:
        """That of the highest accuracy, the last of equal ones, of those that were chosen by the same split as the last
        that was; None: none was evaluated."""
        rated = [(s.step, s, accuracy) for s in self._all() if (accuracy := s.accuracy) is not None]
        if not rated:
            return None
        split = max(rated)[1].split
        return max((accuracy, step, saved) for step, saved, accuracy in rated if saved.split == split)[2]

    def save(
        self,
        step: int,
        save: Callable[[Path], PendingLike],
        extra: Mapping[str, Any],
        rated: tuple[str | None, float] | None = None,
    ) -> Saved:
        """`begin`, then `finish`."""
        self.begin(step, save, extra, rated)
        self.finish()
        return Saved(step, self.folder / f"step_{step}")

    def begin(
        self,
        step: int,
        save: Callable[[Path], PendingLike],
        extra: Mapping[str, Any],
        rated: tuple[str | None, float] | None = None,
    ) -> None:
        """Begin `step_<step>`, once the one before is finished. `save` writes the roles into a folder that is there: it
        returns as soon as they may go on learning. extra: JSON. rated: the split to choose by, and the accuracy on it
        at this step.

        Raises NotSaved: the save before, or the beginning of this one, failed.
        """
        self.finish()
        aside = self.folder / f".step_{step}.part"
        split, accuracy = rated or (None, None)
        state = {"step": step, "extra": dict(extra), "accuracy": accuracy, "split": split}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            aside.mkdir()
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(aside)
            pending = save(aside)
        except BaseException as error:
            self._failed(step, aside, error)
            raise
        self._open = Pending(lambda: self._complete(step, aside, pending, state))

    def check(self) -> None:
        """Raises NotSaved if the save that was begun last has failed. Waits for nothing."""
        if self._open is not None and self._open.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the save that was begun is whole under its name. Raises NotSaved when it failed; the checkpoint
        before it stands."""
        if self._open is not None:
            pending, self._open = self._open, None
            pending.result()

    def _complete(self, step: int, aside: Path, pending: PendingLike, state: Mapping[str, Any]) -> None:
        try:
            pending.result()
            check_whole(aside)
            (aside / TRAINER / STATE).write_text(json.dumps(state), encoding="utf-8")
            sums = disk.checksums(aside, disk.files(aside))
            (aside / TRAINER / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
            disk.flush(aside)
            with self._names:
                self._name(step, aside)
            self._thin_out()
        except BaseException as error:
            self._failed(step, aside, error)
            raise

    def _name(self, step: int, aside: Path) -> None:
        final = self.folder / f"step_{step}"
        if final.exists():
            final.rename(self.folder / f".step_{step}.old")
        aside.rename(final)
        disk.flush_folder(self.folder)

    def _thin_out(self) -> None:
        """Say which is the best, and remove all but that one and the last."""
        best = self.best()
        if best is not None:
            record = {"step": best.step, "accuracy": best.accuracy, "split": best.split, "path": best.path.name}
            disk.write_whole(self.folder / BEST, json.dumps(record) + "\n")
        self._sweep()
        for saved in sorted(self._all(), key=lambda s: s.step)[: -self.keep]:
            if best is None or saved.step != best.step:
                disk.remove(saved.path)

    def _failed(self, step: int, aside: Path, error: BaseException) -> None:
        """Nothing of it stays. Raises NotSaved, one line, for what a disk or a worker said of itself; a worker that
        is lost is left to who can start another."""
        line = str(error) if type(error) is UserError else disk.refused(aside, error)
        shutil.rmtree(aside, ignore_errors=True)
        if line is not None:
            last = self.latest()
            stands = f"that of step {last.step} stands" if last else "there was none before"
            raise NotSaved(f"{line}; the checkpoint of step {step} is lost, {stands}") from error

    def _all(self) -> list[Saved]:
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(entry.name), entry) for entry in self.folder.iterdir() if entry.is_dir()]
        return [Saved(int(match[1]), entry) for match, entry in found if match]

    def _put_back(self) -> None:
        """A folder that was set aside, and whose successor never came, gets its name back."""
        for entry in self.folder.glob(".step_*.old"):
            whole = self.folder / entry.name[1:].removesuffix(".old")
            if not whole.exists():
                entry.rename(whole)

    def _sweep(self) -> None:
        """Remove what a killed run left half done."""
        with self._names:
            self._put_back()
            for entry in self.folder.glob(".step_*"):
                shutil.rmtree(entry)
