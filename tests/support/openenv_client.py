"""OpenEnv's own clients against a server, in an interpreter that has them: `python openenv_client.py URL`.

Plays the text game by its hints, and prints what it saw as JSON.
"""

import asyncio
import json
import sys
from typing import Any

from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


def way(text: str, before: str) -> str:
    """A way towards the target that is open, else any that is open, not back where it can be helped."""
    target, _, ways = text.rpartition("Open: ")
    open_ways = ways.rstrip(".").split(", ")
    wanted = [name for name in open_ways if name in target.rpartition(":")[2] and name != OPPOSITE.get(before)]
    others = [name for name in open_ways if name != OPPOSITE.get(before)] or open_ways
    return (wanted or others)[0]


async def played(url: str) -> dict[str, Any]:
    """One game by the generic client."""
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(seed=3)
        tools = (await env.step({"type": "list_tools"})).observation["tools"]
        rewards, result, move = [first.reward], first, ""
        while not result.done:
            move = way(result.observation["text"], move)
            result = await env.step({"type": "call_tool", "tool_name": "move", "arguments": {"to": move}})
            rewards.append(result.reward)
        state = await env.state()
        try:
            await env.step({"type": "call_tool", "tool_name": "move", "arguments": {"to": "north"}})
            after = ""
        except RuntimeError as error:
            after = str(error)
        again = await env.reset(seed=3)
    return {
        "first": first.observation["text"],
        "again": again.observation["text"],
        "tools": tools,
        "last": result.observation["text"],
        "rewards": rewards,
        "state": state,
        "after": after,
    }


async def called(url: str) -> dict[str, Any]:
    """The MCP client: a session made over HTTP, to which its WebSocket belongs."""
    async with MCPToolClient(base_url=url) as env:
        tools = [tool.name for tool in await env.list_tools()]
        opening = await env.reset(split="test", index=2)
        text = await env.call_tool("move", to="north")
        step = await env.step(CallToolAction(tool_name="move", arguments={"to": "south"}))
    return {
        "tools": tools,
        "opening": opening.observation.text,
        "text": text,
        "result": step.observation.result,
        "reward": step.reward,
    }


def main() -> None:
    url = sys.argv[1]
    print(json.dumps({"played": asyncio.run(played(url)), "called": asyncio.run(called(url))}))


if __name__ == "__main__":
    main()
