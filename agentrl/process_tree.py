"""`ProcessTree`: a command outside the sandbox with all its descendants, none of which outlives this process.

This file is also the program that supervises the command, in a session of its own, away from the terminal's Ctrl-C. It
ends the whole tree once the command ends, its standard input closes, or its parent is gone, however that came about. It
imports nothing but the standard library.

usage: python process_tree.py GRACE_SECONDS REMOVAL FOLDER COMMAND [ARGUMENT ...]

REMOVAL is a command that ends what is not a descendant, such as a container; FOLDER goes with the parent; both may be
empty. A byte on standard input before it closes means: without the grace.
"""

import contextlib
import ctypes
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

END_SECONDS = 60.0
"""Time for the supervisor to end its tree; more than all of its own limits together."""
POLL_SECONDS = 0.2
MEMORY_POLLS = 50
"""Polls between two listings of shared memory: a process that crashes cannot be asked."""
TIDY_SECONDS = 5.0
REMOVAL_SECONDS = 30.0
ENDED = "ended"
"""File in FOLDER with the exit code of a command that ended by itself. The folder stays until the parent has read why;
without a folder the exit code is the last line of the output."""
_SHARED_MEMORY = re.compile(rb" (/dev/shm/sgl(?:ang_loads|_shm)_\S+)$", re.M)
"""What SGLang's processes share and leave behind when they are killed."""
_TRACKER = b"multiprocessing.resource_tracker"
"""Removes semaphores and shared memory of the others once they are gone, and ends."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ProcessTree:
    """Start `command` under a supervisor.

    output: file for standard output and error of all of them. env: environment. grace: seconds between SIGTERM and
    SIGKILL; 0: SIGKILL at once. removal: command that ends what is not a descendant. folder: removed by the supervisor
    when this process ends. Raises OSError when the supervisor cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        output: IO[bytes],
        env: Mapping[str, str],
        *,
        grace: float = 0.0,
        removal: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self._folder = folder
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", __file__, f"{grace:g}", shlex.join(removal), str(folder or ""), *command],
            stdin=subprocess.PIPE, stdout=output, stderr=output, env=env, start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The supervisor's process ID, and that of its process group."""
        return self._supervisor.pid

    @property
    def running(self) -> bool:
        ended = self._folder is not None and (self._folder / ENDED).exists()
        return not ended and self._supervisor.poll() is None

    @property
    def gone(self) -> bool:
        """Whether the supervisor has ended, which is the last to do so."""
        return self._supervisor.poll() is not None

    def ask_to_end(self, at_once: bool = False) -> None:
        """Tell the supervisor to end the tree, and return. at_once: without the grace."""
        stdin = self._supervisor.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended by itself
                stdin.write(b"now" if at_once else b"")
                stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def end(self, at_once: bool = False) -> None:
        """End the tree and wait until it is gone."""
        self.ask_to_end(at_once)
        try:
            self._supervisor.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._supervisor.wait()


def main() -> None:
    grace, removal, folder, command = float(sys.argv[1]), shlex.split(sys.argv[2]), sys.argv[3], sys.argv[4:]
    parent = os.getppid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # they are for the command; the supervisor ends after it
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the tree become children of this process
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_child)
    word, polls, memory = None, 0, set[bytes]()
    while child.poll() is None and os.getppid() == parent and word is None:
        word = _read_word(POLL_SECONDS)
        polls += 1
        if polls % MEMORY_POLLS == 0:
            memory |= _shared_memory()
    memory |= _shared_memory()
    ended = child.poll() is not None
    if removal:
        _remove(removal)
    if child.poll() is None and grace and not word:
        os.killpg(0, signal.SIGTERM)
        until = time.monotonic() + grace
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    result = f"the command ended with exit code {child.poll()}"
    if not folder:
        print(result, file=sys.stderr, flush=True)
    _kill_tree()
    for path in memory:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if folder:
        aside = Path(folder, f".{ENDED}")
        aside.write_text(result)
        aside.rename(Path(folder, ENDED))  # whole as soon as it is there
        while ended and word is None and os.getppid() == parent:  # until the parent has read why
            word = _read_word(POLL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # itself, and whatever was forked meanwhile


def _read_word(seconds: float) -> bytes | None:
    """Return what comes on standard input within `seconds`; b"" at its end, None for nothing."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1) if ready else None


def _remove(command: list[str]) -> None:
    try:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVAL_SECONDS, preexec_fn=_as_child
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{shlex.join(command)}: {error}", file=sys.stderr, flush=True)


def _kill_tree() -> None:
    """Kill every process of the tree; resource trackers get a moment to tidy up first."""
    until = time.monotonic() + TIDY_SECONDS
    while (pids := _tree()) and time.monotonic() < until:
        for pid in pids:
            if _TRACKER not in _read(pid, "cmdline"):
                _kill(pid)
        time.sleep(0.02)
    for pid in pids:
        _kill(pid)


def _tree() -> list[int]:
    """List the running processes that descend from this one or are of its group, itself excluded."""
    parents: dict[int, int] = {}
    group, running, members = os.getpgrp(), set[int](), {os.getpid()}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _read(pid, "stat").rpartition(b")")[2].split()[:3]:
            parents[pid] = int(fields[1])
            if fields[0] != b"Z":
                running.add(pid)
            if int(fields[2]) == group:
                members.add(pid)
    while found := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= found
    return sorted(running & members - {os.getpid()})


def _shared_memory() -> set[bytes]:
    """Find SGLang's files of shared memory that processes of the tree have open."""
    return {path for pid in _tree() for path in _SHARED_MEMORY.findall(_read(pid, "maps"))}


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc; empty when the process has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _as_child() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the process group must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
