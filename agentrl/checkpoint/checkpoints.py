"""Checkpoints: `step_N/` is written under another name, flushed, then renamed, so that it is always complete.

It is a Hugging Face model (weights, tokenizer, chat template) with the trainer's state in `trainer/`: the state of each
role (see `roles.py`), `state.json`, and `checksums.json` of all files. It is written while the run goes on, one at a
time.
"""

import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import rename
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from agentrl.checkpoint import disk
from agentrl.checkpoint.huggingface import ADAPTER, save_model
from agentrl.checkpoint.pending import Pending, PendingLike
from agentrl.checkpoint.roles import TRAINER, check_whole
from agentrl.errors import UserError
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ADAPTER", "Checkpoints", "NotSaved", "Saved", "save_model"]

BEST = "best.json"
STATE = "state.json"
CHECKSUMS = "checksums.json"
"""In `trainer/`: the sha256 of every other file of the checkpoint."""
_NAME = re.compile(r"step_(\d+)")


class NotSaved(UserError):  # noqa: N818 - reads better than NotSavedError
    """A checkpoint could not be written; the message names the last one that was."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk; `path` is a folder that `transformers` loads."""

    step: int
    """The step after which it was saved."""
    path: Path
    """Its folder."""

    @property
    def extra(self) -> dict[str, Json]:
        """The `extra` that was given to `begin`. Raises UserError."""
        return dict(self._state()["extra"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy (0..1) on `split`; None: not evaluated at this step."""
        accuracy: float | None = self._rating("accuracy")
        return accuracy

    @property
    def split(self) -> str | None:
        """The split that chose the best checkpoint when this one was saved; None: not evaluated, or not known."""
        split: str | None = self._rating("split")
        return split

    def _rating(self, key: str) -> Json:
        with suppress(UserError):
            return self._state().get(key)
        return None

    def _state(self) -> dict[str, Json]:
        path = self.path / TRAINER / STATE
        state = self._json(path)
        if not isinstance(state, dict) or not isinstance(state.get("extra"), dict):
            raise self.damaged(f"{TRAINER}/{STATE} is not what this version writes")
        accuracy = state.get("accuracy")
        if accuracy is not None and (type(accuracy) not in (int, float) or not 0 <= accuracy <= 1):
            raise self.damaged(
                f"{TRAINER}/{STATE} is not what this version writes: its accuracy is not between 0 and 1"
            )
        return {**state, "accuracy": accuracy}

    def verify(self) -> None:
        """Read every file. Raises UserError: one is missing or its bytes changed. A checkpoint of an older version has
        no checksums, and passes."""
        path = self.path / TRAINER / CHECKSUMS
        if not path.exists():
            return
        sums = self._json(path)
        if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
            raise self.damaged(f"{TRAINER}/{CHECKSUMS} is not what this version writes")
        for name in sums:
            if not disk.lies_in(self.path, name):
                raise self.damaged(f"{TRAINER}/{CHECKSUMS} names {name!r}, which is not a file of it")
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
        """The error, one line, for a checkpoint that cannot be read."""
        return UserError(f"{self.path}: the trainer's state cannot be restored: {what}")

    def _json(self, path: Path) -> Json:
        try:
            return loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.damaged(disk.line(error)) from error


class Checkpoints:
    """The checkpoints of one run, in `folder`: the last `keep`, and the best by accuracy. `tokenizer` is saved with
    each. Only the process of the loop uses this; workers write parts (see `save_roles`). on_saved: called, in a thread,
    once a checkpoint is complete.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.keep, self.tokenizer, self._on_saved = Path(folder), keep, tokenizer, on_saved
        self._open: Pending | None = None
        self._names = threading.Lock()
        self.removed = False
        """Whether somebody removed the folder while a checkpoint was written there."""
        self._newest = max((saved.step for saved in self.all()), default=None)

    def latest(self) -> Saved | None:
        """The checkpoint of the highest step."""
        with self._names:
            self._restore_names()
            return max(self.all(), key=lambda saved: saved.step, default=None)

    def best(self) -> Saved | None:
        """The checkpoint of the highest accuracy (the last of equal ones) among those evaluated on the same
        split as the last evaluated one; None: none was evaluated."""
        rated = [(s.step, s, accuracy) for s in self.all() if (accuracy := s.accuracy) is not None]
        if not rated:
            return None
        split = max(rated)[1].split
        return max((accuracy, step, saved) for step, saved, accuracy in rated if saved.split == split)[2]

    def save(
        self,
        step: int,
        save: Callable[[Path], PendingLike],
        extra: Mapping[str, Json],
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
        extra: Mapping[str, Json],
        rated: tuple[str | None, float] | None = None,
    ) -> None:
        """Begin to write `step_<step>`, once the save before it is finished.

        save: writes the roles into an existing folder, and returns as soon as they may go on learning. extra: JSON.
        rated: the split that chooses the best checkpoint, and the accuracy (0..1) on it at this step.

        Raises NotSaved: the save before, or the start of this one, failed.
        """
        self.finish()
        partial = self.folder / f".step_{step}.part"
        split, accuracy = rated or (None, None)
        state = {"step": step, "extra": dict(extra), "accuracy": accuracy, "split": split}
        made = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            partial.mkdir()
            made = True
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
            pending = save(partial)
        except BaseException as error:
            self._failed(step, partial, error, made)
            raise
        self._open = Pending(lambda: self._complete(step, partial, pending, state))

    def check(self) -> None:
        """Raises NotSaved if the current save has failed already; does not wait."""
        if self._open is not None and self._open.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the current save is complete. Raises NotSaved if it failed; the checkpoint before it is kept."""
        if self._open is not None:
            pending, self._open = self._open, None
            pending.result()

    def _complete(self, step: int, partial: Path, pending: PendingLike, state: Mapping[str, Json]) -> None:
        try:
            pending.result()
            check_whole(partial)
            (partial / TRAINER / STATE).write_text(dumps(state), encoding="utf-8")
            sums = disk.checksums(partial, disk.files(partial))
            (partial / TRAINER / CHECKSUMS).write_text(dumps(sums, indent=1), encoding="utf-8")
            disk.flush(partial)
            with self._names:
                self._name(step, partial)
            self._newest, self.removed = step, False
            self._remove_old()
            self._on_saved()
        except BaseException as error:
            self._failed(step, partial, error)
            raise

    def _name(self, step: int, partial: Path) -> None:
        final = self.folder / f"step_{step}"
        if final.exists():
            rename(final, self.folder / f".step_{step}.old")
        rename(partial, final)
        disk.flush_file(self.folder)

    def _remove_old(self) -> None:
        """Write `best.json`, and remove all checkpoints but the best and the last `keep`."""
        best = self.best()
        if best is not None:
            record = {"step": best.step, "accuracy": best.accuracy, "split": best.split, "path": best.path.name}
            disk.write_whole(self.folder / BEST, dumps(record) + "\n")
        self._sweep()
        for saved in sorted(self.all(), key=lambda s: s.step)[: -self.keep]:
            if best is None or saved.step != best.step:
                disk.remove(saved.path)

    def _failed(self, step: int, partial: Path, error: BaseException, made: bool = True) -> None:
        """Remove what was written. made: whether `partial` was there. Raises NotSaved, one line, if a disk or a worker
        refused, or somebody removed it; other errors, such as a lost worker, are left to the caller."""
        gone = made and not partial.exists() and isinstance(error, OSError | UserError)
        line = str(error) if type(error) is UserError else disk.refused(partial, error)
        rmtree(partial, ignore_errors=True)
        last = self.latest()
        if last is None and gone:
            self.removed, lost = True, "" if self._newest is None else f", and that of step {self._newest} with it"
            what = f"{self.folder} was removed while the checkpoint of step {step} was written"
            raise NotSaved(f"{what}{lost}") from error
        if line is not None:
            none = "there was none before" if self._newest is None else f"that of step {self._newest} was removed"
            kept = f"that of step {last.step} is kept" if last else none
            raise NotSaved(f"{line}; the checkpoint of step {step} is lost, {kept}") from error

    def all(self) -> list[Saved]:
        """Every checkpoint, in any order."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(entry.name), entry) for entry in self.folder.iterdir() if entry.is_dir()]
        return [Saved(int(match[1]), entry) for match, entry in found if match]

    def _restore_names(self) -> None:
        """Restore the name of a checkpoint that was being replaced when the process was killed."""
        for entry in self.folder.glob(".step_*.old"):
            whole = self.folder / entry.name[1:].removesuffix(".old")
            if not whole.exists():
                rename(entry, whole)

    def _sweep(self) -> None:
        """Remove what a killed process left incomplete."""
        with self._names:
            self._restore_names()
            for entry in self.folder.glob(".step_*"):
                rmtree(entry)


def main() -> None:
    """Print which step of the checkpoints in a folder is the last, for a run that could only be killed.

    usage: python -m agentrl.checkpoint.checkpoints FOLDER COMMAND (the one that resumes the run)
    """
    folder, command = sys.argv[1:]
    last = Checkpoints(Path(folder), 1).latest()
    print("nothing was saved yet" if last is None else f"step {last.step} is saved, go on with: {command}")


if __name__ == "__main__":
    main()
