"""`Mirror`: a copy of the run folder at a URL, kept up as checkpoints are saved; and a run folder made from one.

A thread copies, one checkpoint at a time: the run's other files, the checkpoint's, and last `step_N.whole.json`,
without which a checkpoint counts for nothing. So what is killed or refused in between leaves the one before. What the
run removes is removed there too, once a newer one is whole.
"""

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any

from agentrl.checkpoint import disk
from agentrl.checkpoint.checkpoints import CHECKSUMS, Checkpoints, Saved
from agentrl.checkpoint.roles import TRAINER
from agentrl.checkpoint.run_folder import CHECKPOINTS, RECIPE, TRAJECTORIES
from agentrl.errors import UserError, contained, describe
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json
from agentrl.remote import is_remote

KEY = "train.mirror"
WHOLE = re.compile(rf"{CHECKPOINTS}/step_(\d+)\.whole\.json")
_OF_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d+)/.+", re.DOTALL)
_OWN = re.compile(rf"{TRAJECTORIES}/.+", re.DOTALL)
"""Files that go there when they go here, besides those of checkpoints."""
HELD = ".mirror"
"""In the run folder: hard links to the checkpoint that is being copied, which the run may remove meanwhile."""
RETRY_SECONDS = 60.0
"""After a failure, without a new checkpoint."""
LAST_TRIES = 3
LAST_RETRY_SECONDS = 2.0
PATIENCE_SECONDS = 600.0
"""How long the end of a run waits for a copy that does not go on."""


class Store:
    """A folder at a URL that `fsspec` opens. key: of the recipe, for errors. Raises UserError: it is no URL, the
    package of its protocol is missing, or it cannot be read."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url.rstrip("/"), key
        if not is_remote(url):
            raise UserError(f"{key}: {url!r} is not a URL; write one as s3://BUCKET/FOLDER or file:///FOLDER")
        try:
            import fsspec

            self._system, root = fsspec.core.url_to_fs(self.url)
            self._root = root.rstrip("/")
            self._made: set[str] = set()
            self.first = self.sizes()
        except BaseException as error:  # the boundary to stores of all kinds
            raise UserError(f"{key}: {url} cannot be opened: {describe(contained(error), place=False)}") from error

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file, by its path relative to the folder."""
        self._system.invalidate_cache()
        try:
            found: Mapping[str, Any] = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {name[len(self._root) + 1 :]: int(info["size"] or 0) for name, info in found.items()}

    def put(self, local: Path, name: str, moved: Callable[[], None] = lambda: None) -> None:
        """Copy a file there. moved: called as bytes go."""
        from fsspec.callbacks import Callback

        class Moved(Callback):  # type: ignore[misc]
            def call(self, hook_name: str | None = None, **more: object) -> None:
                moved()

        path = f"{self._root}/{name}"
        self._make_parent(path)
        self._system.put_file(str(local), path, callback=Moved())
        moved()

    def write(self, name: str, text: str) -> None:
        """Write a small file, at once."""
        path = f"{self._root}/{name}"
        self._make_parent(path)
        self._system.pipe_file(path, text.encode())

    def read(self, name: str) -> str:
        """A small file's text."""
        return bytes(self._system.cat_file(f"{self._root}/{name}")).decode()

    def get(self, name: str, local: Path) -> None:
        """Copy a file from there, into folders that are made."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._system.get_file(f"{self._root}/{name}", str(local))

    def remove(self, names: list[str]) -> None:
        """Remove files."""
        for name in names:
            self._system.rm_file(f"{self._root}/{name}")

    def whole(self, names: Mapping[str, int]) -> dict[int, dict[str, Json]]:
        """What stands in the marks of whole checkpoints, by step: `sums`, and `files`, their paths below the
        checkpoint's folder. A mark that is not whole itself is none."""
        found = {}
        for name in names:
            if match := WHOLE.fullmatch(name):
                with suppress(ValueError):
                    mark = loads(self.read(name))
                    if isinstance(mark, dict) and isinstance(mark.get("files"), list):
                        found[int(match[1])] = mark
        return found

    def _make_parent(self, path: str) -> None:
        """Make the folder of a file, where the store has folders."""
        parent = str(PurePosixPath(path).parent)
        if parent not in self._made:
            self._system.makedirs(parent, exist_ok=True)
            self._made.add(parent)


class Mirror:
    """Keeps a run folder's copy in `store`. It starts with `follow`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folder = Path()
        self._note: Callable[[str], None] = lambda line: None
        self._thread: threading.Thread | None = None
        self._change = threading.Condition()
        self._asked = self._closing = False
        self._known: dict[str, tuple[int, int]] = {}  # of files that were copied: size and time
        self._told: str | None = None  # what went wrong last, as it was told
        self._moved = monotonic()

    def follow(self, folder: Path, note: Callable[[str], None]) -> None:
        """Copy `folder` from now on, after each `saved`. note: called, in a thread, with a line for people."""
        self._folder, self._note = folder, note
        self._thread = threading.Thread(target=self._work, name="agentrl-mirror", daemon=True)
        self._thread.start()

    def saved(self) -> None:
        """Have what is new copied; returns at once."""
        with self._change:
            self._asked = True
            self._change.notify_all()

    def close(self) -> list[str]:
        """Copy what is new, and wait for it; returns a line where it could not be copied. A second Ctrl-C ends the
        waiting."""
        if self._thread is None:
            return []
        with self._change:
            self._asked = self._closing = True
            self._change.notify_all()
        self._moved = began = monotonic()
        waiting = False
        while self._thread.is_alive():
            self._thread.join(0.2)
            if not waiting and monotonic() - began > 5:
                waiting = True
                self._note(f"{KEY}: the last checkpoint is being copied to {self.store.url}")
            if monotonic() - self._moved > PATIENCE_SECONDS:
                self._told = f"nothing was copied for {PATIENCE_SECONDS:.0f} seconds"
                break
        self._thread = None
        lacking = f"{KEY}: {self.store.url} lacks the last checkpoint: {self._told}; it is in {self._folder}"
        return [lacking] if self._told is not None else []

    def results(self) -> None:
        """Copy what is new besides checkpoints, now. What goes wrong is told."""
        try:
            self._copy_results(self.store.sizes())
        except BaseException as error:  # noqa: BLE001 - the boundary to stores of all kinds
            self._failed(contained(error))

    def _work(self) -> None:
        tries = LAST_TRIES
        while True:
            with self._change:
                wait = None if self._told is None else LAST_RETRY_SECONDS if self._closing else RETRY_SECONDS
                self._change.wait_for(lambda: self._asked, wait)
                self._asked, closing = False, self._closing
            done = self._tried()
            tries -= closing
            if closing and (done or not tries):
                return

    def _tried(self) -> bool:
        """Copy what is new. Returns whether all of it is there; tells an error once."""
        try:
            while (saved := self._due()) is not None:
                try:
                    with _held(saved, self._folder / HELD) as folder:
                        self._copy(saved, folder)
                except FileNotFoundError:
                    if saved.path.exists():
                        raise  # it is the store that lacks something, or somebody else removed a file
            there = self.store.sizes()
            self._copy_results(there)
            self._prune(there)
        except BaseException as error:  # noqa: BLE001 - the boundary to stores of all kinds
            self._failed(contained(error))
            return False
        if self._told is not None:
            self._told = None
            self._note(f"{KEY}: {self.store.url} is up to date again")
        return True

    def _failed(self, error: Exception) -> None:
        line = describe(error, place=False)
        if line != self._told:
            self._told = line
            self._note(f"{KEY}: {self.store.url} is not up to date: {line}; the run goes on, and tries again")

    def _due(self) -> Saved | None:
        """The newest checkpoint that is not there whole."""
        there = self.store.whole(self.store.sizes())
        due = [s for s in self._here().values() if there.get(s.step, {}).get("sums") != _sums(s.path)]
        return max(due, key=lambda saved: saved.step, default=None)

    def _here(self) -> dict[int, Saved]:
        return {saved.step: saved for saved in Checkpoints(self._folder / CHECKPOINTS, 1).all()}

    def _copy(self, saved: Saved, folder: Path) -> None:
        """folder: with the checkpoint's files."""
        there, base = self.store.sizes(), f"{CHECKPOINTS}/{saved.path.name}"
        mark, files = f"{base}.whole.json", disk.files(folder)
        if mark in there:
            self.store.remove([mark])  # of another checkpoint of this step
        self._copy_results(there)
        for name in files:
            self.store.put(folder / name, f"{base}/{name}", self._touch)
        self.store.write(mark, dumps({"step": saved.step, "sums": _sums(folder), "files": files}))
        wrong = {f"{base}/{name}" for name in files}
        self.store.remove([name for name in there if name.startswith(f"{base}/") and name not in wrong])

    def _copy_results(self, there: Mapping[str, int]) -> None:
        """Copy the files of the run besides its checkpoints that have changed."""
        for name in _results(self._folder):
            try:
                found = (self._folder / name).stat()
                state = found.st_size, found.st_mtime_ns
                if self._known.get(name) != state or name not in there:
                    self.store.put(self._folder / name, name, self._touch)
                    self._known[name] = state
            except FileNotFoundError:
                if (self._folder / name).exists():
                    raise  # it is the store that lacks something

    def _prune(self, there: Mapping[str, int]) -> None:
        """Remove what the run has removed: of a checkpoint, its mark first."""
        steps = {step for step, saved in self._here().items() if f"{CHECKPOINTS}/{saved.path.name}.whole.json" in there}
        if not steps:
            return
        marks = [name for name in there if (m := WHOLE.fullmatch(name)) and int(m[1]) not in steps]
        old = [name for name in there if (m := _OF_STEP.fullmatch(name)) and int(m[1]) not in steps]
        gone = [name for name in there if _OWN.fullmatch(name) and not (self._folder / name).exists()]
        self.store.remove([*marks, *old, *gone])

    def _touch(self) -> None:
        self._moved = monotonic()


def open_mirror(url: str | None, resumed: bool) -> Mirror | None:
    """The mirror at `url`, None: there is to be none. resumed: whether the run is resumed. Raises UserError: it
    cannot be opened, or holds another run."""
    if url is None:
        return None
    store = Store(url, KEY)
    if RECIPE in store.first and not resumed:
        raise UserError(f"{KEY}: {url} already holds a run; name another folder, or go on with --resume {url}")
    return Mirror(store)


def fetched_run(url: str, output: str | None) -> Path:
    """A folder with the run whose mirror is at `url`: `output`, or runs/<name as at the URL>.

    It is copied whole or not at all; a folder that holds the same run, and has come as far, is taken as it is. Raises
    UserError: there is no run, no whole checkpoint, or the folder is taken.
    """
    key = "--resume"
    store = Store(url, key)
    if RECIPE not in store.first:
        raise UserError(f"{key} {url}: no run there ({RECIPE} is missing)")
    folder = Path(output or Path("runs") / PurePosixPath(store.url).name)
    try:
        marks = store.whole(store.first)
        if not marks:
            raise UserError(f"{key} {url}: no whole checkpoint is there")
        if (folder / RECIPE).exists():
            last = Checkpoints(folder / CHECKPOINTS, 1).latest()
            known = (folder / RECIPE).read_text(encoding="utf-8") == store.read(RECIPE)
            if known and last is not None and last.step >= max(marks):
                return folder
            raise UserError(f"{key} {url}: {folder} holds a run already; move it away, or name another by output=...")
        names = [name for name in store.first if not _OF_STEP.fullmatch(name) and not WHOLE.fullmatch(name)]
        names += [f"{CHECKPOINTS}/step_{step}/{name}" for step, mark in marks.items() for name in mark["files"]]
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for name in names:
                if name.startswith("/") or ".." in PurePosixPath(name).parts:
                    raise UserError(f"{key} {url}: {name!r} is not a file of a run")
                store.get(name, aside / name)
            aside.chmod(0o755)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except UserError:
        raise
    except BaseException as error:  # the boundary to stores of all kinds
        why = describe(contained(error), place=False)
        raise UserError(f"{key} {url}: it cannot be copied to {folder}: {why}") from error
    return folder


def _sums(checkpoint: Path) -> str:
    """What tells a checkpoint from another of the same step."""
    path = checkpoint / TRAINER / CHECKSUMS
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def _results(folder: Path) -> list[str]:
    """The paths of a run's files besides those of checkpoints, which the run may remove meanwhile."""
    found = []
    for where, folders, files in os.walk(folder):
        inner = Path(where).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and inner != Path(CHECKPOINTS)]
        found += [str(inner / name) for name in files if not name.startswith(".") and Path(where, name).is_file()]
    return sorted(found)


@contextmanager
def _held(saved: Saved, aside: Path) -> Iterator[Path]:
    """Give a folder with the checkpoint's files, which stay there although the run may remove the checkpoint: by hard
    links, where the file system has them."""
    shutil.rmtree(aside, ignore_errors=True)
    try:
        try:
            shutil.copytree(saved.path, aside, copy_function=os.link)
        except OSError:
            yield saved.path
        else:
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
