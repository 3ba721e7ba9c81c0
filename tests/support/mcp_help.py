"""What the tests of the tool source `mcp` share: the server of the test, and a look at what runs."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paths import SUPPORT

from agentrl import Session, Task, Tool

SERVER = str(SUPPORT / "mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}


def session(name: str = "r") -> Session:
    return Session(name, Task("t", {}), random.Random(0), time.monotonic() + 60)


def offers(*names: str) -> list[Any]:
    from mcp_types import Tool as Offer

    return [Offer(name=name, input_schema={"type": "object"}) for name in names]


async def ask(tool: Tool, **arguments):
    return await tool.execute(session(), **tool.check(arguments))


def gone(pid: int) -> bool:
    """Whether a process is no more; a zombie that nobody reaps is no more either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(500):
        if reached():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to that")


def children() -> list[int]:
    """Processes that test servers are or started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and not gone(int(entry.name)):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if SERVER.encode() in words and parent == os.getpid():
                found.append(int(entry.name))
    return found
