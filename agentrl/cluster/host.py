"""`Host`: the Ray actor around a worker. It prepares the process before the worker's class is imported, and answers
every call with an `Answer`, so that an error of the worker is distinct from the loss of the worker."""

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
from agentrl.cluster.worker import HEARTBEAT, heartbeat_file
from agentrl.errors import UserError
from agentrl.secrets import masked_text, remember, without_known

_SIOCGIFADDR = 0x8915
STACKS = signal.SIGUSR1
"""The signal that makes a worker write its threads' stacks to its log, also while it hangs in a collective."""


@dataclass(frozen=True)
class ProcessInfo:
    """The process of a worker."""

    pid: int
    """Process ID."""
    node: str
    """Address of its machine."""
    node_id: str
    """Ray's name of its machine."""
    port: int
    """A port that was free a moment ago, for rank 0's rendezvous."""
    cores: int
    """CPU cores that it may use."""
    interface: str
    """Network interface that has `node`; empty: not known."""
    gpus: tuple[str, ...]
    """Names of the GPUs that Ray gave it; none: it asked for none."""
    oom_kills: int
    """Processes that the kernel of its machine had killed for memory, see `oom_kills`."""


@dataclass(frozen=True)
class Failure:
    """An error that a worker raised."""

    kind: Literal["user", "memory", "error"]
    """A UserError, memory that ran out, or anything else."""
    line: str
    """Its message in a line."""
    trace: str
    """Its traceback."""
    error: bytes | None
    """The exception pickled; None if it cannot be."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a call."""

    value: Any = None
    """What the method returned."""
    failure: Failure | None = None
    """What it raised, if anything."""


@dataclass(frozen=True)
class Start:
    """What a process needs before it constructs its worker."""

    environment: dict[str, str]
    """Variables to set."""
    folder: str
    """The controller's working folder, used if the machine has it."""
    path: list[str]
    """The controller's `sys.path`, for classes outside of installed packages."""
    log: str
    """Path of the log, on the worker's machine."""
    worker: bytes
    """Pickled (class, args, kwargs): opened only once the environment stands, since libraries read it on import."""
    secrets: tuple[str, ...]
    """What its log must not hold."""


class Host:
    """The actor of one process. Its methods run one after the other, in the main thread."""

    def __init__(self) -> None:
        self._worker: Any = None

    def describe(self) -> ProcessInfo:
        """Describe this process."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        node = ray.util.get_node_ip_address()
        known = context.get_node_id(), port, _cores(), interface_of(node), gpus
        return ProcessInfo(os.getpid(), node, *known, oom_kills())

    def start(self, start: Start) -> Answer:
        """Construct the worker. The value is the size of its log in bytes before it wrote anything."""
        remember(start.secrets)
        since = _write_to(Path(start.log))
        os.environ.update(start.environment)
        os.environ[HEARTBEAT] = str(heartbeat_file(Path(start.log)).absolute())
        if os.path.isdir(start.folder):
            os.chdir(start.folder)
        sys.path += [place for place in start.path if place not in sys.path]

        def make() -> int:
            worker_class, args, kwargs = pickle.loads(start.worker)
            self._worker = worker_class(*args, **kwargs)
            return since

        return _answer(make)

    def call(self, method: str, arguments: Arguments) -> Answer:
        """Call a method of the worker; the value is its result."""
        args, kwargs = arguments
        return _answer(lambda: getattr(self._worker, method)(*args, **kwargs))

    def close(self) -> Answer:
        """Call the worker's `close`."""

        def end() -> None:
            Path(os.environ[HEARTBEAT]).unlink(missing_ok=True)
            self._worker.close()

        return _answer(end)


def _answer(work: Callable[[], object]) -> Answer:
    try:
        return Answer(work())
    except Exception as error:  # noqa: BLE001 - the boundary: the controller raises it again
        return Answer(failure=_failure(error))


def _failure(error: Exception) -> Failure:
    trace = masked_text("".join(traceback.format_exception(error)))
    print(trace, file=sys.stderr, flush=True)
    kind: Literal["user", "memory", "error"] = "error"
    if isinstance(error, UserError):
        kind = "user"
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error):
        kind = "memory"
    line = (masked_text(str(error)).strip().splitlines() or [""])[0]
    return Failure(kind, line if kind == "user" else f"{type(error).__name__}: {line}", trace, _pickled(error))


def _pickled(error: Exception) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an exception of anybody's may do anything here; its text goes anyway
        return None
    return data


def _write_to(log: Path) -> int:
    """Redirect what this process prints, and the interpreter's report of a crash, to `log`. Returns its size before."""
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


class _LossyFile(io.FileIO):
    """File that drops what a full disk does not take: what a worker prints must not end it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class _Lines(io.TextIOWrapper):
    """Text without secrets."""

    def write(self, text: str, /) -> int:
        super().write(without_known(text))
        return len(text)


def _lines(number: int) -> io.TextIOWrapper:
    raw = _LossyFile(number, "w", closefd=False)
    return _Lines(io.BufferedWriter(raw), errors="replace", line_buffering=True)


def oom_kills() -> int:
    """How many processes the kernel has killed for memory, in this container or else on this machine."""
    for counters in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            counted = dict(line.split() for line in counters.read_text().splitlines())
        except OSError:
            continue
        if "oom_kill" in counted:
            return int(counted["oom_kill"])
    return 0


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an IPv4 address; empty: none, or not known here."""
    if sys.platform != "linux":
        return ""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
