"""`ProcessTree`: a command outside the sandbox with all its descendants, none of which outlives this process.

This file is also the program that supervises the command, in a session of its own, which the terminal's Ctrl-C does not
reach. It ends the whole tree when the command ends, its standard input closes, or its parent is gone, for whatever
reason. It is two processes: a keeper, and its child, which supervises. Where the command kills or stops one, the other
one ends the tree; where it kills or stops both, this process does, by a variable that all of it inherited. It imports
only the standard library.

usage: python process_tree.py GRACE_SECONDS REMOVAL FOLDER REPORT COMMAND [ARGUMENT ...]

REMOVAL is a command that ends what is not a descendant, such as a container; FOLDER is deleted when the parent ends;
REPORT is a descriptor to which the exit code is written; all may be empty. A byte on standard input before it closes
means: end without the grace period; the byte `k`: end the command now, and keep FOLDER until standard input closes.
"""

import contextlib
import ctypes
import os
import re
import select
import shlex
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
_WAIT_SECONDS = 0.01  # between two looks at whether it has ended
TIDY_SECONDS = 5.0
"""Time for resource trackers to clean up before they are killed."""
REMOVAL_SECONDS = 30.0
"""Time limit of REMOVAL."""
_SHARED_MEMORY = re.compile(rb" (/dev/shm/sgl(?:ang_loads|_shm)_\S+)$", re.M)
"""Files of shared memory that SGLang's processes leave behind when they are killed."""
_TRACKER = b"multiprocessing.resource_tracker"
"""A process that removes semaphores and shared memory of the other processes when they are gone, and then ends."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MARK = "AGENTRL_PROCESS_TREE"
"""The environment variable by which a tree is known whose supervisors are gone."""
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
        self._mark = f"{_MARK}={os.urandom(12).hex()}"
        self._report: int | None = None
        self._exit_code: int | None = None
        report: list[int] = []
        if folder is not None:
            self._report, theirs = os.pipe()
            os.set_blocking(self._report, False)
            report = [theirs]
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", __file__, f"{grace:g}", shlex.join(removal), str(folder or ""),
                 "".join(map(str, report)), *command],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env={**env, _MARK: self._mark.partition("=")[2]},
                start_new_session=True, pass_fds=report,
            )  # fmt: skip
        except BaseException:
            self._stop_listening()
            raise
        finally:
            for fd in report:
                os.close(fd)

    @property
    def pid(self) -> int:
        """The process ID of the supervisor and of its process group."""
        return self._supervisor.pid

    @property
    def running(self) -> bool:
        """Whether the command is running."""
        if self._folder is None:
            return self._supervisor.poll() is None
        self._listen()
        return self._report is not None

    @property
    def exit_code(self) -> int | None:
        """Of a command with a folder that ended by itself."""
        self._listen()
        return self._exit_code

    @property
    def gone(self) -> bool:
        """Whether the supervisor has ended, which is the last process of the tree."""
        return self._supervisor.poll() is not None

    def _listen(self) -> None:
        """Take what the supervisor has said: that the command ended, or nothing any more."""
        if self._report is None:
            return
        try:
            said = os.read(self._report, 64).split(b"\n")[0].decode("ascii", "replace")
        except BlockingIOError:
            return
        self._exit_code = int(said) if said.lstrip("-").isdecimal() else None
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._report is not None:
            os.close(self._report)
            self._report = None

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
        until = time.monotonic() + END_SECONDS
        with contextlib.suppress(ChildProcessError):  # it has ended, and who asked whether it runs has heard so
            while self._supervisor.returncode is None and time.monotonic() < until:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    break
                time.sleep(_WAIT_SECONDS)
            self.kill()
        self._supervisor.wait()
        self._listen()
        self._stop_listening()
        if self._folder is not None:  # what supervisors that were killed have left
            if self._exit_code is None:
                _kill_marked(self._mark.encode())
            remove_tree(self._folder)

    def kill(self) -> None:
        """Kill the supervisor and all of its process group, where it does not end by itself."""
        if self._supervisor.returncode is None:  # else its number may be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def main() -> None:
    """Run the keeper, and in its child the supervisor: see the module's docstring."""
    grace, removal, folder, report, command = float(sys.argv[1]), shlex.split(sys.argv[2]), *sys.argv[3:5], sys.argv[5:]
    parent = os.getppid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # these signals are for the command; the supervisor ends after it
    kept, keeps = os.pipe()  # the supervisor hears by it that the keeper or its parent is gone
    supervisor = os.fork()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the tree become children of this process
    code, ended, byte = None, True, None
    if supervisor == 0:
        os.close(keeps)
        code, ended, byte = _supervise(command, grace, removal, kept)
    else:
        _keep(supervisor, parent, keeps)
        if removal:
            _remove(removal)
        _kill_tree()
    if report:
        with contextlib.suppress(OSError):  # the parent is gone
            os.write(int(report), f"{code}\n".encode())
    else:
        print(f"the command ended with exit code {code}", file=sys.stderr, flush=True)
    if folder:
        while ended and byte is None and (supervisor == 0 or os.getppid() == parent):  # until it has been read
            byte = _read_byte(POLL_SECONDS, kept if supervisor == 0 else None)
        remove_tree(folder)
    os.killpg(0, signal.SIGKILL)  # this process and everything forked meanwhile


def _keep(supervisor: int, parent: int, keeps: int) -> None:
    """Wait until the command has killed or stopped the supervisor, which otherwise ends this process, too. keeps: what
    to close when the parent is gone."""
    while os.getppid() == parent:
        if os.waitpid(supervisor, os.WNOHANG | os.WUNTRACED)[0]:
            break
        time.sleep(POLL_SECONDS)
    else:
        os.close(keeps)
        os.waitpid(supervisor, os.WUNTRACED)
    _kill(supervisor)


def _supervise(
    command: list[str], grace: float, removal: list[str], kept: int
) -> tuple[int | None, bool, bytes | None]:
    """Run the command until it ends or is to end, and end its tree. Returns its exit code, whether FOLDER is still to
    be read, and what standard input said."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_child)
    byte, polls, memory = None, 0, set[bytes]()
    while child.poll() is None and byte is None:
        byte = _read_byte(POLL_SECONDS, kept)
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
    code = child.poll()
    _kill_tree()
    for path in memory:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return code, ended, byte


def _read_byte(seconds: float, kept: int | None) -> bytes | None:
    """Read one byte from standard input within `seconds`; return b"" at its end, or that of the pipe `kept`, and None
    after the time."""
    ready, _, _ = select.select([sys.stdin, *([kept] if kept is not None else [])], [], [], seconds)
    if kept in ready:
        return b""
    return os.read(sys.stdin.fileno(), 1) if ready else None


def remove_tree(folder: str | Path) -> None:
    """Delete a folder and all in it as far as our rights go, however deep it is and whatever the rights of its folders
    are. Follows no link, and needs neither recursion nor long paths: what lies deeper is moved up first."""
    with contextlib.suppress(OSError):
        top = _opened(os.fspath(folder), None)
        try:
            stuck: set[str] = set()
            while names := set(os.listdir(top)) - stuck:
                for name in names:
                    try:
                        _empty(name, top)
                    except OSError:
                        stuck.add(name)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(name: str, top: int) -> None:
    """Delete an entry of the folder `top`; folders in it become entries of `top`. Raises OSError where it stays."""
    with contextlib.suppress(IsADirectoryError, PermissionError):
        os.unlink(name, dir_fd=top)
        return
    folder = _opened(name, top)
    try:
        for below in os.listdir(folder):
            with contextlib.suppress(OSError):
                try:
                    os.unlink(below, dir_fd=folder)
                except (IsADirectoryError, PermissionError):
                    os.close(_opened(below, folder))
                    os.rename(below, f".{os.urandom(12).hex()}", src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _opened(name: str, folder: int | None) -> int:
    """Open the folder `name` of `folder`, with all rights for its owner. Raises OSError for what is none."""
    how = os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        found = os.open(name, os.O_RDONLY | how, dir_fd=folder)
        with contextlib.suppress(OSError):  # another one's
            os.fchmod(found, 0o700)
    except PermissionError:
        closed = os.open(name, os.O_PATH | how, dir_fd=folder)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)
            found = os.open(f"/proc/self/fd/{closed}", os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(closed)
    return found


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


def _kill_marked(mark: bytes) -> None:
    """Kill all processes whose environment holds `mark`, until there is none, or for TIDY_SECONDS."""
    until = time.monotonic() + TIDY_SECONDS
    while time.monotonic() < until:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if not (marked := [pid for pid in pids if mark in _read(pid, "environ").split(b"\0")]):
            return
        for pid in marked:
            _kill(pid)
        time.sleep(0.02)


def _tree() -> list[int]:
    """List the running processes that descend from this one or belong to its group, without this one and the keeper,
    which leads the group."""
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
    return sorted(running & members - {os.getpid(), group})


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
