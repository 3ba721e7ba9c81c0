"""`Host`: the Ray actor around a worker. It makes the process ready before the worker's class is even imported, and
answers every call with an `Answer`, so that what a worker raises is told from a worker that is gone."""

import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.cluster.dispatch import Arguments
from agentrl.errors import UserError

STACKS = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to its log, also from within a collective that hangs."""


@dataclass(frozen=True)
class Hello:
    """Who a worker is, for people and for signals."""

    pid: int
    node: str
    """Its address."""
    node_id: str
    port: int
    """Free a moment ago, for rank 0's rendezvous."""
    cores: int
    oom_kills: int
    """Of its machine so far, see `oom_kills`."""


@dataclass(frozen=True)
class Failure:
    """What a worker raised."""

    kind: Literal["user", "memory", "error"]
    line: str
    trace: str
    error: bytes | None
    """Pickled, where it can be."""


@dataclass(frozen=True)
class Answer:
    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Start:
    """What a process needs before it makes its worker."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    """Where the controller finds modules, for classes that are no part of an installed package."""
    log: str
    worker: bytes
    """Pickled (class, args, kwargs): opened only once the environment stands, since libraries read it on import."""


class Host:
    """One a process. Its methods run one after the other, in the main thread."""

    def __init__(self) -> None:
        self._worker: Any = None

    def hello(self) -> Hello:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = ray.get_runtime_context()
        return Hello(os.getpid(), ray.util.get_node_ip_address(), context.get_node_id(), port, _cores(), oom_kills())

    def start(self, start: Start) -> Answer:
        """Make the worker. The value is the byte of its log from which on the log is its own."""
        since = _write_to(Path(start.log))
        os.environ.update(start.environment)
        if os.path.isdir(start.folder):
            os.chdir(start.folder)
        sys.path += [place for place in start.path if place not in sys.path]

        def make() -> int:
            worker_class, args, kwargs = pickle.loads(start.worker)
            self._worker = worker_class(*args, **kwargs)
            return since

        return _answer(make)

    def call(self, method: str, arguments: Arguments) -> Answer:
        args, kwargs = arguments
        return _answer(lambda: getattr(self._worker, method)(*args, **kwargs))

    def close(self) -> Answer:
        return _answer(lambda: self._worker.close())


def _answer(work: Callable[[], Any]) -> Answer:
    try:
        return Answer(work())
    except Exception as error:  # noqa: BLE001 - the boundary: the controller raises it again
        return Answer(failure=_failure(error))


def _failure(error: Exception) -> Failure:
    trace = "".join(traceback.format_exception(error))
    print(trace, file=sys.stderr, flush=True)
    kind: Literal["user", "memory", "error"] = "error"
    if isinstance(error, UserError):
        kind = "user"
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        kind = "memory"
    line = (str(error).strip().splitlines() or [""])[0]
    return Failure(kind, line if kind == "user" else f"{type(error).__name__}: {line}", trace, _pickled(error))


def _pickled(error: Exception) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an exception of anybody's may do anything here; its text goes anyway
        return None
    return data


def _write_to(log: Path) -> int:
    """Send what this process prints to `log`, and what the interpreter says as it crashes. Returns its size before."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    since = os.fstat(file).st_size
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = _lines(1), _lines(2)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)
    return since


class _Patient(io.FileIO):
    """Drops what a full disk does not take: what a worker prints must not end it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lines(number: int) -> io.TextIOWrapper:
    raw = _Patient(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="replace", line_buffering=True)


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, in this container, or else on this machine."""
    for counters in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            said = dict(line.split() for line in counters.read_text().splitlines())
        except OSError:
            continue
        if "oom_kill" in said:
            return int(said["oom_kill"])
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
