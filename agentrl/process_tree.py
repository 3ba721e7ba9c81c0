"""`ProcessTree`: a command outside the sandbox with all its descendants, none of which outlives this process.

This file is also the program that supervises the command, in a session of its own, which the terminal's Ctrl-C does not
reach. It ends the whole tree when the command ends, its standard input closes, or its parent is gone, for whatever
reason. It imports only the standard library.

usage: python process_tree.py GRACE_SECONDS REMOVAL FOLDER COMMAND [ARGUMENT ...]

REMOVAL is a command that ends what is not a descendant, such as a container; FOLDER is deleted when the parent ends;
both may be empty. A byte on standard input before it closes means: end without the grace period; the byte `k`: end the
command now, and keep FOLDER until standard input closes.
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
"""Time for the supervisor to end its tree; more than the sum of its own limits."""
POLL_SECONDS = 0.2
"""Time between two checks of the command, the parent and standard input."""
MEMORY_POLLS = 50
"""Polls between two listings of shared memory: that of a process that has crashed can no longer be listed."""
TIDY_SECONDS = 5.0
"""Time for resource trackers to clean up before they are killed."""
REMOVAL_SECONDS = 30.0
"""Time limit of REMOVAL."""
ENDED = "ended"
"""File in FOLDER with the exit code of a command that ended by itself. The folder is kept until the parent has read it;
without a folder, the exit code is the last line of the output."""
_SHARED_MEMORY = re.compile(rb" (/dev/shm/sgl(?:ang_loads|_shm)_\S+)$", re.M)
"""Files of shared memory that SGLang's processes leave behind when they are killed."""
_TRACKER = b"multiprocessing.resource_tracker"
"""A process that removes semaphores and shared memory of the other processes when they are gone, and then ends."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KEEP = b"k"
"""A byte on standard input: the command is killed, and FOLDER kept."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ProcessTree:
    """A running command under a supervisor, started by the constructor.

    output: file for standard output and error of all processes. env: environment variables. grace: seconds between
    SIGTERM and SIGKILL; 0: SIGKILL immediately. removal: command that ends what is not a descendant. folder: deleted by
    the supervisor when this process ends. Raises OSError if the supervisor cannot be started.
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
        """The process ID of the supervisor and of its process group."""
        return self._supervisor.pid

    @property
    def running(self) -> bool:
        """Whether the command is running."""
        ended = self._folder is not None and (self._folder / ENDED).exists()
        return not ended and self._supervisor.poll() is None

    @property
    def gone(self) -> bool:
        """Whether the supervisor has ended, which is the last process of the tree."""
        return self._supervisor.poll() is not None

    def stop_command(self) -> None:
        """Kill the command and its descendants, and keep `folder`, where there is one, until `end`."""
        stdin = self._supervisor.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has already ended
                stdin.write(_KEEP)
                stdin.flush()

    def ask_to_end(self, at_once: bool = False) -> None:
        """Tell the supervisor to end the tree, without waiting for it. at_once: without the grace period."""
        stdin = self._supervisor.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # the supervisor has already ended
                stdin.write(b"now" if at_once else b"")
                stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def end(self, at_once: bool = False) -> None:
        """End the tree and wait until all of it is gone. at_once: without the grace period."""
        self.ask_to_end(at_once)
        try:
            self._supervisor.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._supervisor.wait()


def main() -> None:
    """Run the supervisor: see the module's docstring."""
    grace, removal, folder, command = float(sys.argv[1]), shlex.split(sys.argv[2]), sys.argv[3], sys.argv[4:]
    parent = os.getppid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # these signals are for the command; the supervisor ends after it
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the tree become children of this process
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_child)
    byte, polls, memory = None, 0, set[bytes]()
    while child.poll() is None and os.getppid() == parent and byte is None:
        byte = _read_byte(POLL_SECONDS)
        polls += 1
        if polls % MEMORY_POLLS == 0:
            memory |= _shared_memory()
    memory |= _shared_memory()
    ended = child.poll() is not None or byte == _KEEP
    byte = None if byte == _KEEP else byte
    if removal:
        _remove(removal)
    if child.poll() is None and grace and not byte:
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
        aside.rename(Path(folder, ENDED))  # complete as soon as it exists
        while ended and byte is None and os.getppid() == parent:  # until the parent has read the exit code
            byte = _read_byte(POLL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # this process and everything forked meanwhile


def _read_byte(seconds: float) -> bytes | None:
    """Read one byte from standard input within `seconds`; return b"" at its end and None after the time."""
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
    """Kill all processes of the tree; resource trackers have TIDY_SECONDS to clean up first."""
    until = time.monotonic() + TIDY_SECONDS
    while (pids := _tree()) and time.monotonic() < until:
        for pid in pids:
            if _TRACKER not in _read(pid, "cmdline"):
                _kill(pid)
        time.sleep(0.02)
    for pid in pids:
        _kill(pid)


def _tree() -> list[int]:
    """List the running processes that descend from this one or belong to its group, without this one."""
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
    """Find the files of SGLang's shared memory that processes of the tree have open."""
    return {path for pid in _tree() for path in _SHARED_MEMORY.findall(_read(pid, "maps"))}


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc; return b"" if the process has ended meanwhile."""
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
    """Call prctl on Linux; on other systems, only the process group ties the tree together."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
