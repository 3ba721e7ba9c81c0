"""`Session`: Ray on this machine, started and ended with the run, or a connection to an existing cluster."""

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar

from agentrl.cluster.errors import ClusterError, tail
from agentrl.cluster.placement import VISIBLE
from agentrl.containment.process_tree import ProcessTree

MEGABYTE = 1 << 20
OBJECT_STORE_SHARE = 0.3
"""Share of the free space in /dev/shm. Batches and weights pass through, nothing is kept."""
OBJECT_STORE_MAX = 8 << 30
OBJECT_STORE_MIN = 80 * MEGABYTE
"""Ray needs 75 MiB at least."""
CONNECT_SECONDS = 30.0
GRACE_SECONDS = 5.0
"""Time for Ray to end its processes by itself."""
NO_CLIENT_SERVER = "import sys; sys.modules['grpc'] = None"
"""Code that keeps `ray start` from starting Ray's client server. It starts one wherever grpc is installed, which
trackers bring, at port 10001, which would be that of every other run on the machine too."""
RAY = (sys.executable, "-c", f"{NO_CLIENT_SERVER}; from ray.scripts.scripts import main; main()")
"""The command `ray`, of this interpreter's packages."""
_NOT_NEEDED = ("--include-dashboard=false", "--disable-usage-stats", "--no-monitor", "--include-log-monitor=false")
"""Of Ray's own processes: the dashboard, the autoscaler, and the one that would copy the workers' logs to us."""
_BUSY = "timed out during startup"
_MAX_TEMP_LENGTH = 20
"""The paths of Ray's sockets, which are 85 characters longer, may have 107."""


class Session:
    """A connection to Ray, one at a time in a process. Leave it by `close` or as a context.

    address: of an existing cluster: HOST:PORT of its head, or `auto`: that of RAY_ADDRESS, or else of the cluster that
    this machine belongs to. None starts Ray on this machine; it ends with this process however that ends. cpus, gpus:
    the numbers that a Ray started here offers (None: all there are). devices: names of the GPUs that it is shown (None:
    those of this process), as CUDA_VISIBLE_DEVICES has them. object_store: its shared memory in bytes. timeout:
    seconds; a busy machine takes a minute.

    Raises ClusterError if Ray cannot be started or reached.
    """

    _current: ClassVar["Session | None"] = None

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: int | None = None,
        gpus: int | None = None,
        devices: Sequence[str] | None = None,
        object_store: int | None = None,
        timeout: float = 180.0,
    ) -> None:
        self._node: ProcessTree | None = None
        self._connected = False
        self.folder: Path | None = None
        """Ray's files, deleted with it; None if this process did not start Ray."""
        self.address = address or ""
        _be_quiet()
        _check()
        try:
            if address is None:
                _protect()
                command = _arguments(cpus, gpus, object_store or object_store_bytes())
                self.address = self._start(command, devices, timeout)
            else:
                self.address = reach(self.address)
            _connect(self.address, timeout)
            self._connected, Session._current = True, self
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @classmethod
    def current(cls) -> "Session | None":
        """The session of this process, if it has one that runs."""
        return cls._current if cls.reachable() else None

    @classmethod
    def reachable(cls) -> bool:
        """Whether this process is connected to a Ray that runs."""
        import ray

        return ray.is_initialized() and (cls._current is None or cls._current.alive)

    @property
    def alive(self) -> bool:
        """False once a Ray that this process started has ended by itself: calls to it would wait for ever."""
        return self._node is None or self._node.running

    def close(self) -> None:
        """End our workers, and Ray if this process started it. No process, port or file of it is left afterwards."""
        if self._connected:
            import ray

            with _our_signals():
                ray.shutdown()
            self._connected, Session._current = False, None
        self._end()

    def _end(self) -> None:
        if self._node is not None:
            self._node.end()
            self._node = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, arguments: list[str], devices: Sequence[str] | None, timeout: float) -> str:
        """Start Ray's node and return its address. Retry, as Ray allows its node 30 seconds, too few on a busy
        machine."""
        until = time.monotonic() + timeout
        while True:
            try:
                return self._try(arguments, devices, until)
            except ClusterError as error:
                if _BUSY not in str(error) or time.monotonic() > until:
                    raise
                self._end()

    def _try(self, arguments: list[str], devices: Sequence[str] | None, until: float) -> str:
        self.folder = folder = _new_folder()
        output = folder / "start.log"
        with output.open("wb") as file:
            self._node = _launch(folder, arguments, devices, file)
        started = folder / "ray_current_cluster"  # written by `ray start` once it is up
        while not (started.is_file() and (address := started.read_text().strip())):
            if not self.alive:
                raise ClusterError(f"Ray did not start on this machine: {_reason(tail(output))}")
            if time.monotonic() > until:
                raise ClusterError(f"Ray did not start on this machine in time: {_reason(tail(output))}")
            time.sleep(0.05)
        return address


def object_store_bytes() -> int:
    """The size of the object store in this machine's shared memory, in bytes. Raises ClusterError if that is too
    little."""
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared if shared.is_dir() else tempfile.gettempdir()).free
    if free < OBJECT_STORE_MIN:
        raise ClusterError(
            f"Ray needs {OBJECT_STORE_MIN // MEGABYTE} MiB of shared memory and {shared} has {free // MEGABYTE} MiB "
            f"free; free some, or give a container more, as with docker run --shm-size=2g"
        )
    return max(OBJECT_STORE_MIN, min(OBJECT_STORE_MAX, int(free * OBJECT_STORE_SHARE)))


def _be_quiet() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a notice about a change to come
    logging.getLogger("ray").setLevel(logging.ERROR)


def _protect() -> None:
    """Set a token for Ray that only our processes know: it listens on every interface, and whoever reaches it may run
    code. The token stays in the environment, since Ray reads it once a process; a user's own choice is kept."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import ray

    ray._raylet.Config.initialize("")  # type: ignore[attr-defined] # it read its settings when it was imported


def _new_folder() -> Path:
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="agentrl-ray-", dir=parent if len(parent) <= _MAX_TEMP_LENGTH else "/tmp"))


def _arguments(cpus: int | None, gpus: int | None, object_store: int) -> list[str]:
    """What `ray start` is told of this machine's resources."""
    arguments = [f"--object-store-memory={object_store}"]
    arguments += [f"--num-cpus={cpus}"] if cpus is not None else []
    arguments += [f"--num-gpus={gpus}"] if gpus is not None else []
    return arguments


def _launch(folder: Path, arguments: list[str], devices: Sequence[str] | None, output: IO[bytes]) -> ProcessTree:
    command = [*RAY, "start", "--head", "--block", "--port=0"]
    command += [*_NOT_NEEDED, f"--temp-dir={folder}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment.setdefault("RAY_worker_niceness", "0")  # else whatever runs beside them starves the workers
    if devices is not None:
        environment[VISIBLE] = ",".join(devices)
    return ProcessTree(command, output, environment, grace=GRACE_SECONDS, folder=folder)


def _check() -> None:
    """Raise ClusterError if this process cannot have a session at all."""
    try:
        import ray
    except ImportError as error:
        raise ClusterError(f"a cluster needs Ray, which cannot be imported ({error}): pip install ray") from None
    if ray.is_initialized():
        raise ClusterError("this process is connected to Ray already; call ray.shutdown() before a run with workers")


def reach(address: str) -> str:
    """The HOST:PORT that `cluster.address` stands for, once something answers there. Raises ClusterError: Ray
    itself would try for minutes, and print each try."""
    named = _find() if address == "auto" else address
    host, _, port = named.rpartition(":")
    if not host or not port.isdigit() or not set("/@").isdisjoint(host):
        raise ClusterError(f"cluster.address is 'auto' or HOST:PORT of a Ray head, as in 10.0.0.1:6379, not {named!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as found:
            answers = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(found)
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray cluster at {named!r}: {error}; start one with `ray start --head`") from None
    if not answers:
        raise ClusterError(
            f"no Ray cluster at {named!r}: something else answers there; give the port that `ray start` printed, "
            "6379 unless it was told another, and not that of the dashboard"
        )
    return named


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether the peer answers as gRPC servers do: with a frame of settings (RFC 9113, 3.4 and 6.5)."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
    frame = b""
    while len(frame) < 9 and (more := connection.recv(9 - len(frame))):
        frame += more
    return len(frame) == 9 and frame[3] == 4


def _find() -> str:
    """The address that `auto` stands for: RAY_ADDRESS, or the cluster of this machine, by Ray's own rules."""
    if (named := os.environ.get("RAY_ADDRESS", "").strip()) not in ("", "auto"):
        return named
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise ClusterError(
            "cluster.address=auto: no Ray cluster runs on this machine; start one with `ray start --head`, or name one"
        ) from None


def _connect(address: str, timeout: float) -> None:
    """Connect to Ray. Raises ClusterError with Ray's reason."""
    import ray

    ray._private.worker._worker_logs_enabled = False  # else the deaths of workers are printed besides, in long lines
    until = time.monotonic() + timeout
    while True:
        printed: list[bytes] = []
        try:
            with _our_signals(), _captured_stderr(printed):
                ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
            if b"InvalidAuthToken" in b"".join(printed):
                raise ClusterError(
                    f"the Ray cluster at {address!r} does not take our token: set RAY_AUTH_MODE=token and "
                    "RAY_AUTH_TOKEN here to what they were where `ray start` was called"
                ) from None
            if time.monotonic() > until or isinstance(error, ValueError):
                raise ClusterError(f"no Ray cluster at {address!r}: {_reason(str(error).splitlines())}") from None
            time.sleep(0.5)


@contextmanager
def _captured_stderr(printed: list[bytes]) -> Iterator[None]:
    """Append to `printed` what Ray's libraries write to standard error for each try: they do not use logging."""
    with tempfile.TemporaryFile() as file:
        errors = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(errors, 2)
            os.close(errors)
            file.seek(0)
            printed.append(file.read())


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keep the run's signal handlers: Ray installs its own for SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _reason(lines: list[str]) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
