"""A model behind an endpoint that speaks the chat completions API, on loopback: what it says is given."""

import asyncio
import threading
from contextlib import contextmanager
from queue import Queue

from aiohttp import web
from serving import serving


def completion(content=None, calls=(), finish="stop", tokens=7):
    tool_calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": tool_calls} if calls else {})}
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


class Endpoint:
    """`answer(body)` gives a completion, an HTTP status, or a coroutine of either."""

    def __init__(self, answer, models=("good-model",)):
        self.answer, self.models, self.bodies, self.keys = answer, models, [], set()

    async def __aenter__(self):
        completions, model = "POST /v1/chat/completions", "GET /v1/models/{name}"
        routes = {completions: self.complete, model: self.model, "GET /v1/models": self.listing}
        self.serving = serving(routes, access_log=None)
        self.url = f"{await self.serving.__aenter__()}/v1"
        return self

    async def __aexit__(self, *_):
        await self.serving.__aexit__(None, None, None)

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers["Authorization"])
        answer = self.answer(body)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "not now"}}, status=answer, headers={"retry-after": "0"})
        return web.json_response(answer) if isinstance(answer, dict) else web.Response(text=answer)

    async def model(self, request):
        name = request.match_info["name"]
        if name == "forbidden":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        if name in self.models:
            return web.json_response({"id": name, "object": "model", "created": 0, "owned_by": "us"})
        return web.json_response({"error": {"message": "unknown"}}, status=404)

    async def listing(self, request):
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in self.models]
        return web.json_response({"object": "list", "data": data})


@contextmanager
def served(answer):
    """The URL of an endpoint that a thread serves."""
    stop, ready = threading.Event(), Queue()

    async def serve():
        async with Endpoint(answer) as endpoint:
            ready.put(endpoint.url)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield ready.get(timeout=30)
    finally:
        stop.set()
        thread.join()
