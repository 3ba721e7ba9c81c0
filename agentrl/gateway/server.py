"""`Gateway`: the HTTP endpoint through which agents sample from the model that is trained.

It speaks Chat Completions, Responses and Anthropic Messages. One key belongs to one endpoint (a rollout): whoever sends
another is told 401. What cannot be served is answered in the dialect's own form, never ignored.
"""

import asyncio
import json
import logging
import secrets
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from aiohttp import web

from agentrl.errors import UserError, contained, describe
from agentrl.gateway import mcp
from agentrl.gateway.anthropic_messages import AnthropicMessages
from agentrl.gateway.call import Completion, Endpoint, Feed, GatewayError, Origin
from agentrl.gateway.chat_completions import ChatCompletions, encode
from agentrl.gateway.history import History, json_object
from agentrl.gateway.responses import Responses
from agentrl.gateway.stream import Writer
from agentrl.images import in_image_thread
from agentrl.plugins.types import Json

BODY_BYTES = 32 << 20
"""Largest request that is read."""
KEEP_ALIVE_SECONDS = 10.0
"""A stream that has nothing to say sends a comment this often."""
TOGETHER_SECONDS = 0.02
"""What comes within this time is sent together: a stream costs the same however fast tokens are sampled."""

T = TypeVar("T")
Dialect = ChatCompletions | Responses | AnthropicMessages
_log = logging.getLogger("agentrl.gateway")


class Gateway:
    """One HTTP server for all rollouts of a run, in the run's event loop.

    host: address to listen on. port: 0 for any free one. model: the name that the list of models gives. socket: whether
    it listens on a Unix socket, too, for agents in a sandbox.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, model: str = "agentrl", socket: bool = False) -> None:
        self._host, self._port, self._model = host, port, model
        self._endpoints: dict[str, Endpoint] = {}
        self._calls: dict[str, set[asyncio.Task[Any]]] = {}
        self._histories: dict[str, History] = {}
        self._runner: web.AppRunner | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-gateway-") if socket else None

    async def start(self) -> None:
        """Listen. Raises UserError where the address cannot be used."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/mcp", self._mcp)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(f"the gateway cannot listen on {self._host}:{self._port}: {error.strerror}") from None
        self._port = self._runner.addresses[0][1]
        if self.socket is not None:
            await web.UnixSite(self._runner, self.socket, backlog=1024).start()

    @property
    def model(self) -> str:
        """The name that the list of models gives."""
        return self._model

    @property
    def socket(self) -> str | None:
        """The path of its Unix socket, if it has one."""
        return f"{self._folder.name}/gateway.sock" if self._folder is not None else None

    @property
    def url(self) -> str:
        """The address of the server, without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @contextmanager
    def serving(self, endpoint: Endpoint, key: str | None = None) -> Iterator[str]:
        """Give `endpoint` a key for the time of this context. At its end calls of the key that still run are cancelled.

        key: None makes one; with the empty one the endpoint serves whoever sends a key of nobody's."""
        key = f"agentrl-{secrets.token_urlsafe(24)}" if key is None else key
        self._endpoints[key], self._calls[key], self._histories[key] = endpoint, set(), History(endpoint.images)
        try:
            yield key
        finally:
            del self._endpoints[key], self._histories[key]
            for task in self._calls.pop(key):
                task.cancel()

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._folder is not None:
            self._folder.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        dialect = ChatCompletions()
        return await _told(dialect, self._complete(request, lambda endpoint: dialect))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        work = self._complete(request, lambda endpoint: Responses(endpoint.previous))
        return await _told(ChatCompletions(), work)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        dialect = AnthropicMessages()
        return await _told(dialect, self._complete(request, lambda endpoint: dialect))

    async def _complete(self, request: web.Request, dialect_of: Callable[[Endpoint], Dialect]) -> web.StreamResponse:
        key, endpoint = self._of(request)
        dialect, body = dialect_of(endpoint), await _body(request)
        history = self._histories[key]
        if history.images:
            call = await in_image_thread(history.parse, body, dialect)
            self._of(request)  # the rollout may be over meanwhile
        else:
            call = history.parse(body, dialect)
        if call.stream:
            feed = Feed()
            task = self._task(key, endpoint.complete(call, _origin(body, request), feed))
            return await _stream(request, dialect, dialect.writer(call), task, feed, endpoint)
        task = self._task(key, endpoint.complete(call, _origin(body, request)))
        found = await asyncio.shield(task)
        if request.transport is None or request.transport.is_closing():
            endpoint.lost(found)
        return _json(dialect.render(found, call))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        dialect = AnthropicMessages()

        async def work() -> web.Response:
            key, endpoint = self._of(request)
            body = json_object(await _body(request))
            given = dialect.parse({"max_tokens": 1, **body})
            history = self._histories[key]
            call = await in_image_thread(history.taken, given) if history.images else history.taken(given)
            return _json({"input_tokens": endpoint.count(call)})

        return await _told(dialect, work())

    async def _models(self, request: web.Request) -> web.StreamResponse:
        async def work() -> web.Response:
            self._of(request)
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "agentrl", "type": "model"}
            return _json({"object": "list", "data": [model], "has_more": False})

        return await _told(ChatCompletions(), work())

    async def _mcp(self, request: web.Request) -> web.StreamResponse:
        async def work() -> web.Response:
            key, endpoint = self._of(request)
            given = json_object(await _body(request))
            found = await asyncio.shield(self._task(key, mcp.answer(endpoint, given)))
            return web.Response(status=202) if found is None else _json(found)

        return await _told(ChatCompletions(), work())

    def _task(self, key: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run the work of a call in a task of its own, which ends with the key at the latest."""
        task = asyncio.ensure_future(work)
        self._calls[key].add(task)
        task.add_done_callback(lambda done: self._calls.get(key, set()).discard(done))
        return task

    def _of(self, request: web.Request) -> tuple[str, Endpoint]:
        """Return the key of a request and whose it is. Raises GatewayError (401)."""
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = given if given in self._endpoints else ""
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            raise GatewayError("the API key is unknown, or its rollout is over", 401, "invalid_api_key")
        return key, endpoint


async def _told(dialect: Dialect, work: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """Return the answer; whatever goes wrong is an error of the dialect."""
    try:
        return await work
    except GatewayError as error:
        return _json(dialect.error(error), error.status)
    except asyncio.CancelledError:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
        return _json(dialect.error(GatewayError("the rollout is over", 401, "invalid_api_key")), 401)
    except Exception as error:  # noqa: BLE001 - boundary: an agent is told, and the run goes on
        return _json(dialect.error(_fault(error)), 500)


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise GatewayError(f"the request is larger than {BODY_BYTES >> 20} MiB", 413) from None


def _origin(body: bytes, request: web.Request) -> Origin:
    given = request.headers.get("x-stainless-retry-count", "0")
    return Origin(body, int(given) if given.isdecimal() and len(given) < 6 else 0)


async def _stream(
    request: web.Request,
    dialect: Dialect,
    writer: Writer,
    task: "asyncio.Future[Completion]",
    feed: Feed,
    endpoint: Endpoint,
) -> web.StreamResponse:
    """Answer as server-sent events, as it is sampled; an error before the first of them is an ordinary answer."""
    task.add_done_callback(lambda done: feed.wake())
    parts = _parts(writer, task, feed)
    first = await anext(parts)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async with aclosing(parts):
            await response.write(first)
            async for part in parts:
                await response.write(part)
    except ConnectionError:
        task.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else endpoint.lost(done.result())
        )
        return response
    except BaseException as error:  # noqa: BLE001 - boundary: the answer has begun, so the error is its last event
        told = error if isinstance(error, GatewayError) else _fault(contained(error))
        await response.write(f"event: error\ndata: {json.dumps(dialect.error(told))}\n\n".encode())
    await response.write_eof()
    return response


async def _parts(writer: Writer, task: "asyncio.Future[Completion]", feed: Feed) -> AsyncGenerator[bytes]:
    """Yield the events of an answer as they become certain, and a comment where there is nothing to say for long.
    Raises what the task raises."""
    clock = asyncio.get_running_loop().time
    spoke = clock()
    while not task.done():
        await feed.wait(spoke + KEEP_ALIVE_SECONDS - clock())
        if said := feed.take():
            yield b"".join(writer.add(feed.completion_id, feed.prompt_tokens, said))
            spoke = clock()
            await asyncio.wait({task}, timeout=TOGETHER_SECONDS)
        elif clock() >= spoke + KEEP_ALIVE_SECONDS:
            yield b": keep-alive\n\n"
            spoke = clock()
    yield b"".join(writer.end(task.result()))


def _fault(error: Exception) -> GatewayError:
    line = describe(error)
    _log.warning("a call failed: %s", line, exc_info=_log.isEnabledFor(logging.DEBUG))
    return GatewayError(line, 500, "server_error")


def _json(data: dict[str, Json], status: int = 200) -> web.Response:
    text = encode(data).encode("utf-8", "replace")
    return web.Response(body=text, status=status, content_type="application/json")
