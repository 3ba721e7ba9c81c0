"""`Gateway`: the HTTP endpoint through which agents sample from the model that is trained.

It speaks Chat Completions, Completions, Responses and Anthropic Messages. One key belongs to one endpoint (a rollout):
whoever sends another is told 401. What cannot be served is answered in the dialect's own form, never ignored.
"""

import asyncio
import json
import logging
import re
import secrets
import socket as sockets
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import TypeVar

from aiohttp import web

from agentrl.addresses import is_loopback, url_of
from agentrl.errors import UserError, contained, describe
from agentrl.gateway import mcp
from agentrl.gateway.anthropic_messages import AnthropicMessages
from agentrl.gateway.bounds import (
    IN_LOOP,
    LARGE,
    MESSAGES,
    Reader,
    characters,
    most_characters,
    off_loop,
)
from agentrl.gateway.call import Call, Completion, Endpoint, Feed, GatewayError, Origin
from agentrl.gateway.chat_completions import ChatCompletions, encode
from agentrl.gateway.completions import Completions
from agentrl.gateway.history import Found, History, json_object
from agentrl.gateway.responses import Responses
from agentrl.gateway.stream import Writer
from agentrl.http_server import names_this_machine, quiet_runner
from agentrl.images import in_image_thread
from agentrl.plugins.types import Json

CONNECTIONS = 256
"""That one workspace may have at once."""
KEEP_ALIVE_SECONDS = 10.0
"""A stream that has nothing to say sends a comment this often."""
TOGETHER_SECONDS = 0.02
"""What comes within this time is sent together: a stream costs the same however fast tokens are sampled."""

TRAIN, ROLE = "X-Agentrl-Train", "X-Agentrl-Role"
"""Headers by which an agent says of a call whether its answer is trained (0 or 1), and for which seat it is."""

T = TypeVar("T")
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,32}")
Dialect = ChatCompletions | Completions | Responses | AnthropicMessages
_log = logging.getLogger("agentrl.gateway")


class _Counted(asyncio.Protocol):
    """A connection of few, all of which are in `among`: one too many is closed at once."""

    def __init__(self, handler: asyncio.Protocol, among: "dict[_Counted, asyncio.Transport | None]") -> None:
        self._handler = handler if len(among) < CONNECTIONS else None
        self._among = among
        if self._handler is not None:
            among[self] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._handler is None:
            transport.close()
            return
        assert isinstance(transport, asyncio.Transport)
        self._among[self] = transport
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._handler is not None else None

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._handler is not None:
            del self._among[self]
            self._handler.connection_lost(error)


class Gateway:
    """One HTTP server for all rollouts of a run, in the run's event loop.

    host: address to listen on. port: 0 for any free one. model: the name that the list of models gives. socket: whether
    it listens on a Unix socket, too, for agents in a sandbox. public_url: where agents find it, {port} in it stands for
    its port; None: where it listens.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "agentrl",
        socket: bool = False,
        public_url: str | None = None,
    ) -> None:
        self._host, self._port, self._model, self._public_url = host, port, model, public_url
        self._url = ""
        self._endpoints: dict[str, Endpoint] = {}
        self._calls: dict[str, set[asyncio.Task[object]]] = {}
        self._histories: dict[str, History] = {}
        self._readers: dict[str, Reader] = {}
        self._runner: web.AppRunner | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-gateway-") if socket else None

    async def start(self) -> None:
        """Listen. Raises UserError where the address cannot be used."""
        app = web.Application(middlewares=[_in_dialect])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/responses/input_tokens", self._count_input)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/mcp", self._mcp)
        self._runner = quiet_runner(app, handle_signals=False, shutdown_timeout=1.0, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(f"the gateway cannot listen on {self._host}:{self._port}: {error.strerror}") from None
        self._port = self._runner.addresses[0][1]
        public = self._public_url
        self._url = url_of(self._host, self._port) if public is None else public.replace("{port}", str(self._port))
        if self.socket is not None:
            await web.UnixSite(self._runner, self.socket, backlog=1024).start()

    async def serve_at(self, listener: sockets.socket) -> Callable[[], Awaitable[None]]:
        """Serve connections to a socket that listens, such as one inside a workspace, at most CONNECTIONS at once. What
        is returned ends that, and closes those that are left."""
        assert self._runner is not None, "it has started"
        assert self._runner.server is not None
        make, among = self._runner.server, dict[_Counted, asyncio.Transport | None]()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Counted(make(), among), sock=listener, backlog=1024)

        async def end() -> None:
            server.close()
            for transport in list(among.values()):
                if transport is not None:
                    transport.close()

        return end

    @property
    def port(self) -> int:
        """On which it listens. Known once it has started."""
        return self._port

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
        """Where agents find it, without the path of a dialect. Known once it has started."""
        return self._url

    @property
    def sandbox_url(self) -> str:
        """Where an agent in a sandbox finds it: on a loopback of its own."""
        return f"http://127.0.0.1:{self._port}"

    @contextmanager
    def serving(self, endpoint: Endpoint, key: str | None = None) -> Iterator[str]:
        """Give `endpoint` a key for the time of this context. At its end calls of the key that still run are cancelled.

        key: None makes one; with the empty one the endpoint serves whoever sends a key of nobody's. Raises UserError
        for that where others than this machine's may reach it."""
        if key == "" and not (is_loopback(self._host) and self._public_url is None):
            raise UserError(f"on {self._host} everybody may call the model: give a key, or listen on 127.0.0.1")
        key = f"agentrl-{secrets.token_urlsafe(24)}" if key is None else key
        self._endpoints[key], self._calls[key], self._histories[key] = endpoint, set(), History(endpoint.images)
        self._readers[key] = Reader(endpoint, self._histories[key].images)
        try:
            yield key
        finally:
            del self._endpoints[key], self._histories[key], self._readers[key]
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

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        dialect = Completions()
        return await _told(dialect, self._complete(request, lambda endpoint: dialect))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        work = self._complete(request, lambda endpoint: Responses(endpoint.previous))
        return await _told(ChatCompletions(), work)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        dialect = AnthropicMessages()
        return await _told(dialect, self._complete(request, lambda endpoint: dialect))

    async def _complete(self, request: web.Request, dialect_of: Callable[[Endpoint], Dialect]) -> web.StreamResponse:
        key, endpoint, body = await self._asked(request)
        dialect = dialect_of(endpoint)
        call, found = await self._parsed(key, body, dialect)
        self._of(request)  # the rollout may be over meanwhile
        if call.stream:
            feed = Feed()
            task = self._task(key, endpoint.complete(call, _origin(found, request), feed))
            return await _stream(request, dialect, dialect.writer(call), task, feed, endpoint)
        task = self._task(key, endpoint.complete(call, _origin(found, request)))
        done = await asyncio.shield(task)
        if request.transport is None or request.transport.is_closing():
            endpoint.lost(done)
        return _json(dialect.render(done, call))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        dialect = AnthropicMessages()

        async def work() -> web.Response:
            return _json({"input_tokens": await self._counted(request, lambda endpoint: dialect, {"max_tokens": 1})})

        return await _told(dialect, work())

    async def _count_input(self, request: web.Request) -> web.StreamResponse:
        async def work() -> web.Response:
            tokens = await self._counted(request, lambda endpoint: Responses(endpoint.previous), {})
            return _json({"object": "response.input_tokens", "input_tokens": tokens})

        return await _told(ChatCompletions(), work())

    async def _counted(
        self, request: web.Request, dialect_of: Callable[[Endpoint], Dialect], defaults: Mapping[str, Json]
    ) -> int:
        """The prompt tokens of the call that a request would be."""
        key, endpoint, body = await self._asked(request)
        history = self._histories[key]

        def counted() -> int:
            call = history.taken(dialect_of(endpoint).parse({**defaults, **json_object(body)}))
            _check_size(call, len(body) + call.named, endpoint)
            return endpoint.count(call)

        return await (in_image_thread if history.images else off_loop)(counted)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Tell the only model, or that of a name: calls may give any."""

        async def work() -> web.Response:
            self._of(request)
            name = request.match_info.get("name")
            model = _model(self._model if name is None else name)
            ends = {"first_id": self._model, "last_id": self._model}
            return _json(model if name is not None else {"object": "list", "data": [model], "has_more": False, **ends})

        return await _told(_dialect_of(request), work())

    async def _mcp(self, request: web.Request) -> web.StreamResponse:
        async def work() -> web.Response:
            key, endpoint, body = await self._asked(request)
            given = await off_loop(json_object, body) if len(body) > IN_LOOP else json_object(body)
            self._of(request)
            found = await asyncio.shield(self._task(key, mcp.answer(endpoint, given)))
            return web.Response(status=202) if found is None else _json(found)

        return await _told(ChatCompletions(), work())

    async def _asked(self, request: web.Request) -> tuple[str, Endpoint, bytes]:
        """Whose a request is, as `_of`, and its body, unless the rollout is over when it has come."""
        key, endpoint = self._of(request)
        body = await self._readers[key].body(request)
        self._of(request)
        return key, endpoint, body

    async def _parsed(self, key: str, body: bytes, dialect: Dialect) -> tuple[Call, Found]:
        """The call that a body is, and what was known of it: what is long is done in threads."""
        history, endpoint = self._histories[key], self._endpoints[key]
        if len(body) < LARGE and not history.images:
            found = history.find(body, dialect)
            if found.fresh <= IN_LOOP:
                return _read(found, history, dialect, endpoint), found
            return await off_loop(_read, found, history, dialect, endpoint), found

        def work() -> tuple[Call, Found]:
            found = history.find(body, dialect)
            return _read(found, history, dialect, endpoint), found

        async with self._readers[key].large:
            return await (in_image_thread if history.images else off_loop)(work)

    def _task(self, key: str, work: Coroutine[object, None, T]) -> "asyncio.Task[T]":
        """Run the work of a call in a task of its own, which ends with the key at the latest."""
        task = asyncio.ensure_future(work)
        self._calls[key].add(task)
        task.add_done_callback(lambda done: self._calls.get(key, set()).discard(done))
        return task

    def _of(self, request: web.Request) -> tuple[str, Endpoint]:
        """The key of a request and whose it is. Raises GatewayError (401)."""
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = given if given in self._endpoints else ""
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            raise GatewayError("the API key is unknown, or its rollout is over", 401, "invalid_api_key")
        if not key:
            self._check_open(request)
        return key, endpoint

    def _check_open(self, request: web.Request) -> None:
        """Raise GatewayError for what a page in a browser on this machine could send without being asked: where no key
        is asked for, nothing else keeps it out. (There are no headers of CORS here, so it could not read answers.)"""
        if is_loopback(self._host) and not names_this_machine(request):
            raise GatewayError("this address does not name this machine (the header Host)", 403, "wrong_host")
        if request.method == "POST" and request.content_type != "application/json":
            given = request.headers.get("Content-Type", "none")[:80]
            raise GatewayError(f"Content-Type: expected application/json, got {given}", 415)


def _model(name: str) -> dict[str, Json]:
    """A model as the APIs of both vendors have it."""
    openai = {"object": "model", "created": 0, "owned_by": "agentrl"}
    return {"id": name, **openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _dialect_of(request: web.Request) -> Dialect:
    """The dialect of a request's client, for what is no call."""
    anthropic = request.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return AnthropicMessages() if anthropic else ChatCompletions()


@web.middleware
async def _in_dialect(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer what is refused before a call is read, such as an unknown path, in the client's dialect."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        what = {404: "is not served here", 405: "does not take this method"}.get(error.status, error.reason)
        told = GatewayError(f"{request.method} {request.path[:200]} {what}", error.status, "not_found")
        found = _json(_dialect_of(request).error(told), error.status)
        if "Allow" in error.headers:
            found.headers["Allow"] = error.headers["Allow"]
        return found


async def _told(dialect: Dialect, work: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """The answer; whatever goes wrong is an error of the dialect."""
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


def _read(found: Found, history: History, dialect: Dialect, endpoint: Endpoint) -> Call:
    seen = history.parse(found, dialect)
    _check_size(seen.call, seen.call.size, endpoint)
    history.keep(found, seen)
    return seen.call


def _check_size(call: Call, size: int, endpoint: Endpoint) -> None:
    """Raise GatewayError for a call that no context could hold, before any of it is rendered. size: as `Call.size`."""
    if len(call.messages) > MESSAGES:
        raise endpoint.too_long(f"the conversation has {len(call.messages)} messages; at most {MESSAGES} are served")
    most = most_characters(endpoint.context)
    if size > most and (given := characters(call)) > most:
        raise endpoint.too_long(f"{given} characters are longer than any conversation of {endpoint.context} tokens")


def _origin(found: Found, request: web.Request) -> Origin:
    """What the headers of a call say. Raises GatewayError for one of ours that says nothing known."""
    given = request.headers.get("x-stainless-retry-count", "0")
    train, role = request.headers.get(TRAIN), request.headers.get(ROLE, "")
    if train not in (None, "0", "1"):
        raise GatewayError(f"{TRAIN}: expected 0 or 1, got {train[:40]!r}")
    if role and not _ROLE.fullmatch(role):
        raise GatewayError(f"{ROLE}: expected up to 32 letters, digits, - and _, got {role[:40]!r}")
    retry = int(given) if given.isdecimal() and given.isascii() and len(given) < 6 else 0
    key = request.headers.get("Idempotency-Key", "")
    return Origin(found.digest, retry, key, None if train is None else train == "1", role)


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
    try:
        async with aclosing(parts):
            await response.prepare(request)
            await response.write(first)
            async for part in parts:
                await response.write(part)
    except ConnectionError:  # an event was not received, the last one at least
        _lose(task, endpoint)
        return response
    except BaseException as error:  # noqa: BLE001 - boundary: the answer has begun, so the error is its last event
        _lose(task, endpoint)
        told = error if isinstance(error, GatewayError) else _fault(contained(error))
        with suppress(ConnectionError):
            await response.write(f"event: error\ndata: {json.dumps(dialect.error(told))}\n\n".encode())
    with suppress(ConnectionError):  # a client may close once it has read the last event
        await response.write_eof()
    return response


def _lose(task: "asyncio.Future[Completion]", endpoint: Endpoint) -> None:
    """Tell the endpoint that nobody received the answer, once there is one."""
    task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else endpoint.lost(done.result()))


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
