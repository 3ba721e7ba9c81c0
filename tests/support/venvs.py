"""The virtual environments of real servers, which `scripts/*_cpu/install` may still be making while tests run."""

import fcntl
import os
from pathlib import Path

import pytest
from processes import until

INSTALLS_SECONDS = 1200.0
"""Longest wait for an installation: it took 15 minutes where eight other processes computed on two cores."""


INSTALLING = "AGENTRL_INSTALLING"
"""Variable that names a file which is there as long as installations go on, one after the other."""


def wait_for_install(venv: Path, seconds: float = INSTALLS_SECONDS) -> None:
    """Once `venv` is complete. Raises RuntimeError if it is missing, if its installation ended before it was
    done, or if that takes longer than `seconds`."""
    try:
        until(lambda: not _pending(venv), seconds)
    except TimeoutError:
        raise RuntimeError(f"{venv} was still being installed after {seconds:.0f} seconds") from None
    if not (venv / "bin/python").exists():
        raise RuntimeError(f"{venv} is no virtual environment")
    if "incomplete" in _marks(venv):
        raise RuntimeError(f"the installation of {venv} failed: see its output, and run it again")


def _pending(venv: Path) -> bool:
    """Whether it is being installed, or still to be."""
    lock, others = Path(f"{venv}.lock"), os.environ.get(INSTALLING)
    if lock.exists() and not _is_free(lock):
        return True
    done = any(mark != "incomplete" for mark in _marks(venv))
    return others is not None and Path(others).exists() and not done


def _marks(venv: Path) -> list[str]:
    """What the installation wrote of itself: `incomplete`, or what was installed."""
    return [marker.read_text().strip() for marker in venv.glob(".agentrl-*")]


def _is_free(lock: Path) -> bool:
    """Whether no installation holds the lock. It is shared here: tests in other processes ask too."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def harbor_venv() -> Path:
    """The virtual environment of Harbor. Skips where it is not installed."""
    venv = Path(os.environ.get("AGENTRL_HARBOR_VENV") or Path.home() / ".cache/agentrl/harbor")
    if not (venv / "bin/harbor").exists():
        pytest.skip(f"needs Harbor: scripts/harbor/install {venv}")
    return venv
