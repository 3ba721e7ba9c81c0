"""What the tests of all providers of workspaces share: how each is made, and what it is asked to do."""

import asyncio
import http.server
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.plugins.registry import make_workspace_provider
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.workspace.provider import WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import Terminal, Workspace

CALLS: dict[str, Callable[[Workspace], Awaitable[object]]] = {
    "exec": lambda w: w.exec("echo x"), "terminal": lambda w: w.terminal(), "read": lambda w: w.read("/etc/passwd"),
    "write": lambda w: w.write("x", b"x"), "listing": lambda w: w.listing("/"), "pack": lambda w: w.pack(["/etc"]),
    "unpack": lambda w: w.upload(Path(__file__), "given"), "snapshot": lambda w: w.snapshot(),
    "diff": lambda w: w.diff(), "fresh": lambda w: w.fresh(), "end_processes": lambda w: w.end_processes(),
}  # fmt: skip
"""Every call of a workspace, by its name."""
FETCH = """if command -v python3 >/dev/null
then python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())' "$0"
else wget -qO- "$0"; fi"""
"""A script for `sh -c` that fetches its first word, in what images have."""


@dataclass(frozen=True)
class Offer:
    """A provider, and what it opens in these tests."""

    provider: str
    args: dict[str, Any] = field(default_factory=dict)
    spec: WorkspaceSpec = field(default_factory=WorkspaceSpec)

    def make(self) -> WorkspaceProvider:
        """The provider, not started."""
        return make_workspace_provider(WorkspaceSection(provider=self.provider, args=self.args))


class _Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.headers["Host"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def hello_server() -> Iterator[int]:
    """The port of 127.0.0.2 at which a server says how it was called."""
    with http.server.ThreadingHTTPServer(("127.0.0.2", 0), _Hello) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made.server_address[1]
        made.shutdown()


async def said(terminal: Terminal, pattern: str, seconds: float = 20.0) -> str:
    """What a terminal says until a pattern stands in it."""
    heard, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        part = await terminal.read(0.5)
        if part is None:
            break
        heard += part
        if re.search(pattern, heard.decode(errors="replace")):
            return heard.decode(errors="replace")
    raise AssertionError(f"{pattern!r} was not said: {heard.decode(errors='replace')!r}")


async def eventually(check: Any, seconds: float = 15.0) -> None:
    """Wait until an asynchronous check is true."""
    end = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < end, "it did not become true"
        await asyncio.sleep(0.1)
