"""The virtual environments of real servers, which `scripts/*_cpu/install` may still be making while tests run."""

import fcntl
from pathlib import Path

from processes import until

INSTALLS_SECONDS = 1200.0
"""Longest wait for an installation: it took 15 minutes where eight other processes computed on two cores."""


def wait_for_install(venv: Path, seconds: float = INSTALLS_SECONDS) -> None:
    """Return once `venv` is complete. Raises RuntimeError if it is missing, if its installation ended before it was
    done, or if that takes longer than `seconds`."""
    lock = Path(f"{venv}.lock")
    if lock.exists():
        try:
            until(lambda: _is_free(lock), seconds)
        except TimeoutError:
            raise RuntimeError(f"{venv} was still being installed after {seconds:.0f} seconds") from None
    if not (venv / "bin/python").exists():
        raise RuntimeError(f"{venv} is no virtual environment")
    for marker in venv.glob(".agentrl-*"):
        if marker.read_text().strip() == "incomplete":
            raise RuntimeError(f"the installation of {venv} failed: see its output, and run it again")


def _is_free(lock: Path) -> bool:
    """Whether no installation holds the lock. It is shared here: tests in other processes ask too."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
