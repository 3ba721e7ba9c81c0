"""Process 1 of the sandbox: takes code from the host, has the worker run it, and sees to the limits.

Nothing inside can kill, trace or stop it, and the host's socket is in no process that runs the model's code. It polls
what all processes use together, since the kernel's own limits are of one process each. Between calls the worker is
stopped, and all that it started is killed. When the host's socket closes it exits, and the kernel kills the rest.

host -> here: size, seconds, code. Here -> host: size, fields. Fields are those of the worker, then its own.
"""

import _socket
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time

from measure import alive, confine, files, kernel_memory, page_tables, pids, proportional_memory, socket_memory, usage
from worker import NONCE, Worker, field

STOP, LOST, LOST_BEFORE, SPOILT, OUT, ERR, CUT = b"S", b"L", b"B", b"X", b"o", b"e", b"C"
READY = b"ready\n"
_FIRST_LOOK, _LOOK = 0.01, 0.05  # seconds after which, and between which, the use of resources is measured
_GLANCE = 0.01  # seconds between looks at sockets and page tables alone, which several processes fill fastest
_PAUSE = 5  # times as long as a measurement took, before the next one
_GRACE = 0.5  # seconds from the interrupt to the kill
_OUTPUTS = "/run"
_LOUD = 8 << 20  # bytes printed in one call that stop it, at most
_HIGH = 112  # descriptors of ours in the worker are from here on
_DESCRIPTORS = 128
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None)


class Supervisor:
    """limits: as the host's `Limits`, by name. host: the descriptor of the host's socket."""

    def __init__(self, host: int, limits: dict[str, int]) -> None:
        self.host = host
        self.limits = limits
        self.outputs = [_output(name) for name in ("out", "err")]
        self.null = os.open("/dev/null", os.O_RDWR)
        self.lost_before = False
        self.spoilt = False
        self.start_worker()

    def start_worker(self) -> None:
        """Fork a worker, and keep our end of its connection. It shows what it uses from its first moment on: it gets
        code, and we are alone with it, only once we hide again."""
        ours, theirs = _socketpair()
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        pid = os.fork()
        if pid == 0:
            try:
                self.become_worker(theirs)
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        os.close(theirs)
        os.set_blocking(ours, False)
        self.pid, self.channel, self.ended = pid, ours, os.pidfd_open(pid)

    def become_worker(self, channel: int) -> None:
        """Run as the worker, in the forked process; does not return."""
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in (channel, *self.outputs)]
        for place, fd in enumerate((self.null, *self.outputs)):
            os.dup2(fd, place)
        os.setsid()
        os.nice(5)
        os.closerange(3, _HIGH)
        os.closerange(max(kept) + 1, _DESCRIPTORS)
        limits = self.limits
        shown = limits["images"], limits["image_bytes"]
        Worker(kept[0], ((kept[1], 1), (kept[2], 2)), limits["output"], shown).serve()

    def serve(self) -> None:
        """Run the cells that the host sends, until it leaves."""
        while True:
            size, seconds = struct.unpack("<Id", _read(self.host, 12))
            code = _read(self.host, size)
            reply = self.call(code, seconds)
            _write(self.host, struct.pack("<I", len(reply)) + reply)

    def call(self, code: bytes, seconds: float) -> bytes:
        """Run the code; the fields of the reply."""
        if select.select([self.ended], [], [], 0)[0]:
            self.renew()
            self.lost_before = True
        call = Call(self, code, seconds)
        os.kill(self.pid, signal.SIGCONT)
        reply, stop = call.run()
        lost = reply is None
        if lost:
            self.renew()
        else:
            os.kill(-1, signal.SIGSTOP)
            self.kill_others()
        (out, cut), (err, cut_too) = self.printed(0), self.printed(1)
        own = [(OUT, out), (ERR, err)]
        if stop:
            own.append((STOP, stop.encode()))
        flags = {LOST: lost, LOST_BEFORE: self.lost_before, SPOILT: self.spoilt, CUT: cut or cut_too}
        own += [(tag, b"") for tag, flag in flags.items() if flag]
        self.lost_before = False
        return (reply or b"") + b"".join(field(*one) for one in own)

    def renew(self) -> None:
        """Kill everything, and start a worker with nothing in it."""
        os.kill(-1, signal.SIGKILL)
        _reap_all()
        os.close(self.ended)
        os.close(self.channel)
        self.start_worker()

    def kill_others(self) -> None:
        """Kill what is not the worker, once all is stopped; the worker reaps its own children when it goes on.

        A fork that was under way when all was stopped still completes, and its child is born stopped: processes are
        listed until none is left, the last time after the worker itself stands still."""
        stopped = False
        while True:
            stopped = stopped or self.worker_stopped()
            others = [pid for pid in pids() if pid != self.pid and alive(pid)]
            if stopped and not others:
                break
            for pid in others:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001 if others else 0.00005)
        _reap()

    def worker_stopped(self) -> bool:
        """Whether every thread of the worker has stopped, or the worker has ended."""
        try:
            return os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def printed(self, which: int) -> tuple[bytes, bool]:
        """The output kept, and whether it is cut: its beginning and its end, in between how much was left out."""
        fd = self.outputs[which]
        size, most = os.fstat(fd).st_size, self.limits["output"]
        if size <= most:
            data = os.pread(fd, size, 0)
        else:
            half = most // 2
            gap = f"\n... {size - 2 * half} bytes left out ...\n".encode()
            data = os.pread(fd, half, 0) + gap + os.pread(fd, half, size - half)
        if size:
            os.ftruncate(fd, 0)
        return data, size > most


class _GoneError(Exception):
    """The worker's end of the channel says nothing that can be believed."""


class Call:
    """One run of code in the worker, until it replies, ends, or is stopped."""

    def __init__(self, supervisor: Supervisor, code: bytes, seconds: float) -> None:
        self.supervisor = supervisor
        self.limits = supervisor.limits
        self.nonce = os.urandom(NONCE)
        self.sending = struct.pack(f"<I{NONCE}s", len(code), self.nonce) + code
        self.received = bytearray()
        self.most = min(_LOUD, self.limits["file_size"] // 2)
        self.longest = 4 * self.limits["output"] + self.limits["image_bytes"] * 2 + 65536
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.used_before = usage()[0]
        self.stop: str | None = None

    def run(self) -> tuple[bytes | None, str | None]:
        """(the worker's fields, why it was stopped). No fields: the worker is beyond repair."""
        look = glance = tables = self.began + _FIRST_LOOK
        while True:
            now = time.monotonic()
            if now >= self.end:
                if self.stop:
                    return None, self.stop
                self.interrupt("wall")
            if now >= look:
                if over := self.over():
                    return None, over
                look = now + max(_LOOK, _PAUSE * (time.monotonic() - now))
            elif now >= glance:
                quick = socket_memory(self.limits["socket_bytes"])
                if now >= tables:
                    quick += page_tables()
                    tables = now + max(_GLANCE, _PAUSE * (time.monotonic() - now))
                if quick > self.limits["memory"]:
                    return None, "memory"
                glance = now + _GLANCE
            try:
                reply = self.wait(min(look, glance, self.end) - now)
            except (_GoneError, OSError):
                return None, self.stop or "ended"
            if reply is not None:
                return reply, self.stop_reason()

    def interrupt(self, why: str) -> None:
        """Interrupt the worker as by Ctrl-C; it is killed where it goes on. why: a value of `Stop`."""
        self.stop = why
        self.end = time.monotonic() + _GRACE
        os.kill(self.supervisor.pid, signal.SIGINT)

    def stop_reason(self) -> str | None:
        """Why it was stopped, where only the kernel stopped it."""
        return self.stop or ("output" if self.printed() >= self.most else None)

    def printed(self) -> int:
        """The bytes of the larger one of both outputs."""
        return max(os.fstat(fd).st_size for fd in self.supervisor.outputs)

    def wait(self, seconds: float) -> bytes | None:
        """The worker's reply once it is whole, else None. Raises _GoneError, OSError when it never will be."""
        one = self.supervisor
        writing = [one.channel] if self.sending else []
        readable, writable, _ = select.select([one.channel, one.host, one.ended], writing, [], max(0.0, seconds))
        if one.host in readable:
            os._exit(0)  # the host speaks in a call only by leaving
        if writable:
            self.sending = self.sending[os.write(one.channel, self.sending) :]
        if one.channel in readable:
            return self.receive(os.read(one.channel, 1 << 20))
        if one.ended in readable:
            raise _GoneError
        return None

    def receive(self, data: bytes) -> bytes | None:
        """Add bytes of the reply; return its fields once it is whole. Raises _GoneError for what is no reply."""
        self.received += data
        head = 4 + NONCE
        if data and len(self.received) < head:
            return None
        if not data:
            raise _GoneError
        size, nonce = struct.unpack_from(f"<I{NONCE}s", self.received)
        if nonce != self.nonce or size > self.longest or len(self.received) > head + size:
            raise _GoneError
        return bytes(self.received[head:]) if len(self.received) == head + size else None

    def over(self) -> str | None:
        """A limit that leaves nothing but to kill; interrupt where that may do."""
        _reap()
        used, memory, tasks = usage()
        if tasks > self.limits["processes"] + 1:
            return "processes"
        most = self.limits["memory"]
        left = most - kernel_memory(self.limits["socket_bytes"], _DESCRIPTORS, most)
        if left < 0 or (memory > left and proportional_memory() > left):
            return "memory"
        if files() > self.limits["files"]:
            self.supervisor.spoilt = True
            return "files"
        if self.stop is None and used - self.used_before > self.limits["cpu_seconds"]:
            self.interrupt("cpu")
        if self.stop is None and self.printed() >= self.most:
            self.interrupt("output")
        return None


def _reap() -> None:
    """Reap the processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _reap_all() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _output(name: str) -> int:
    """A file without a name, in the small file system for output."""
    path = f"{_OUTPUTS}/{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def _socketpair() -> tuple[int, int]:
    ours, theirs = _socket.socketpair()  # without `socket`, whose import costs more than all else here
    return ours.detach(), theirs.detach()


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main(host: int, limits: dict[str, int]) -> None:
    """Serve as the first process of a sandbox. host: descriptor of its connection."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not hear
    if limits["count_processes"]:
        confine({"NPROC": limits["processes"] + 2})
    confine({"DATA": limits["memory"], "FSIZE": limits["file_size"], "NOFILE": _DESCRIPTORS, "CORE": 0, "MEMLOCK": 0,
             "MSGQUEUE": 0, "STACK": 8 << 20})  # fmt: skip
    supervisor = Supervisor(host, limits)
    _write(host, READY)
    supervisor.serve()
