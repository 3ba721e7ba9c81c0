"""`Scratch`: a temporary folder of this process. A process that is killed cannot remove its own: the next one does.

The invariant: a process holds the lock (flock) of the folder that it uses, until it ends in whatever way; so a folder
that can be locked is no longer in use.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

WEIGHTS, LOGS = "agentrl_weights_", "agentrl_servers_"
SHARED_MEMORY = Path("/dev/shm")
KEPT_SECONDS = {WEIGHTS: 60.0, LOGS: 24 * 3600.0}
"""How long a folder stays after its process: the time between making and locking it; for logs, the time to read
them."""


class Scratch:
    """kind: WEIGHTS or LOGS, the prefix of its name. size: bytes that it is to hold at a time; it lies in shared memory
    where three times as many are free there, unless TMPDIR says where temporary folders lie (0: never). `path` makes
    it, once."""

    def __init__(self, kind: str, size: int = 0) -> None:
        self._kind, self._size = kind, size
        self._path: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """The folder, which is made on the first call."""
        if self._path is None:
            parent = _parent(self._size)
            sweep(self._kind, parent)
            self._path = Path(tempfile.mkdtemp(prefix=self._kind, dir=parent))
            self._lock = os.open(self._path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            atexit.register(self.close)
        return self._path

    def close(self) -> None:
        """Remove the folder; logs stay where there are any. It may be made again."""
        path, self._path = self._path, None
        if path is None:
            return
        atexit.unregister(self.close)
        if self._kind == WEIGHTS:
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # there are logs in it
                path.rmdir()
        os.close(self._lock)


def _parent(size: int) -> Path:
    if size and "TMPDIR" not in os.environ:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(SHARED_MEMORY).free > 3 * size:
                return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def sweep(kind: str, parent: Path | None = None) -> None:
    """Remove this user's folders of this kind, in `parent` or among temporary ones, whose processes are gone."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{kind}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > KEPT_SECONDS[kind]:
                _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
