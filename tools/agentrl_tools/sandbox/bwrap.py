"""The backend `bwrap`: bubblewraps on this machine, started ahead. An interpreter serves one session and no other."""

import asyncio
import functools
import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence

from agentrl.containment.bubblewrap import NEEDS
from agentrl.containment.spawner import READY, Process, Spawner, wait_ready
from agentrl.errors import InfrastructureError, UserError
from agentrl_tools.sandbox.base import Execution, Limits, Sandbox, SandboxSession, Stop
from agentrl_tools.sandbox.system import find_bwrap, sandbox_config

_PNG = b"\x89PNG\r\n\x1a\n"


class BrokenReplyError(Exception):
    """What the supervisor says is no reply."""


def request(code: str, seconds: float) -> bytes:
    """A call, as the supervisor reads it."""
    data = code.encode("utf-8", "surrogatepass")
    return struct.pack("<Id", len(data), seconds) + data


def longest_reply(limits: Limits) -> int:
    """Bytes that no reply exceeds."""
    return 16 * limits.output + 2 * limits.image_bytes + (1 << 20)


def read_reply(data: bytes, limits: Limits, lost_before: bool, seconds: float) -> tuple[Execution, bool]:
    """The execution, and whether the sandbox itself is spoilt. Raises BrokenReplyError."""
    texts: dict[bytes, str] = {}
    images: list[bytes] = []
    cut = False
    for tag, value in _fields(data):
        if tag == b"I":
            images.append(value)
        else:
            text = value.decode("utf-8", "replace")
            cut = cut or tag == b"C"
            texts[tag] = text
    try:
        stop = Stop(texts[b"S"]) if b"S" in texts else None
    except ValueError as error:
        raise BrokenReplyError(str(error)) from None
    shown = tuple(image for image in images if image.startswith(_PNG))
    if sum(map(len, shown)) > limits.image_bytes or len(shown) > limits.images:
        shown, cut = (), True  # it has been tampered with
    execution = Execution(
        stdout=_bounded(texts.get(b"o", ""), limits), stderr=_bounded(texts.get(b"e", ""), limits),
        value=_bounded(texts[b"V"], limits) if b"V" in texts else None,
        error=_bounded(texts[b"E"], limits) if b"E" in texts else None,
        images=shown, stop=stop, lost=b"L" in texts or b"X" in texts, lost_before=lost_before or b"B" in texts,
        cut=cut, seconds=seconds,
    )  # fmt: skip
    return execution, b"X" in texts


def _bounded(text: str, limits: Limits) -> str:
    most = 2 * limits.output  # the sandbox has cut it already, unless it has been tampered with
    return text if len(text) <= most else text[:most]


def _fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        if len(data) < at + 5:
            raise BrokenReplyError("a field without a head")
        tag, size = struct.unpack_from("<cI", data, at)
        if len(data) < at + 5 + size:
            raise BrokenReplyError("a field that is cut off")
        yield tag, data[at + 5 : at + 5 + size]
        at += 5 + size


_READY_SECONDS = 60.0  # for a sandbox to start, on a machine that is busy with hundreds
_WORDS_SECONDS = 1.0  # for it to say why it does not
_LATE_SECONDS = 10.0  # over the time allowed, after which the supervisor is not believed in any more
_ATTEMPTS = 3


class BwrapSandbox(Sandbox):
    """pool: interpreters started ahead. packages: folders of importable packages, shown read-only.

    Raises UserError when bubblewrap is missing or does not work here; it is tried once a process."""

    def __init__(self, limits: Limits, *, pool: int = 4, packages: Sequence[str] = ()) -> None:
        if pool < 0:
            raise UserError(f"sandbox: pool is {pool}; it must be 0 or more")
        self.limits = limits
        self._pool = pool
        bwrap = find_bwrap()
        self._config = sandbox_config(bwrap, limits, packages, ordinary=runs_as_ordinary(bwrap))
        self._spawner: Spawner | None = None
        self._ahead: deque[Process] = deque()

    async def open(self) -> SandboxSession:
        return BwrapSession(self, await self.take())

    async def take(self) -> Process:
        """An interpreter that nobody has used, ready. Raises InfrastructureError when none can be started."""
        said = ""
        for _ in range(_ATTEMPTS):
            process = self._next()
            try:
                async with asyncio.timeout(_READY_SECONDS):
                    said = await _first_words(process)
            except TimeoutError:
                said = f"it did not start within {_READY_SECONDS:g} s"
            except BaseException:
                process.kill()
                raise
            if said == READY.decode():
                return process
            process.kill()
        raise InfrastructureError(f"the sandbox does not start: {' '.join(said.split())[:300] or 'no reason given'}")

    def _next(self) -> Process:
        if self._spawner is None or not self._spawner.alive:
            self._drop()
            self._spawner = Spawner(self._config)
        while len(self._ahead) <= self._pool:
            self._ahead.append(self._spawner.spawn())
        return self._ahead.popleft()

    @property
    def launched(self) -> bool:
        """False when the launcher is gone, and everything with it."""
        return self._spawner is not None and self._spawner.alive

    def _drop(self) -> None:
        for process in self._ahead:
            process.kill()
        self._ahead.clear()
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None

    async def close(self) -> None:
        self._drop()


class BwrapSession(SandboxSession):
    """One interpreter at a time; a new one where the former was lost."""

    def __init__(self, sandbox: BwrapSandbox, process: Process) -> None:
        self._sandbox = sandbox
        self._process: Process | None = process
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, code: str, *, seconds: float | None = None) -> Execution:
        limits = self._sandbox.limits
        allowed = min(limits.wall_seconds, seconds if seconds is not None else limits.wall_seconds)
        async with self._turn:
            lost_before = self._process is None
            if self._closed:
                raise RuntimeError("the sandbox's session is closed")
            if self._process is None:
                self._process = await self._sandbox.take()
            process, began = self._process, time.monotonic()
            try:
                async with asyncio.timeout(allowed + _LATE_SECONDS):
                    data = await _exchange(process, request(code, allowed), longest_reply(limits))
                execution, spoilt = read_reply(data, limits, lost_before, time.monotonic() - began)
            except (OSError, EOFError, TimeoutError, BrokenReplyError):
                self._give_up(process)
                if not self._closed and not self._sandbox.launched:
                    raise InfrastructureError("the sandbox's launcher ended in the middle of a call") from None
                late = time.monotonic() - began
                return Execution(stop=Stop.ENDED, lost=True, lost_before=lost_before, seconds=late)
            except BaseException:
                self._give_up(process)
                raise
            if spoilt:
                self._give_up(process)
            return execution

    def _give_up(self, process: Process) -> None:
        process.kill()
        if self._process is process:
            self._process = None

    async def close(self) -> None:
        self._closed = True
        if self._process is None:
            return
        if self._turn.locked():
            self._process.end()  # the call that runs hears it, and gives up
        else:
            self._give_up(self._process)


async def _first_words(process: Process) -> str:
    loop, heard = asyncio.get_running_loop(), b""
    try:
        while heard != READY and READY.startswith(heard) and (data := await loop.sock_recv(process.socket, 4096)):
            heard += data
        if heard and heard != READY:
            async with asyncio.timeout(_WORDS_SECONDS):
                while len(heard) < 4096 and (data := await loop.sock_recv(process.socket, 4096)):
                    heard += data
    except (OSError, TimeoutError) as error:
        heard += str(error).encode()
    return heard.decode(errors="replace")


async def _exchange(process: Process, message: bytes, longest: int) -> bytes:
    """Send a call and read its reply. Raises EOFError, OSError, BrokenReplyError."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(process.socket, message)
    data = bytearray()
    size: int | None = None
    while size is None or len(data) < size:
        part = await loop.sock_recv(process.socket, 1 << 18)
        if not part:
            raise EOFError
        data += part
        if size is None and len(data) >= 4:
            size = int.from_bytes(data[:4], "little")
            del data[:4]
        if size is not None and max(size, len(data)) > longest:
            raise BrokenReplyError("too long")
    return bytes(data)


@functools.lru_cache
def runs_as_ordinary(bwrap: str) -> bool:
    """Try a sandbox. True: as root, it runs as an ordinary user. Raises UserError with bubblewrap's own words."""
    said = ""
    for ordinary in (True, False) if os.getuid() == 0 else (False,):
        spawner = Spawner(sandbox_config(bwrap, Limits(), (), ordinary=ordinary))
        try:
            process = spawner.spawn()
            said = wait_ready(process, _READY_SECONDS) or ""
            said = said and f"{said} {spawner.last_words()}"
            process.kill()
        except InfrastructureError as error:
            said = str(error)
        finally:
            spawner.close()
        if not said:
            return ordinary
    raise UserError(
        f"sandbox backend 'bwrap': bubblewrap does not work here ({' '.join(said.split())[:300]}); {NEEDS}; or set "
        f"E2B_API_KEY and use the backend 'e2b'"
    )
