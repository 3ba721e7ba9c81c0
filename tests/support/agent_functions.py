"""Agents that processes of their own import by name."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

from agentrl.plugins.agent import Agent, AgentClient, Outcome
from agentrl.plugins.types import Task


def ask(client: AgentClient, text: str = "go") -> str:
    """What the model answers."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {client.api_key}"}
    with urlopen(Request(f"{client.base_url}/chat/completions", body, headers)) as answered:
        return json.load(answered)["choices"][0]["message"]["content"]


async def act(task: Task, client: AgentClient, more: str = "") -> object:
    """Ask the model and the tool `echo`, then do what the task says."""
    said = await asyncio.to_thread(ask, client)
    heard = await client.call_tool("echo", {"text": said + more})
    match task.data.get("then"):
        case "raise":
            raise ValueError("bad luck")
        case "exit":
            sys.exit("enough")
        case "cancel":
            raise asyncio.CancelledError
        case "lambda":
            return lambda: None
        case "die":
            os._exit(7)
        case "wait":
            await asyncio.sleep(60)
        case "hold":
            while True:
                time.sleep(0.01)
        case "late":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "at last"
    return {"pid": os.getpid(), "heard": heard}


class Holds(Agent):
    """Keeps what it returned until it is released."""

    name = "holds"

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    async def solve(self, task: Task, client: AgentClient) -> str:
        said = await asyncio.to_thread(ask, client)
        self.mark.write_text(f"{os.getpid()} {said}")
        return said

    async def release(self, outcome: Outcome) -> None:
        self.mark.write_text(f"{self.mark.read_text()} {os.getpid()} {outcome.returned}")
        raise OSError("it is stuck")


def hang(task: Task, client: AgentClient) -> None:
    """Ask the model once, in a thread that never ends."""
    ask(client, str(os.getpid()))
    while True:
        time.sleep(0.01)
