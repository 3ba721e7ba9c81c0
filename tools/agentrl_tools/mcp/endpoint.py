"""Where an MCP server is: a command that is started here, or a URL. It makes transports for the official client."""

import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.errors import UserError
from agentrl.recipe.secrets import masked_text, masked_words

_KEPT_LINES = 6
_KEPT_CHARACTERS = 300  # of a line


class Diary:
    """What a server let us know besides its answers: the last lines of its standard error, its exit, HTTP refusals."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._open = ""
        self.exit_code: int | None = None  # where it ended unasked
        self.ending = self.silent = False  # whether it was asked to end; whether it closed its output before
        self.process_group: int | None = None  # until it was killed

    def write(self, text: str) -> None:
        *lines, self._open = (self._open + text).split("\n")
        self._lines.extend(line.strip()[:_KEPT_CHARACTERS] for line in lines if line.strip())
        self._open = self._open[-_KEPT_CHARACTERS:]

    def told(self) -> str:
        """As the end of a sentence, on one line."""
        ended = "" if self.exit_code is None else f"; it ended with exit code {self.exit_code}"
        lines = [*self._lines, *([self._open.strip()] if self._open.strip() else [])][-_KEPT_LINES:]
        return ended + (f"; its last words: {' | '.join(lines)}" if lines else "")


@dataclass(frozen=True)
class Command:
    """env: besides the few harmless variables that the official client hands on (PATH, HOME, ...)."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None

    def __str__(self) -> str:
        return f"MCP server {Path(self.command).name} {' '.join(masked_words(self.args))}".strip()[:120]

    def check(self) -> None:
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise UserError(f"{self}: its cwd {self.cwd} is not a folder")

    @asynccontextmanager
    async def transport(self, diary: Diary) -> AsyncIterator[Any]:
        from mcp.client.stdio import get_default_environment

        from agentrl_tools.mcp.stdio import serve

        async with serve(self, get_default_environment() | dict(self.env), diary) as streams:
            yield streams


@dataclass(frozen=True)
class Url:
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"MCP server {parts._replace(netloc=parts.netloc.rpartition('@')[2], query='').geturl()}"

    def check(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"tool source 'mcp': url {masked_text(self.url)!r} does not begin with http:// or https://")

    @asynccontextmanager
    async def transport(self, diary: Diary) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def note(response: httpx2.Response) -> None:
            if response.status_code >= 400 and response.request.method == "POST":
                diary.write(f"HTTP {response.status_code} {response.reason_phrase}\n")

        patient = httpx2.Timeout(connect=10.0, write=30.0, read=None, pool=None)  # a call has a deadline of its own
        client = httpx2.AsyncClient(
            headers=dict(self.headers),
            timeout=patient,
            limits=httpx2.Limits(max_connections=None),
            event_hooks={"response": [note]},
        )
        async with client, streamable_http_client(self.url, http_client=client) as streams:
            yield streams


Endpoint = Command | Url


def kill_group(process_group: int) -> None:
    """All that a server started and that did not leave its process group, at once."""
    with suppress(ProcessLookupError, PermissionError):  # gone already, or only zombies are left of it
        os.killpg(process_group, signal.SIGKILL)
