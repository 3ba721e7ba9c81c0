"""What the tests of the tool source `mcp` share: the server of the test, and calls of its tools."""

import random
import sys
import time
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
