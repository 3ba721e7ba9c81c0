"""Keeps the workspaces of the provider `bwrap`: one keeper process each, forked from this script, which stays small.

Run as a script. The first argument is a configuration (JSON). Requests come over its socket: `o` and a specification
(JSON) with a descriptor (keep a workspace, and speak about it there). A keeper is the root of a user namespace of its
own, with nothing in it but one ordinary user. There it mounts a file system in memory over the image, and starts
bubblewrap on it. Programs are not started by anything inside: the keeper forks, and the fork joins bubblewrap's
namespaces, gives up all rights, and executes. So nothing that runs inside can reach what starts, measures and ends it.
Everything ends with this process, and this process ends when its socket closes or its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CONTAINMENT = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), "containment")
sys.path[:0] = [_FOLDER, _CONTAINMENT, os.path.join(_CONTAINMENT, "inside")]

import file_calls  # noqa: E402 - found by the line above, as are the next ones
import layers  # noqa: E402
import measure  # noqa: E402
from launcher import check, libc, mount, pipe_with, stage  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NEW = {"user": 0x10000000, "mnt": 0x00020000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000,
        "uts": 0x04000000, "cgroup": 0x02000000}  # fmt: skip
_ENTERED = ("owner", "mnt", "net", "ipc", "uts", "cgroup", "user")
"""In their order: rights in the owner are what entering the others takes; the last one has the user."""
_NOSUID, _NODEV, _REC, _PRIVATE = 2, 4, 16384, 1 << 18
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000
_OWNER_OF = 0xB701  # NS_GET_USERNS
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _SECCOMP_MODE_FILTER = 22, 36, 2
_CAPABILITIES_VERSION = 0x20080522
_STAGES = ("/media", "/srv", "/tmp")  # what they hide must hold no image
_PARENT_SECONDS, _READY_SECONDS, _END_SECONDS = 2.0, 60.0, 10.0
_LOOK, _CLOSE_LOOK, _PAUSE = 0.05, 0.5, 50  # as in `guard`
_READY = b"ready\n"
_MESSAGE = 1 << 18
_MOST_FDS = 4
_ATTEMPTS = 3
_OUTSIDE = ("snapshot", "diff", "original")
FAILED = 125
"""The exit code of a fork that could not become the program; why is in its report."""


class Keeper:
    """One workspace. channel: requests (JSON, with descriptors) and what is said of them."""

    def __init__(self, config: dict[str, Any], spec: dict[str, Any], channel: socket.socket) -> None:
        self.config, self.spec, self.channel = config, spec, channel
        self.running: dict[int, tuple[int, int]] = {}
        """By process id: the request, and the reading end of its report."""
        self.bwrap = self.init = 0
        self.namespaces: dict[str, int] = {}
        self.entered: list[str] = []
        self.stopped = ""
        self.top = config["mountpoint"]
        self.mount_files()

    def mount_files(self) -> None:
        """Become root of a user namespace, and mount the image with a file system in memory over it."""
        uid, gid = os.getuid(), os.getgid()
        check(libc.unshare(_NEW["user"] | _NEW["mnt"]), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a new user namespace takes it back
        mount("none", "/", "", _REC | _PRIVATE)
        limits = self.spec["limits"]
        size = f"mode=0755,size={limits['disk']},nr_inodes={limits['files'] + 16}"
        mount("tmpfs", self.top, "tmpfs", _NOSUID | _NODEV, size)
        for name in ("upper", "work", "root", "before"):
            os.mkdir(f"{self.top}/{name}")
        os.mkdir(f"{self.top}/shm")
        lower = [f"{self.config['snapshots']}/{name}" for name in self.spec["layers"]]
        lower += [self.spec["image"], self.config["points"]] if self.spec["image"] else [self.config["skeleton"]]
        self.lower = lower
        options = f"lowerdir={':'.join(map(_escaped, lower))}"
        if len(lower) > 1:
            mount("overlay", f"{self.top}/before", "overlay", _NOSUID | _NODEV, f"{options},userxattr")
        above = f",upperdir={self.top}/upper,workdir={self.top}/work,userxattr"
        mount("overlay", f"{self.top}/root", "overlay", _NOSUID | _NODEV, options + above)

    @property
    def before(self) -> str:
        """Where the files are seen as they were at first."""
        return f"{self.top}/before" if len(self.lower) > 1 else self.lower[0]

    def start(self) -> None:
        """Start bubblewrap, unless it runs, and open its namespaces. Raises OSError with its own words."""
        if self.bwrap:
            return
        info, info_end = os.pipe()
        ready, ready_end = os.pipe()
        hold, self.hold = os.pipe()  # what waits inside says what we write, and ends when we do
        os.write(self.hold, _READY)
        self.bwrap = os.fork()
        if self.bwrap == 0:
            _run_or_end(self.become_bwrap, hold, ready_end, info_end)
        for end in (info_end, ready_end, hold):
            os.close(end)
        try:
            said = _first_bytes(info, b"}")
            inside = json.loads(said)["child-pid"] if said.endswith(b"}") else 0
            if not inside or _first_bytes(ready, _READY) != _READY:
                words = said if not inside else b""
                self.end()
                raise OSError(0, f"bubblewrap did not start: {words.decode(errors='replace')[:300]}")
        finally:
            os.close(info)
            os.close(ready)
        self.init = inside
        opened = {name: os.open(f"/proc/{inside}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NEW}
        opened["owner"] = fcntl.ioctl(opened["mnt"], _OWNER_OF)  # what bubblewrap mounted in, before it took its user
        self.namespaces = opened
        own = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in ("mnt", "net", "ipc", "uts", "cgroup")}
        own["user"] = os.fstat(opened["owner"]).st_ino
        self.entered = [n for n in _ENTERED if n not in own or os.fstat(opened[n]).st_ino != own[n]]
        measure.proc = f"/proc/{inside}/root/proc"

    def become_bwrap(self, hold: int, ready: int, info: int) -> None:
        """Execute bubblewrap, in the forked process."""
        os.setpgid(0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        silent = os.open("/dev/null", os.O_WRONLY)  # the loader complains of what /etc/ld.so.preload of the inside says
        fds = [hold, ready, silent, info, pipe_with(bytes.fromhex(self.config["filter"]))]
        high = [os.dup2(fd, 100 + n) for n, fd in enumerate(fds)]
        for place, fd in enumerate(high):
            os.dup2(fd, place)
            os.set_inheritable(place, True)
        os.closerange(len(high), 256)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        own = self.config["everything" if self.spec["everything"] else "apart"]
        words = ["--bind", f"{self.top}/root", "/", *own, "--bind", f"{self.top}/shm", "/dev/shm"]
        words += ["--remount-ro", "/dev"]
        shown = [] if self.spec["image"] else self.config["binds"]
        words += [part for bind in [*shown, *self.config["waiter"]] for part in bind]
        words += ["--seccomp", "4", "--info-fd", "3", "--chdir", "/", "--", *self.config["wait"]]
        os.execve(self.config["bwrap"], [self.config["bwrap"], *words], {})

    def end(self) -> None:
        """Kill everything inside, and wait until it is gone; files stay. Raises OSError where it stays.

        Process 1 inside ends once we have reaped those that are our children; then bubblewrap hears, and ends, too."""
        if self.bwrap:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init or self.bwrap, signal.SIGKILL)
        last = time.monotonic() + _END_SECONDS
        while (self.bwrap or self.running) and time.monotonic() < last:
            self.reap()
            time.sleep(0.0005)
        if self.bwrap:
            raise OSError(0, "what runs in it cannot be ended")

    def join(self) -> None:
        """Enter the namespaces of bubblewrap, in a fork, and give up all rights there."""
        for name in self.entered:
            check(libc.setns(self.namespaces[name], _NEW.get(name, _NEW["user"])), f"setns {name}")
        os.chdir("/")
        give_up_rights(bytes.fromhex(self.config["filter"]))

    def spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        """Fork for a request: into the sandbox, or beside it for what looks at its files from outside."""
        outside = request["op"] in _OUTSIDE
        for _ in range(_ATTEMPTS):
            if not outside:
                self.start()
            if self.forked(request, fds, outside):
                return
            self.end()  # what has ended inside is about to be noticed
        raise OSError(0, "no process can be started in it")

    def forked(self, request: dict[str, Any], fds: list[int], outside: bool) -> bool:
        """Fork for a request. False: the process namespace takes no more processes."""
        report, report_end = os.pipe()
        said, said_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            if outside:
                _run_or_end(self.child, request, fds, report_end, outside)
            _run_or_end(self.sibling, request, fds, report_end, said_end)
        for end in (report_end, said_end):
            os.close(end)
        if not outside:
            first, pid = pid, int(_first_bytes(said, b"\n") or 0)
            os.waitpid(first, 0)
        os.close(said)
        if pid == 0:
            os.close(report)
            return False
        self.running[pid] = request["id"], report
        return True

    def sibling(self, request: dict[str, Any], fds: list[int], report: int, say: int) -> None:
        """Fork once more, with the keeper as its parent, into the process namespace inside: the keeper's own children
        must stay out of one that may end before it. Says the process id."""
        check(libc.setns(self.namespaces["pid"], _NEW["pid"]), "setns pid")
        number = _CLONE[os.uname().machine]
        pid = libc.syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os.close(say)
            _run_or_end(self.child, request, fds, report, False)
        check(pid, "clone")
        os.write(say, f"{pid}\n".encode())
        os._exit(0)

    def child(self, request: dict[str, Any], fds: list[int], report: int, outside: bool) -> None:
        """Do what a request asks for, in the forked process."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            if outside:
                self.outside(request, fds)
            else:
                limits = {"NPROC": self.spec["limits"]["processes"] + 4, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0,
                          "DATA": self.spec["limits"]["memory"], "NOFILE": self.spec["limits"]["descriptors"],
                          "FSIZE": self.spec["limits"]["disk"]}  # fmt: skip
                self.join()
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                measure.confine(limits)
                self.inside(request, fds)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _report(report, error.errno or 0, f"{where}{error.strerror or error}")
            os._exit(FAILED)
        os._exit(0)

    def inside(self, request: dict[str, Any], fds: list[int]) -> None:
        """Run a program, hold a terminal, listen, or read and write files: with no more rights than a program."""
        op = request["op"]
        if op in ("exec", "terminal"):
            env = {**self.spec["env"], **request["env"], file_calls.MARK: str(request["id"])}
            os.chdir(request["cwd"])
            os.umask(0o022)
            if op == "terminal":
                fds = [file_calls.open_terminal(request["rows"], request["columns"], self.say_fd, request["id"])] * 3
            for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in fds]):
                os.dup2(fd, place)
            libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            _execute(request["words"], env)
        elif op == "listen":
            file_calls.listen(request["port"], self.say_fd, request["id"])
        else:
            file_calls.CALLS[op](request, *fds)

    def outside(self, request: dict[str, Any], fds: list[int]) -> None:
        """Copy or compare what the file system in memory holds, as its owner sees it."""
        if request["op"] == "snapshot":
            layers.copy(f"{self.top}/upper", f"{self.config['snapshots']}/{request['name']}")
        elif request["op"] == "original":
            layers.read(self.before, request["paths"], request["limit"], fds[1])
        else:
            layers.compare(f"{self.top}/upper", self.before, request["limit"], fds[1])

    def say_fd(self, request: int, fd: int) -> None:
        """Hand a descriptor to the host, from a fork."""
        socket.send_fds(self.channel, [json.dumps({"id": request, "event": "fd"}).encode()], [fd])

    def say(self, **said: Any) -> None:
        """Tell the host something."""
        self.channel.sendall(json.dumps(said).encode())

    def reap(self) -> None:
        """Say which requests have ended, and how."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.bwrap:
                self.bwrap = 0
                self.gone()
            elif pid in self.running:
                request, report = self.running.pop(pid)
                said = os.read(report, 4096)
                os.close(report)
                code = os.waitstatus_to_exitcode(status)
                end: dict[str, Any] = {"id": request, "event": "end", "code": code, "stopped": self.stopped}
                if said:
                    end |= {"error": json.loads(said)}
                self.say(**end)
                if not self.running:
                    self.stopped = ""

    def gone(self) -> None:
        """Forget bubblewrap, which was ended from inside; the next request starts it anew."""
        os.close(self.hold)
        for fd in self.namespaces.values():
            os.close(fd)
        self.namespaces, self.init = {}, 0

    def obey(self, data: bytes, fds: list[int]) -> None:
        """Serve one request."""
        request = json.loads(data)
        try:
            if request["op"] == "kill":
                for pid, (name, _) in self.running.items():
                    if name == request["of"]:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                self.spawn(request, fds)
            elif request["op"] == "end":
                self.end()
                self.say(id=request["id"], event="end", code=0, stopped="")
            else:
                self.spawn(request, fds)
        except OSError as error:
            self.say(id=request["id"], event="broken", error=f"{error.strerror or error}")
        finally:
            for fd in fds:
                os.close(fd)

    def over(self, closely: bool) -> str:
        """What the processes use more of than they may; nothing where they keep to it."""
        limits, sockets = self.spec["limits"], self.config["socket_bytes"]
        with contextlib.suppress(OSError):  # it ended
            _, memory, tasks = measure.usage()
            if tasks > limits["processes"] + 2:
                return f"it started more than {limits['processes']} processes and threads"
            held = measure.quick_memory(sockets)
            if closely:
                held = measure.kernel_memory(sockets, limits["descriptors"], limits["memory"])
            left = limits["memory"] - held
            if left < 0 or (memory > left and measure.proportional_memory() > left):
                return f"its processes used more than {limits['memory'] >> 20} MiB of memory"
        return ""

    def serve(self) -> None:
        """Serve until the channel closes."""
        wake, waker = os.pipe()
        for fd in (wake, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        closely = look = 0.0
        while True:
            now = time.monotonic()
            pause = max(0.0, look - now) if self.bwrap else None
            readable = select.select([self.channel.fileno(), wake], [], [], pause)[0]
            if wake in readable:
                os.read(wake, 4096)
                self.reap()
            if self.channel.fileno() in readable:
                data, fds, _, _ = socket.recv_fds(self.channel, _MESSAGE, _MOST_FDS)
                if not data:
                    return
                self.obey(data, fds)
            now = time.monotonic()
            if self.init and now >= look:
                close = now >= closely
                if why := self.over(close):
                    self.stopped = why
                    self.end()
                    self.stopped = ""
                took = time.monotonic() - now
                closely = now + _CLOSE_LOOK if close else closely
                look = now + min(2.0, max(_LOOK if self.running else _CLOSE_LOOK, _PAUSE * took))


def give_up_rights(program: bytes) -> None:
    """Drop all capabilities, for what is executed too, and take the filter of system calls. Raises OSError."""
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    buffer = ctypes.create_string_buffer(program, len(program))
    steps = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, steps, 0, 0), "seccomp")


def _execute(words: list[str], env: dict[str, str]) -> None:
    """Become the program, with no descriptors but the standard ones."""
    limit = 1024
    os.closerange(3, limit)
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _run_or_end(work: Any, *arguments: Any) -> None:
    """Call what a fork is there for, and end it whatever happens: it must not go on as its parent."""
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - see above
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(FAILED)


def _report(fd: int, number: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps({"errno": number, "text": text[:1000]}).encode())


def _first_bytes(fd: int, end: bytes) -> bytes:
    """What comes up to `end`, or all that comes before it closes or is late."""
    said, last = b"", time.monotonic() + _READY_SECONDS
    while end not in said and len(said) < 4096:
        if not select.select([fd], [], [], max(0.0, last - time.monotonic()))[0]:
            break
        part = os.read(fd, 1)  # what follows is for somebody else
        if not part:
            break
        said += part
    return said.strip() if end == b"}" else said


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def keep(config: dict[str, Any], spec: dict[str, Any], channel: socket.socket) -> None:
    """Keep one workspace until its channel closes, in a fork."""
    try:
        keeper = Keeper(config, spec, channel)
        keeper.start()
    except (OSError, ValueError) as error:
        channel.sendall(json.dumps({"id": 0, "event": "broken", "error": str(error)}).encode())
        return
    keeper.say(id=0, event="ready")
    keeper.serve()
    keeper.end()


def serve(config: dict[str, Any], control: socket.socket) -> None:
    """Fork a keeper for each request, until the socket closes or the parent is gone."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers
    while os.getppid() == parent:
        if not select.select([control], [], [], _PARENT_SECONDS)[0]:
            continue
        data, fds, _, _ = socket.recv_fds(control, _MESSAGE, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_or_end(keep, config, json.loads(data), socket.socket(fileno=fds[0]))
        os.close(fds[0])


def main() -> None:
    """Do what the first argument says; drop every snapshot at the end."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["socket"])
    control.set_inheritable(False)
    state = config["state"]
    try:
        if config["uid"] is not None:
            staged = stage(
                [["--bind", state, state], *config["binds"], *config["waiter"]], next(filter(os.path.isdir, _STAGES))
            )
            state, staged = staged[0][1], staged[1:]
            config["binds"], config["waiter"] = staged[: len(config["binds"])], staged[len(config["binds"]) :]
            os.setgroups([])
            os.setresgid(config["uid"], config["uid"], config["uid"])
            os.setresuid(config["uid"], config["uid"], config["uid"])
            libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        for name in ("mountpoint", "snapshots", "skeleton", "points"):
            config[name] = f"{state}/{name}"
        serve(config, control)
    except OSError as error:
        control.send(f"keeper: {error}".encode()[:4000])
    finally:
        shutil.rmtree(f"{state}/snapshots", ignore_errors=True)


if __name__ == "__main__":
    main()
