"""`Server`: one server that this run launched. It ends with `stop`, and with this process however that ends."""

import asyncio
import contextlib
import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from agentrl.addresses import ANY, LOOPBACK, url_of
from agentrl.cluster.placement import names_of
from agentrl.containment.process_tree import END_SECONDS, ProcessTree
from agentrl.containment.threads import in_thread
from agentrl.engine.servers.client import Client, ServerError, Sessions
from agentrl.engine.servers.launch import LaunchPlan
from agentrl.errors import UserError
from agentrl.models.download import download
from agentrl.recipe.secrets import masked_words
from agentrl.weights.request import ServerRank

POLL_SECONDS = 0.5
HEALTH_SECONDS = 25.0
"""More than the 20 seconds that the server itself gives its scheduler to answer."""
LOG_BYTES, LOG_END_BYTES = 64 << 20, 16 << 20
"""Length from which on a log is shortened, and how much of its end is kept then."""
LOWEST_PORT, USUAL_EPHEMERAL, PORT_TRIES = 22_000, 32_768, 64
"""Ports of servers: from this one on, below that one where the system does not tell, tries at a free one."""
_PORT_TAKEN = "address already in use"
_STARTS = 3


class LaunchedServer(Protocol):
    """A server that the run launched, here (`Server`) or on another machine (`remote.RemoteServer`)."""

    log: Path
    """File with its output, on its machine."""
    url: str
    """Its address; empty before it was started."""
    places: tuple[ServerRank, ...]
    """Where each of its ranks is; empty: not known."""

    @property
    def running(self) -> bool:
        """Whether its process runs."""

    async def start(self, timeout: float, phase: Callable[[str], None]) -> None:
        """Launch it and wait until it serves; see `Server.start`."""

    async def stop(self) -> None:
        """End the whole process tree, and wait until it is gone."""

    def kill(self) -> None:
        """End it at once."""

    def move_log(self, path: Path) -> None:
        """Move the log to `path`, if its machine has that folder."""

    def shorten_log(self) -> None:
        """Keep the log from growing without bound; called about once a second."""

    def reason(self) -> str:
        """Say in a line why it ended."""


_PYDANTIC = re.compile(r"(\d+ validation errors? for \w+)\n\s*")
"""The head of an error of pydantic, whose next line says what is wrong."""


class Server(LaunchedServer):
    """Server `index` of a run, on this machine. log: file that its output is appended to."""

    def __init__(self, plan: LaunchPlan, index: int, log: Path, sessions: Sessions) -> None:
        self._plan, self._index, self._sessions = plan, index, sessions
        self.log = log
        self._name = f"engine {plan.program.name}"
        self._tree: ProcessTree | None = None
        self._file: IO[bytes] | None = None
        self._log_start = 0
        self.url = ""
        devices = plan.devices[index] if index < len(plan.devices) else ()
        self.places = tuple(ServerRank("", name) for name in names_of(devices))

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._tree is not None and self._tree.running

    async def start(self, timeout: float, phase: Callable[[str], None]) -> None:
        """Launch it and wait until it serves; one that answers nothing (`LaunchPlan.answers`) is launched only. phase:
        called with what it does, twice a second.

        What this machine lacks of the model is fetched first, which does not count. Raises UserError when it ends
        instead, or takes more than `timeout` seconds: then nothing of it is left.
        """
        if (name := self._plan.hub_model) is not None:
            await in_thread(download, name, phase)
        for attempt in range(1, _STARTS + 1):
            self._launch(free_port(self._plan.host))
            if not self._plan.answers:
                return
            try:
                await self._ready(timeout, phase)
                return
            except UserError:
                await self.stop()
                if attempt == _STARTS or _PORT_TAKEN not in self._output().lower():
                    raise
            except BaseException:
                self.kill()
                raise

    def _launch(self, port: int) -> None:
        self.url = url_of(self._plan.host, port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.log.open("ab")
        if self._plan.key is not None:
            self.log.chmod(0o600)  # it is written down among its arguments
        self._log_start = self.log.stat().st_size
        command, removal = self._plan.launch(port, self._index)
        self._file.write(f"$ {' '.join(masked_words(command))}\n".encode())
        self._file.flush()
        try:
            self._tree = ProcessTree(
                command, self._file, self._plan.environment(self._index), grace=self._plan.grace, removal=removal
            )
        except OSError as error:
            raise UserError(f"{self._name}: {command[0]} cannot be started: {error.strerror}") from error

    async def _ready(self, timeout: float, phase: Callable[[str], None]) -> None:
        client, start = Client(self.url, self._sessions), time.monotonic()
        while True:
            if not self.running:
                raise UserError(f"{self._name}: the server ended as it started: {self.reason()} (log: {self.log})")
            try:
                await client.get("/health", timeout=min(HEALTH_SECONDS, timeout))
                return
            except ServerError:
                pass
            waited = time.monotonic() - start
            if waited > timeout:
                raise UserError(
                    f"{self._name}: the server did not serve within {timeout:g} seconds (engine.args.start_timeout); "
                    f"its last line: {self._last_line()} (log: {self.log})"
                )
            phase(f"{waited:3.0f} s  {self._last_line()}")
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """End the whole process tree, and wait until it is gone."""
        tree = self._tree
        if tree is None:
            return
        tree.ask_to_end()
        until = time.monotonic() + END_SECONDS
        while not tree.gone and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.end(at_once=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def move_log(self, path: Path) -> None:
        """Move the log to `path`; what runs goes on writing to it. A link, where that is another file system."""
        try:
            self.log.rename(path)
        except OSError:
            path.symlink_to(self.log.resolve())
        self.log = path

    def shorten_log(self) -> None:
        """Keep the command and the end of a log of over `LOG_BYTES`: a server writes lines as long as it runs. What it
        writes at that moment may be lost."""
        try:
            size = self.log.stat().st_size
            if size <= LOG_BYTES:
                return
            with self.log.open("r+b") as file:  # the server's own descriptor appends, so it goes on at the new end
                command = file.readline(LOG_END_BYTES)
                file.seek(size - LOG_END_BYTES)
                end = file.read().partition(b"\n")[2]
                file.truncate(0)
                file.seek(0)
                file.write(command + b"[%d bytes left out]\n" % (size - len(command) - len(end)) + end)
        except OSError:  # a log is not worth a run; a full disk is told by what needs it
            return
        self._log_start = 0

    def reason(self) -> str:
        """The line of its log that says best why it ended."""
        output = _PYDANTIC.sub(r"\1: ", self._output())
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if ("Error" in line or "error:" in line) and "WARNING" not in line]
        causes = [line for line in errors if "See root cause above" not in line]  # vLLM ends on a line that has none
        return (causes or errors or lines or ["it wrote nothing"])[-1][:300]

    def _last_line(self) -> str:
        lines = self._output().strip().splitlines()
        return lines[-1].strip()[:100] if lines else ""

    def _output(self) -> str:
        """The end of what this launch wrote."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - 20_000))
            return file.read().decode(errors="replace").partition("\n")[2]


def free_port(host: str = LOOPBACK) -> int:
    """A free port of this machine, below those that the system hands out by itself: the server binds it a minute
    later. Raises UserError where `host` is not an address of it."""
    address = "" if host in ANY else host
    try:
        family = socket.getaddrinfo(None if host in ANY else host, 0, type=socket.SOCK_STREAM)[0][0]
        for port in random.sample(range(LOWEST_PORT, _ephemeral_ports()), PORT_TRIES):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, port))
                return port
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UserError(f"engine: a server cannot listen on {host}: {error.strerror}") from error


def _ephemeral_ports() -> int:
    """The lowest port that the system gives a socket that asks for none."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        lowest = USUAL_EPHEMERAL
    return lowest if lowest >= LOWEST_PORT + PORT_TRIES else USUAL_EPHEMERAL
