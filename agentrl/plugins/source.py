"""A source of environments that others wrote: what `agentrl env add` installs, into an interpreter of its own.

Nothing is installed but what a reviewed table pins, and a folder that the user names.
"""

import hashlib
import os
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl.errors import UserError
from agentrl.jsonable import Json

MARKER = ".agentrl-source"
"""A file in a virtual environment that `install` made: a digest of what is installed; `incomplete` meanwhile."""
INSTALL_SECONDS = 1800.0
"""What an installation may take."""
SAY_SECONDS = 5.0
"""Between two lines about a step that goes on."""
_KEPT = 40  # lines of a program that failed
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")


class Source(ABC):
    """Found by the entry-point group `agentrl.sources`."""

    about: str
    """What it gives, in a line."""
    what: str = "NAME"
    """What the command's second argument is called."""
    pins: Path
    """All packages that are installed, each with its exact version, in the form of a requirements file."""
    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 13))
    """The first and the last version of Python that the pins are for."""

    @abstractmethod
    def sections(self, what: str, python: str) -> Mapping[str, Json]:
        """The sections of a recipe that plays `what` in the interpreter `python`. Raises UserError: there is no
        `what`."""

    def folder(self, what: str) -> Path | None:
        """The folder of a package to be installed besides, where `what` names one. By default none."""
        return None


def interpreter_for(source: Source, given: str | None) -> str:
    """The interpreter that a source's virtual environment is made with: the one that was given, or the newest on the
    PATH that its pins are for. Raises UserError."""
    low, high = source.python
    wanted = f"Python {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    if given is not None:
        found = shutil.which(given)
        version = (0, 0) if found is None else _version(found)
        if found is None or not low <= version <= high:
            raise UserError(f"--python: {given} is {_named(version)}: give {wanted}")
        return found
    for minor in range(high[1], low[1] - 1, -1):
        found = shutil.which(f"python{low[0]}.{minor}")
        if found is not None and _version(found) == (low[0], minor):
            return found
    raise UserError(f"no {wanted} is on the PATH: install one, or name it by --python")


def _version(python: str) -> tuple[int, int]:
    """The version of an interpreter; (0, 0) where it is none."""
    try:
        asked = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.split()
        return int(said[0]), int(said[1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0, 0


def _named(version: tuple[int, int]) -> str:
    return f"Python {version[0]}.{version[1]}" if version != (0, 0) else "no interpreter"


def install(source: Source, what: str, venv: Path, python: str, say: Callable[[str], None]) -> str:
    """Make the virtual environment `venv`, unless it holds just that, and return its interpreter. Raises UserError."""
    own, marker, folder = venv / "bin" / "python", venv / MARKER, source.folder(what)
    digest = hashlib.sha256(source.pins.read_bytes()).hexdigest()
    there = marker.read_text("utf-8").strip() if marker.is_file() else ""
    if venv.exists() and not there:
        raise UserError(f"{venv} exists, and this command did not make it: name another folder by --into")
    pip = [str(own), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off"]
    if there != digest or not own.exists():
        shutil.rmtree(venv, ignore_errors=True)
        _run([python, "-m", "venv", str(venv)], "the virtual environment", say)
        marker.write_text("incomplete\n", "utf-8")
        _run([*pip, "--no-deps", "-r", str(source.pins)], "the installation", say)
        marker.write_text(f"{digest}\n", "utf-8")
    if folder is not None:
        _run([*pip, "-c", str(source.pins), str(folder)], f"the installation of {folder}", say)
    return str(own.absolute())


def _at(lines: Sequence[str]) -> str:
    """The package that pip is at, by what it printed last."""
    for line in reversed(lines):
        action, _, rest = line.partition(" ")
        if action in ("Collecting", "Downloading", "Building") and rest:
            return f": {rest.split()[0]}"
    return ""


def _run(command: Sequence[str], what: str, say: Callable[[str], None]) -> None:
    """Run a program, and say now and then what it does. Raises UserError with the end of what it printed."""
    variables = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
    started = said = time.monotonic()
    lines: list[str] = []
    try:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"{what} cannot be started: {command[0]}: {error.strerror}") from None
    late = threading.Timer(INSTALL_SECONDS, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines[-_KEPT:], line.strip()[:300]]
            if time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                say(f"  {said - started:.0f} s{_at(lines)}")
        code = process.wait()
    finally:
        late.cancel()
        process.kill()
    if code != 0:
        wrong = [line for line in lines if line.lower().startswith("error")] or lines[-1:] or [f"exit code {code}"]
        raise UserError(f"{what} failed: {wrong[-1]}")
