"""Starts bubblewrap: once, in its own place, or on request, because forking a trainer of many gigabytes is slow.

Run as a script. The first argument is a configuration (JSON). Without a `socket` in it bubblewrap takes this process's
place, and runs the command that follows. With one, requests come over it: `s<id>` with a descriptor (start a sandbox
that speaks on it) and `k<id>` (kill it); everything that it started ends with it, and it ends when its socket closes or
its parent is gone. Where it runs as root it works in a mount namespace of its own, binds there what the sandboxes need,
and starts them as an ordinary user: the kernel binds root to few limits, and gives it the machine's settings.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

_NEW_MOUNTS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
_STAGE = "/tmp"  # hidden by a private tmpfs, where the binds for an ordinary user lie
_FILTER, _PASSWD, _GROUP = 4, 5, 6  # descriptors of bubblewrap; 3 is the session's socket
_PARENT_SECONDS = 2.0
_END_SECONDS = 5.0

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError with what the kernel said, where a call of the C library failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount, as the system call does. Raises OSError."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(libc.mount(*arguments), f"mount {target}")


def stage(binds: list[list[str]], at: str = _STAGE) -> list[list[str]]:
    """The binds, with sources that anybody may reach below `at`, in a mount namespace of our own."""
    check(libc.unshare(_NEW_MOUNTS), "unshare")
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    handles = [os.open(source, os.O_PATH) for _, source, _ in binds]
    folders = [os.path.isdir(source) for _, source, _ in binds]
    mount("tmpfs", at, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
    staged = []
    for n, (handle, folder) in enumerate(zip(handles, folders, strict=True)):
        place = f"{at}/{n}"
        if folder:
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{handle}", place, "", _MS_BIND | _MS_REC)
        os.close(handle)
        staged.append([binds[n][0], place, binds[n][2]])
    return staged


def command(config: dict[str, Any], binds: list[list[str]]) -> list[str]:
    """Bubblewrap's arguments, and the first of the program's. binds: option, source and place of each."""
    shown = [part for bind in binds for part in bind]
    files = ["--seccomp", str(_FILTER), "--ro-bind-data", str(_PASSWD), "/etc/passwd"]
    files += ["--ro-bind-data", str(_GROUP), "/etc/group"]
    return [config["bwrap"], *config["before"], *shown, *files, *config["after"]]


def start(config: dict[str, Any], arguments: list[str], session: int) -> int:
    """Fork and execute bubblewrap on the descriptor `session`. Returns its process id."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it was faster: it did so itself, and went on
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)  # while it sets up, bubblewrap's child does not yet end with it
        null = os.open("/dev/null", os.O_RDWR)
        _become(config, [null, null, session, session])
        os.execv(arguments[0], arguments)
    except BaseException as error:  # noqa: BLE001 - a fork must not go on as its parent
        os.write(2, f"{error}".encode())
    finally:
        os._exit(127)


def enter(config: dict[str, Any], words: list[str]) -> None:
    """Execute bubblewrap and the command in it, with our own standard streams. Raises OSError."""
    os.chdir("/")
    binds = stage(config["binds"]) if config["uid"] is not None else config["binds"]
    _become(config, [0, 1, 2, os.open("/dev/null", os.O_RDWR)])
    os.execv(config["bwrap"], [*command(config, binds), *words])


def _become(config: dict[str, Any], streams: list[int]) -> None:
    """Give this process the descriptors that bubblewrap has, `streams` as the first four, and its user."""
    be_first_to_go()
    filled = [pipe_with(bytes.fromhex(config["filter"])), pipe_with(config["passwd"].encode())]
    filled.append(pipe_with(config["group"].encode()))
    high = [os.dup2(fd, 100 + n) for n, fd in enumerate([*streams, *filled])]
    for place, fd in enumerate(high):
        os.dup2(fd, place)
        os.set_inheritable(place, True)
    os.closerange(len(high), 200)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])


def be_first_to_go() -> None:
    """Have the kernel end this process and its children first where memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # a kernel without it


def pipe_with(data: bytes) -> int:
    """A pipe's reading end, which holds `data`: far less than a pipe holds."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return read


def reap(running: dict[str, int]) -> None:
    """Forget what has ended."""
    ended = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        ended.add(pid)
    for name in [name for name, pid in running.items() if pid in ended]:
        del running[name]


def serve(config: dict[str, Any], control: socket.socket) -> None:
    """Serve until the socket closes."""
    binds = stage(config["binds"]) if config["uid"] is not None else config["binds"]
    arguments = command(config, binds)
    running: dict[str, int] = {}
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([control.fileno(), wake], [], [], _PARENT_SECONDS)
        if wake in readable:
            os.read(wake, 4096)
            reap(running)
        if control.fileno() in readable and not obey(config, arguments, control, running):
            break
    end(running)


def obey(config: dict[str, Any], arguments: list[str], control: socket.socket, running: dict[str, int]) -> bool:
    """Serve one request. False at the end of the socket."""
    data, fds, _, _ = socket.recv_fds(control, 64, 1)
    if not data:
        return False
    name = data[1:].decode()
    if data[:1] == b"s":
        running[name] = start(config, arguments, fds[0])
        os.close(fds[0])
    elif name in running:
        os.killpg(running[name], signal.SIGKILL)
    return True


def end(running: dict[str, int]) -> None:
    """Kill what runs, and wait until it is gone: what bubblewrap leaves comes to us, its subreaper."""
    for pid in running.values():
        os.killpg(pid, signal.SIGKILL)
    last = time.monotonic() + _END_SECONDS
    while time.monotonic() < last:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
        except ChildProcessError:
            return


def main() -> None:
    """Do what the first argument says."""
    config = json.loads(sys.argv[1])
    if "socket" not in config:
        try:
            enter(config, sys.argv[2:])
        except OSError as error:
            sys.exit(f"launcher: {error}")
    control = socket.socket(fileno=config["socket"])
    control.set_inheritable(False)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        serve(config, control)
    except OSError as error:
        control.send(f"launcher: {error}".encode()[:4000])


if __name__ == "__main__":
    main()
