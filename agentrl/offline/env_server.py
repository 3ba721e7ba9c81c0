"""`serve_environment`: an environment of ours as an OpenEnv server, which other trainers play.

A session is a WebSocket (`/ws`), or is made and ended over `/mcp` by clients that call tools there; each plays one
`Episode` at a time. What a client sends is bounded before it is parsed, sessions are counted, and a silent one ends.
"""

import asyncio
import hmac
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import WSMsgType, web

from agentrl import __version__
from agentrl.addresses import is_loopback, url_of
from agentrl.errors import InfrastructureError, UserError
from agentrl.gateway.bounds import check_shape
from agentrl.gateway.call import GatewayError
from agentrl.http_server import names_this_machine, quiet_runner
from agentrl.jsonable import Json, dumps, loads
from agentrl.offline.episode import Action, ActionChat, Episode, View, content_text
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.plugins.rewards import make_rewards
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import Toolbox, offered
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.driver import Driver
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.talk import PATIENCE
from agentrl.rollout.workspaces import workspaces_of
from agentrl.testing.agent import TextEngine, without_token_limits

MESSAGE_BYTES = 1 << 20
"""The most bytes of one message of a client."""
TOOL_CHARACTERS = 1 << 20
"""The most characters of one answer of a tool; a longer one loses its middle."""
LISTED = 1000
"""The most tasks that one request lists."""
_SPLIT_KINDS = ("train", "validation", "test")


class RefusedError(Exception):
    """A message that is answered by an error. code: OpenEnv's name for its kind."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Served:
    """Who plays one session. episode: None before the first `reset`."""

    id: str
    """Its name at the server."""
    used: float = field(default_factory=time.monotonic)
    """When it was last asked for something."""
    episode: Episode | None = None
    episode_id: str = ""
    """What the client calls its episode."""
    attached: bool = False
    """Whether a WebSocket belongs to it."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a message of it is answered."""

    async def end(self) -> None:
        """End the episode."""
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.end()


class Stage:
    """What all sessions share: the environment, its tools, and the driver. seconds: for one answer."""

    def __init__(self, env: Environment, tools: tuple[Tool, ...], driver: Driver, seconds: float) -> None:
        self.env = env
        self.tools = tools
        self.driver = driver
        self.seconds = seconds

    def task(self, data: Mapping[str, Json]) -> Task:
        """The task that a `reset` asks for: by split, and by index or seed. Raises RefusedError."""
        split = data.get("split", "train")
        if not isinstance(split, str) or split not in self.splits:
            raise RefusedError("VALIDATION_ERROR", f"split: {split!r:.40}; expected one of {', '.join(self.splits)}")
        tasks = tasks_of(self.env, split)
        index = data.get("index")
        if index is None:
            index = _whole(data, "seed", random.randrange(len(tasks))) % len(tasks)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(tasks):
            raise RefusedError("VALIDATION_ERROR", f"index: {index!r:.40}; expected 0 to {len(tasks) - 1}")
        return tasks[index]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return ("train", *self.env.splits)

    def offered(self, episode: Episode | None) -> list[Tool]:
        """The tools of a task; before one begins, all."""
        if episode is None:
            return [*self.tools, *self.env.tools()]
        return list(offered(episode.task, self.tools, self.env).values())

    async def reset(self, session: Served, data: Mapping[str, Json]) -> View:
        """Begin an episode. Raises RefusedError and InfrastructureError."""
        task = self.task(data)
        name, seed = data.get("episode_id"), _whole(data, "seed", secrets.randbits(31))
        await session.end()
        session.episode_id = str(name)[:255] if name is not None else secrets.token_hex(8)
        session.episode = Episode(self.driver, task, seed)
        return await session.episode.begin(self.seconds)

    async def step(self, session: Served, action: Action) -> View:
        """Take a turn. Raises RefusedError and InfrastructureError."""
        if session.episode is None:
            raise RefusedError("EXECUTION_ERROR", "no episode has begun: reset comes first")
        return await session.episode.act(action, self.seconds)


def _whole(data: Mapping[str, Json], key: str, default: int) -> int:
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise RefusedError("VALIDATION_ERROR", f"{key}: {value!r:.40}; expected a whole number of 0 or more")
    return value


def action_of(data: Mapping[str, Json]) -> Action:
    """An action: `{"type": "call_tool", "tool_name": ..., "arguments": {...}}`, `{"message": ...}`, or both with
    `tool_calls`. Raises RefusedError."""
    calls = data.get("tool_calls", [])
    if "tool_name" in data:
        calls = [{"name": data["tool_name"], "arguments": data.get("arguments", {})}]
    text = data.get("message", "")
    if not isinstance(calls, list) or not isinstance(text, str) or ("message" not in data and not calls):
        raise RefusedError(
            "VALIDATION_ERROR", "an action is {type: call_tool, tool_name, arguments}, or {message}, with tool_calls"
        )
    named = []
    for call in calls:
        name = call.get("name", call.get("tool_name")) if isinstance(call, Mapping) else None
        arguments = call.get("arguments", {}) if isinstance(call, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise RefusedError("VALIDATION_ERROR", "a call of a tool has a name, and arguments by name")
        named.append((name, arguments))
    return Action(text, tuple(named))


def listed(tools: "list[Tool]") -> list[dict[str, Json]]:
    """Tools as OpenEnv lists them."""
    return [
        {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)} for tool in tools
    ]


def observed(view: View, data: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """The answer to a step or a reset. data: the action."""
    messages = [{"role": message["role"], "content": content_text(message)} for message in view.messages]
    observation: dict[str, Json] = {"text": view.text, "messages": messages}
    if data is not None and "tool_name" in data:
        observation |= {"tool_name": data["tool_name"], "result": view.text, "error": None}
    return {"observation": observation, "reward": view.reward, "done": view.done}


class EnvServer:
    """The HTTP application. key: what clients must send; empty: they must name this machine. sessions: at once.
    idle: seconds of silence after which one ends."""

    def __init__(self, stage: Stage, key: str, sessions: int, idle: float) -> None:
        self._stage, self._key, self._most, self._idle = stage, key, sessions, idle
        self._sessions: dict[str, Served] = {}
        self._name = stage.env.name

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=MESSAGE_BYTES)
        app.router.add_get("/ws", self._ws)
        app.router.add_post("/mcp", self._mcp)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metadata", self._metadata)
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/list_environments", self._names)
        app.router.add_get("/{env}/splits", self._splits)
        for path in ("num_tasks", "task", "tasks", "task_range"):
            app.router.add_post(f"/{{env}}/{path}", self._tasks)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let those in who may: with the key, or, without one, by a name of this machine and from no page elsewhere."""
        if self._key:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key.encode()):
                return await _answer({"detail": "Authorization: expected Bearer and the key of this server"}, 401)
        elif not names_this_machine(request) or _elsewhere(request):
            return await _answer({"detail": "requests must name this machine, and come from no page elsewhere"}, 403)
        try:
            return await handler(request)
        except RefusedError as error:
            return await _answer({"detail": str(error)}, 400)

    async def _health(self, request: web.Request) -> web.Response:
        return await _answer({"status": "healthy"})

    async def _names(self, request: web.Request) -> web.Response:
        return await _answer([self._name])

    async def _metadata(self, request: web.Request) -> web.Response:
        told = (type(self._stage.env).__doc__ or "").strip().split("\n")[0]
        return await _answer({"name": self._name, "description": told or self._name, "version": __version__})

    async def _schema(self, request: web.Request) -> web.Response:
        call = {"tool_name": {"type": "string"}, "arguments": {"type": "object"}, "message": {"type": "string"}}
        action = {"title": "CallToolAction", "type": "object", "properties": {"type": {"type": "string"}, **call}}
        return await _answer({"action": action, "observation": {"type": "object"}, "state": {"type": "object"}})

    def _check_name(self, request: web.Request) -> None:
        if request.match_info["env"].lower() != self._name.lower():
            raise web.HTTPNotFound(text=f"there is {self._name} here, nothing else")

    async def _splits(self, request: web.Request) -> web.Response:
        self._check_name(request)
        kinds = {name: name if name in _SPLIT_KINDS else "validation" for name in self._stage.splits}
        return await _answer([{"name": name, "type": kind} for name, kind in kinds.items()])

    async def _tasks(self, request: web.Request) -> web.Response:
        """Counts and names of tasks: what they hold may be their answer."""
        self._check_name(request)
        asked = await _body(request)
        split = asked.get("split")
        if not isinstance(split, str) or split not in self._stage.splits:
            raise RefusedError("VALIDATION_ERROR", f"split: expected one of {', '.join(self._stage.splits)}")
        tasks = tasks_of(self._stage.env, split)
        path = request.path.rpartition("/")[2]
        if path == "num_tasks":
            return await _answer({"num_tasks": len(tasks)})
        if path == "task":
            index = asked.get("index")
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(tasks):
                raise RefusedError("VALIDATION_ERROR", "Invalid task index")
            return await _answer({"task": {"id": tasks[index].id, "split": split, "index": index}})
        bounds = slice(asked.get("start"), asked.get("stop")) if path == "task_range" else slice(None)
        try:
            wanted = range(len(tasks))[bounds][:LISTED]
        except TypeError:
            raise RefusedError("VALIDATION_ERROR", "start and stop: expected whole numbers") from None
        found = [{"id": tasks[i].id, "split": split, "index": i} for i in wanted]
        return await _answer({"tasks": found, "env_name": self._name})

    def _open(self) -> Served:
        """A new session. Raises RefusedError: there are too many."""
        if len(self._sessions) >= self._most:
            raise RefusedError("CAPACITY_REACHED", f"{self._most} sessions are open, as many as may be")
        session = Served(secrets.token_hex(16))
        self._sessions[session.id] = session
        return session

    async def _end(self, session: Served) -> None:
        """End a session. It counts until its plugins have let go."""
        try:
            await session.end()
        finally:
            self._sessions.pop(session.id, None)

    async def reap(self) -> None:
        """End silent sessions, until cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._idle / 4))
            silent = time.monotonic() - self._idle
            for session in list(self._sessions.values()):
                if session.used < silent and not session.attached and not session.turn.locked():
                    await self._end(session)

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(self._end(session) for session in list(self._sessions.values())))

    async def _ws(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES, receive_timeout=self._idle, heartbeat=30.0)
        await socket.prepare(request)
        session: Served | None = None
        owned = True
        try:
            session, owned = self._attach(request.query.get("session_id"))
            await self._converse(socket, session)
        except RefusedError as error:
            await socket.send_str(_error(error.code, str(error)))
        except (TimeoutError, ConnectionError):
            pass
        finally:
            if session is not None:
                session.attached = False
                if owned:
                    await self._end(session)
            await socket.close()
        return socket

    def _attach(self, name: str | None) -> tuple[Served, bool]:
        """The session of a WebSocket, and whether it ends with it. Raises RefusedError."""
        if name is None:
            session = self._open()
        elif (found := self._sessions.get(name)) is None or found.attached:
            raise RefusedError("SESSION_ERROR", "there is no such session, or a WebSocket belongs to it already")
        else:
            session = found
        session.attached = True
        return session, name is None

    async def _converse(self, socket: web.WebSocketResponse, session: Served) -> None:
        while True:
            message = await socket.receive()
            if message.type is not WSMsgType.TEXT:
                return
            session.used = time.monotonic()
            try:
                said = _parsed(message.data.encode("utf-8", "surrogatepass"))
                if said.get("type") == "close":
                    return
                async with session.turn:
                    answer = await self._answered(session, said)
            except RefusedError as error:
                await socket.send_str(_error(error.code, str(error)))
            except InfrastructureError as error:
                await socket.send_str(_error("EXECUTION_ERROR", str(error)))
            else:
                await socket.send_str(answer)

    async def _answered(self, session: Served, said: Mapping[str, Json]) -> str:
        """The answer to a message. Raises RefusedError and InfrastructureError."""
        kind, data = said.get("type"), said.get("data", {})
        if not isinstance(data, Mapping):
            raise RefusedError("VALIDATION_ERROR", f"data: {type(data).__name__}; expected an object")
        if kind == "reset":
            return dumps({"type": "observation", "data": observed(await self._stage.reset(session, data))})
        if kind == "step" and data.get("type") == "list_tools":
            listing = {"tools": listed(self._stage.offered(session.episode))}
            return dumps({"type": "observation", "data": {"observation": listing, "reward": None, "done": False}})
        if kind == "step":
            view = await self._stage.step(session, action_of(data))
            return dumps({"type": "observation", "data": observed(view, data)})
        if kind == "state":
            return dumps({"type": "state", "data": _state(session)})
        if kind == "mcp":
            return dumps({"type": "mcp", "data": await self._rpc(data, session)})
        raise RefusedError("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.40}")

    async def _mcp(self, request: web.Request) -> web.Response:
        return await _answer(await self._rpc(await _body(request), None))

    async def _rpc(self, asked: Mapping[str, Json], session: Served | None) -> dict[str, Json]:
        """Answer a JSON-RPC request. session: of the WebSocket that it came over."""
        number = asked.get("id")
        try:
            params = asked.get("params") or {}
            if not isinstance(params, Mapping):
                raise RefusedError("-32602", "Params must be an object")
            result = await self._method(asked.get("method"), params, session)
            return {"jsonrpc": "2.0", "id": number, "result": result}
        except RefusedError as error:
            code = int(error.code) if error.code.startswith("-") else -32000
            return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": str(error)}}
        except InfrastructureError as error:
            return {"jsonrpc": "2.0", "id": number, "error": {"code": -32603, "message": str(error)}}

    async def _method(self, method: Json, params: Mapping[str, Json], session: Served | None) -> Json:
        """The result of a JSON-RPC method. Raises RefusedError and InfrastructureError."""
        if method == "openenv/session/create":
            return {"session_id": (session or self._open()).id}
        if session is None and (name := params.get("session_id")) is not None:
            session = self._sessions.get(name) if isinstance(name, str) else None
            if session is None:
                raise RefusedError("-32602", "there is no such session")
            session.used = time.monotonic()
        if method == "tools/list":
            return {"tools": listed(self._stage.offered(session.episode if session else None))}
        if session is None:
            raise RefusedError("-32602", "a session is needed: openenv/session/create makes one")
        if method == "openenv/session/close":
            if session.attached:
                raise RefusedError("-32600", "a WebSocket belongs to the session, and ends it")
            await self._end(session)
            return {"session_id": session.id, "closed": True}
        if method != "tools/call":
            raise RefusedError("-32601", f"Method not found: {method!r:.60}")
        action = action_of({"tool_name": params.get("name"), "arguments": params.get("arguments") or {}})
        async with session.turn:
            view = await self._stage.step(session, action)
        content = [{"type": "text", "text": view.text}]
        return {"content": content, "data": view.text, "is_error": False, "reward": view.reward, "done": view.done}


def _elsewhere(request: web.Request) -> bool:
    """Whether a page of another origin asks."""
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()


def _state(session: Served) -> dict[str, Json]:
    episode = session.episode
    told: dict[str, Json] = {"episode_id": session.episode_id or None, "step_count": 0}
    if episode is not None:
        told |= {"step_count": episode.turns, "task": episode.task.id, "reward": episode.reward, "done": episode.over}
    return told


def _error(code: str, message: str) -> str:
    return dumps({"type": "error", "data": {"code": code, "message": message}})


def _parsed(body: bytes) -> Mapping[str, Json]:
    """A message as an object. Raises RefusedError."""
    try:
        check_shape(body, "the message")
        value = loads(body)
    except (GatewayError, ValueError, RecursionError) as error:
        raise RefusedError("INVALID_JSON", f"Invalid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RefusedError("INVALID_JSON", f"a message is an object, not {type(value).__name__}")
    return value


async def _body(request: web.Request) -> Mapping[str, Json]:
    """The body of a request as an object, of bounded size and read in bounded time. Raises RefusedError."""
    try:
        async with asyncio.timeout(30.0):
            body = await request.read()
    except TimeoutError:
        raise RefusedError("INVALID_JSON", "the body did not come in time") from None
    return _parsed(body)


async def _answer(value: Json, status: int = 200) -> web.Response:
    return web.Response(text=dumps(value), status=status, content_type="application/json")


async def serve_environment(
    recipe: Recipe, host: str, port: int, key: str, sessions: int, idle: float, say: Callable[[str], None]
) -> None:
    """Serve the recipe's environment, with its tools and rewards, until it is cancelled. Raises UserError.

    key: what clients must send; empty: nothing. sessions: at once. idle: seconds of silence after which one ends. say:
    told where it answers, once it does."""
    if not key and not is_loopback(host):
        raise UserError(f"--key: on {host} anybody could play; give a key, or leave --key out and one is made")
    if recipe.rewards.model is not None:
        raise UserError("rewards.model: a reward model is not served; leave it out with rewards.model=null")
    async with AsyncExitStack() as stack:
        server = EnvServer(await _stage(recipe, idle, stack), key, sessions, idle)
        runner = quiet_runner(server.app(), handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(server.close)
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        say(f"OpenEnv server at {url_of(host, runner.addresses[0][1])}")
        say(f"key: {key or 'none'}")
        with suppress(asyncio.CancelledError):
            await server.reap()


async def _stage(recipe: Recipe, idle: float, stack: AsyncExitStack) -> Stage:
    """What sessions share, closed by `stack`. Raises UserError."""
    env = make_environment(recipe.env)
    stack.push_async_callback(env.close)
    rewards = make_rewards(recipe.rewards)
    stack.push_async_callback(rewards.close)
    if rewards.groups:
        raise UserError(f"rewards.functions: {next(iter(rewards.groups))!r} compares samples of a task; leave it out")
    toolbox = await Toolbox.open(recipe.tools, env)
    stack.push_async_callback(toolbox.close)
    workspaces = await workspaces_of(recipe.workspace, env, toolbox.tools)
    if workspaces is not None:
        stack.push_async_callback(workspaces.close)
    limits, seconds = recipe.rollout, recipe.rollout.turn_timeout
    patience = {"timeout": PATIENCE, "turn_timeout": idle + seconds, "max_tool_tokens": TOOL_CHARACTERS}
    driver = Driver(
        engine=TextEngine(),
        chat=ActionChat(),
        environment=env,
        tools=toolbox.tools,
        limits=without_token_limits(limits, **patience),
        scorer=Scorer(rewards, seconds),
        workspaces=workspaces,
    )
    return Stage(env, toolbox.tools, driver, seconds)
