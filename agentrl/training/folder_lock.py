"""`FolderLock`: one process at a time trains in a run folder. The kernel holds the lock, so it ends with the process
that took it, however that ends: a kill leaves at most the file, which locks nothing."""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from agentrl.errors import UserError

LOCK = ".lock"


class FolderLock:
    """Taken when it is made, held until `release`. Raises UserError: another process holds it, or the folder takes no
    file. Where the file system knows no locks there is none."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._handle = self._open()
        while not self._named():  # its holder took the file away between our opening and our locking
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
        except OSError:  # such as some network file systems: what they cannot tell is not known
            return handle
        with suppress(OSError):  # a full disk, which is said where something is lost by it
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return handle

    def _named(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._handle), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """And take the file away, while nobody else can have the lock."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._handle)
