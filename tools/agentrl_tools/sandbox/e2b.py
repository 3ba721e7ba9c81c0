"""The backend `e2b`: a sandbox of the service for each session, through its own SDK; killed when the session closes.

With E2B_DEBUG=true the SDK speaks plain HTTP to localhost:49999, where a server of one's own may answer. Failures of
the service are never the model's: they raise InfrastructureError. Only what the code itself does is told to it.
"""

import asyncio
import base64
import binascii
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from agentrl.errors import UserError
from agentrl.plugins.types import InfrastructureError
from agentrl_tools.sandbox.base import Execution, Limits, Sandbox, SandboxSession, Stop, shortened

if TYPE_CHECKING:
    from e2b_code_interpreter import AsyncSandbox, Context, ExecutionError, OutputMessage, Result

_LIFETIME = 900  # seconds that the service lets a sandbox live when we are gone
_RENEW = 300.0  # seconds after which the lifetime is renewed
_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt; twice as long before each further one
_MARGIN = 10.0  # seconds that the SDK waits longer than we do
_LOUD = 8 << 20  # characters printed in one call that stop it
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

T = TypeVar("T")


class _LoudError(Exception):
    """The code printed far too much."""


class E2bSandbox(Sandbox):
    """Raises UserError when the SDK or its key is missing."""

    def __init__(self, limits: Limits) -> None:
        if not usable():
            raise UserError(
                "sandbox backend 'e2b': set E2B_API_KEY (or E2B_DEBUG=true for a server of your own on port 49999)"
            )
        try:
            import e2b_code_interpreter
        except ImportError as error:
            raise UserError(f"sandbox backend 'e2b': {error}; pip install e2b-code-interpreter") from None
        self._sdk = e2b_code_interpreter.AsyncSandbox
        self.limits = limits
        self._sessions: set[E2bSession] = set()

    async def open(self) -> SandboxSession:
        remote = await _retried("create", lambda: self._sdk.create(timeout=_LIFETIME, allow_internet_access=False))
        try:
            context = await _retried("create a context", lambda: remote.create_code_context(language="python"))
        except BaseException:
            await _killed(remote)
            raise
        session = E2bSession(self, remote, context)
        self._sessions.add(session)
        return session

    def forget(self, session: "E2bSession") -> None:
        """Leave a session that has ended out of `close`."""
        self._sessions.discard(session)

    async def close(self) -> None:
        for session in list(self._sessions):
            await session.close()


class E2bSession(SandboxSession):
    """One sandbox of the service, and in it one context: the interpreter that keeps its state."""

    def __init__(self, sandbox: E2bSandbox, remote: "AsyncSandbox", context: "Context") -> None:
        self._sandbox = sandbox
        self._remote = remote
        self._context = context
        self._turn = asyncio.Lock()
        self._renewed = time.monotonic()
        self._dirty = False
        self._closed = False

    async def run(self, code: str, *, seconds: float | None = None) -> Execution:
        limits = self._sandbox.limits
        allowed = min(limits.wall_seconds, seconds if seconds is not None else limits.wall_seconds)
        async with self._turn:
            if self._closed:
                raise RuntimeError("the sandbox's session is closed")
            lost_before = self._dirty
            await self._prepare()
            began = time.monotonic()
            heard = _Heard()
            stop: Stop | None = None
            self._dirty = True  # until the code has ended
            try:
                async with asyncio.timeout(allowed) as timer:
                    await _translated("run code", self._run(code, heard, allowed))
                if timer.expired():  # the SDK's HTTP client loses a cancellation now and then
                    raise TimeoutError
                self._dirty = False
            except TimeoutError:
                stop = Stop.WALL
            except _LoudError:
                stop = Stop.OUTPUT
            if stop is not None:
                await self._prepare()
            return heard.execution(limits, stop, lost_before, time.monotonic() - began)

    async def _run(self, code: str, heard: "_Heard", allowed: float) -> None:
        await self._remote.run_code(
            code, context=self._context, timeout=allowed + _MARGIN, on_stdout=heard.out, on_stderr=heard.err,
            on_result=heard.results.append, on_error=heard.errors.append,
        )  # fmt: skip

    async def _prepare(self) -> None:
        """Start an interpreter that is idle, in a sandbox that lives on."""
        if time.monotonic() - self._renewed > _RENEW:
            await _retried("extend", lambda: self._remote.set_timeout(_LIFETIME))
            self._renewed = time.monotonic()
        if self._dirty:
            await _retried("restart", lambda: self._remote.restart_code_context(self._context))
            self._dirty = False

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sandbox.forget(self)
            await _retried("kill", self._remote.kill)


class _Heard:
    """What came over the stream so far; it stays when the stream is cut."""

    def __init__(self) -> None:
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self.results: list[Result] = []
        self.errors: list[ExecutionError] = []
        self._length = 0

    def out(self, message: "OutputMessage") -> None:
        self._add(self.stdout, message.line)

    def err(self, message: "OutputMessage") -> None:
        self._add(self.stderr, message.line)

    def _add(self, lines: list[str], line: str) -> None:
        lines.append(line)
        self._length += len(line)
        if self._length > _LOUD:
            raise _LoudError

    def execution(self, limits: Limits, stop: Stop | None, lost_before: bool, seconds: float) -> Execution:
        written = [result for result in self.results if not _picture(result)]
        shown = [result.text for result in written if not result.is_main_result and result.text]
        value = next((result.text for result in written if result.is_main_result), None)
        stdout = "".join(self.stdout) + "".join(f"{text}\n" for text in shown)
        error = _COLOURS.sub("", self.errors[0].traceback).strip() if self.errors else None
        texts = [stdout, "".join(self.stderr), value, error]
        kept = [None if text is None else shortened(text, limits.output) for text in texts]
        images = [_decoded(picture) for result in self.results if (picture := _picture(result))]
        few = images[: limits.images]
        too_large = sum(map(len, few)) > limits.image_bytes
        return Execution(
            stdout=kept[0] or "", stderr=kept[1] or "", value=kept[2], error=kept[3],
            images=() if too_large else tuple(few), stop=stop, lost=stop is not None, lost_before=lost_before,
            cut=too_large or few != images or kept != texts, seconds=seconds,
        )  # fmt: skip


def usable() -> bool:
    """Whether environment variables say how to reach the service."""
    return bool(os.environ.get("E2B_API_KEY")) or os.environ.get("E2B_DEBUG", "").lower() == "true"


def _picture(result: "Result") -> str | None:
    """The image of a result, in base64."""
    found: str | None = result.png or result.jpeg
    return found


def _decoded(picture: str) -> bytes:
    """The bytes of an image; of what is not base64 its text, which whoever is to show it refuses."""
    try:
        return base64.b64decode(picture, validate=False)
    except binascii.Error:
        return picture.encode()


async def _translated(what: str, work: Awaitable[T]) -> T:
    """Await `work`, with whatever the SDK or its transport raises as InfrastructureError."""
    try:
        return await work
    except (_LoudError, asyncio.CancelledError):
        raise
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InfrastructureError(f"the sandbox service e2b failed to {what}: {line}") from error


async def _retried(what: str, work: Callable[[], Awaitable[T]]) -> T:
    """Await `work` that may be repeated, so often, with longer and longer pauses."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return await _translated(what, work())
        except InfrastructureError:
            await asyncio.sleep(_PAUSE * 2**attempt)
    return await _translated(what, work())


async def _killed(remote: "AsyncSandbox") -> None:
    try:
        await _retried("kill", remote.kill)
    except InfrastructureError:
        return  # the failure that led here is the one to tell; the service ends the sandbox in time
