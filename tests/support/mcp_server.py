"""An MCP server for tests, run as a process of its own: `mcp_server.py stdio` or `mcp_server.py http PORT`."""

import asyncio
import os
import subprocess
import sys
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
server = MCPServer("tester")
count = 0


class City(BaseModel):
    name: str


class Place(BaseModel):
    name: str
    inside: City | None = None


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def pid() -> str:
    """The process of the server."""
    return str(os.getpid())


@server.tool()
def bump() -> str:
    """Counts how often it was called in this process."""
    global count
    count += 1
    return str(count)


@server.tool()
async def slow(seconds: float) -> str:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return "at last"


@server.tool()
def fail(text: str) -> str:
    """Raises."""
    raise ToolError(text)


@server.tool()
def die() -> str:
    """Ends the server at once."""
    print("dying as told", file=sys.stderr, flush=True)
    os._exit(7)


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """A pixel and a word."""
    return ["a pixel:", Image(data=PIXEL, format="png")]


@server.tool()
def facts() -> dict[str, int]:
    """Structured content."""
    return {"towns": 3}


@server.tool()
def travel(
    where: Place,
    how: Literal["by train", "by car"] | None = None,
    days: Annotated[int, Field(ge=1, le=9)] | str = 1,
) -> str:
    """A schema with $ref, anyOf and enum."""
    return f"{where.name} {where.inside.name if where.inside else '-'} {how} {days}"


@server.tool(name="odd.name/x")
def odd() -> str:
    """A name that no model may call."""
    return "odd"


@server.tool()
def spawn() -> str:
    """Starts a process that holds the server's pipes, and says its number."""
    return str(subprocess.Popen(["sleep", "300"]).pid)


@server.tool()
async def calculator(expression: str) -> str:
    """Works out an expression, and ends the server at every FATAL-th call."""
    global count
    count += 1
    if count == int(os.environ.get("FATAL", "0")):
        with open(os.environ["DEATHS"], "a") as file:
            file.write("x")
        os._exit(9)
    from agentrl_tools.calculator import CalculatorError, evaluate, written

    try:
        return written(evaluate(expression)[0])
    except CalculatorError as error:
        raise ToolError(str(error)) from error


@server.tool()
async def note(ctx: Context) -> str:
    """Something that the server says by itself, and junk on its output."""
    print("this is no JSON-RPC", flush=True)
    return "noted"


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "stdio":
        server.run()
    elif kind == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
