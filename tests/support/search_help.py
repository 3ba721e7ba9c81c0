"""A Search-R1 style retriever on loopback that answers what a test tells it to, and counts what it is asked."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from serving import serving

from agentrl import Session, Task

PASSAGE = {"id": "7", "contents": '"Paris"\nParis is in France.'}


def good(queries: list[str], topk: int = 3) -> dict[str, Any]:
    return {"result": [[{"document": PASSAGE, "score": 1.5}, _doc(q)][:topk] for q in queries]}


def _doc(query: str) -> dict[str, Any]:
    return {"document": {"contents": f'"About {query}"\nwords on {query}'}, "score": 0.5}


class Server:
    """script(number of the question) -> a status, a body, or an exception to break off with; None: a good answer."""

    def __init__(self) -> None:
        self.script: Callable[[int], Any] = lambda _: None
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[Any] = []
        self.busy = self.most = 0
        self.seconds = 0.0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.monotonic())
        self.headers.append(request.headers)
        body = await request.json()
        self.asked.append(body)
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            await asyncio.sleep(self.seconds)
            said = self.script(len(self.asked))
            if said == "hang":
                await asyncio.sleep(30)
            if said == "drop":
                request.transport.abort()
            if isinstance(said, web.Response):
                return said
            text = said if isinstance(said, str) else json.dumps(said or good(body["queries"], body["topk"]))
            return web.Response(text=text, content_type="application/json")
        finally:
            self.busy -= 1


@asynccontextmanager
async def retriever(port: int = 0) -> AsyncIterator[Server]:
    server = Server()
    async with serving({"POST /retrieve": server.handle}, port) as url:
        server.url = f"{url}/retrieve"
        yield server


def session(seconds: float = 60.0) -> Session:
    return Session("r", Task("t", {}), random.Random(0), time.monotonic() + seconds)
