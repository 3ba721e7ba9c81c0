"""`Server`: one SGLang server that this run launched. It ends with `stop`, and with this process however that ends."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from agentrl.engine.sglang.client import Client, ServerError, Sessions
from agentrl.engine.sglang.command import LaunchPlan
from agentrl.errors import UserError
from agentrl.recipe.secrets import masked_words
from agentrl.weights.reach import ANY, LOOPBACK, url_of

END_SECONDS = 60.0
"""For the keeper to end what it keeps; it has limits of its own, and this is more than all of them."""
POLL_SECONDS = 0.5
HEALTH_SECONDS = 25.0
"""The server itself gives its scheduler 20 to answer."""
_KEEPER = Path(__file__).with_name("keeper.py")
_PORT_TAKEN = "address already in use"
_STARTS = 3


class Server:
    """Server `index` of a run. log: its output goes there, appended."""

    def __init__(self, plan: LaunchPlan, index: int, log: Path, sessions: Sessions) -> None:
        self._plan, self._index, self._sessions = plan, index, sessions
        self.log = log
        self._keeper: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._began = 0
        self.url = ""

    @property
    def running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    async def start(self, timeout: float, tell: Callable[[str], None]) -> None:
        """Launch it and wait until it serves. `tell` is given what it does meanwhile, twice a second.

        Raises UserError when it ends instead, or takes more than `timeout` seconds: then nothing of it is left.
        """
        for attempt in range(1, _STARTS + 1):
            self._launch(free_port(self._plan.host))
            try:
                await self._ready(timeout, tell)
                return
            except UserError:
                await self.stop()
                if attempt == _STARTS or _PORT_TAKEN not in self._said().lower():
                    raise
            except BaseException:
                self.kill()
                raise

    def _launch(self, port: int) -> None:
        self.url = url_of(self._plan.host, port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.log.open("ab")
        if self._plan.key is not None:
            self.log.chmod(0o600)  # SGLang writes it down among its arguments
        self._began = self.log.stat().st_size
        command, removal = self._plan.launch(port, self._index)
        self._file.write(f"$ {' '.join(masked_words(command))}\n".encode())
        self._file.flush()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", str(_KEEPER), f"{self._plan.grace:g}", shlex.join(removal), *command],
                stdin=subprocess.PIPE, stdout=self._file, stderr=self._file,
                env=self._plan.environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"engine sglang: {command[0]} cannot be started: {error.strerror}") from error

    async def _ready(self, timeout: float, tell: Callable[[str], None]) -> None:
        client, began = Client(self.url, self._sessions), time.monotonic()
        while True:
            if not self.running:
                raise UserError(f"engine sglang: the server ended as it started: {self.reason()} (log: {self.log})")
            try:
                await client.get("/health", timeout=min(HEALTH_SECONDS, timeout))
                return
            except ServerError:
                pass
            waited = time.monotonic() - began
            if waited > timeout:
                raise UserError(
                    f"engine sglang: the server did not serve within {timeout:g} seconds (engine.args.start_timeout); "
                    f"its last line: {self._last_line()} (log: {self.log})"
                )
            tell(f"{waited:3.0f} s  {self._last_line()}")
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """End the whole process group, and wait until it is gone."""
        keeper = self._keeper
        if keeper is None:
            return
        _close(keeper)
        until = time.monotonic() + END_SECONDS
        while keeper.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            _close(keeper, b"now")
            try:
                keeper.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                _kill_group(keeper.pid)
                keeper.wait()
        if self._file is not None:
            self._file.close()
            self._file = None

    def move_log(self, place: Path) -> None:
        """Let the log be at `place`; what runs goes on writing to it. A link, where that is another file system."""
        try:
            self.log.rename(place)
        except OSError:
            place.symlink_to(self.log.resolve())
        self.log = place

    def reason(self) -> str:
        """The line of its log that says best why it ended."""
        lines = [line.strip() for line in self._said().splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error:" in line]
        return (telling or lines or ["it said nothing"])[-1][:300]

    def _last_line(self) -> str:
        lines = self._said().strip().splitlines()
        return lines[-1].strip()[:100] if lines else ""

    def _said(self) -> str:
        """What this launch wrote, its end."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._began, self.log.stat().st_size - 20_000))
            return file.read().decode(errors="replace").partition("\n")[2]


def _close(keeper: "subprocess.Popen[bytes]", word: bytes = b"") -> None:
    """The keeper ends its group once its standard input closes, or says a word: then without a grace."""
    if keeper.stdin is not None and not keeper.stdin.closed:
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            keeper.stdin.write(word)
            keeper.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.close()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port(host: str = LOOPBACK) -> int:
    """A port of this machine that nobody listens on. Raises UserError where `host` is no address of it."""
    try:
        family = socket.getaddrinfo(None if host in ANY else host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as found:
            found.bind(("" if host in ANY else host, 0))
            return int(found.getsockname()[1])
    except OSError as error:
        raise UserError(f"engine sglang: a server cannot listen on {host}: {error.strerror}") from error
