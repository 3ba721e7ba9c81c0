"""The tool source `mcp`: every tool of an MCP server, over stdio or streamable HTTP, by the official client."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl import InfrastructureError, Session, Tool, ToolResponse
from agentrl.errors import UserError, nearest
from agentrl.plugins.tool import ToolSource
from agentrl.plugins.types import Json
from agentrl_tools.loops import PerLoop
from agentrl_tools.mcp.connection import BrokenError, ConnectError, Connection, Pool, RefusedError, connect
from agentrl_tools.mcp.endpoint import Command, Endpoint, Url

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock
    from mcp_types import Tool as OfferedTool


def response_of(result: "CallToolResult") -> ToolResponse:
    """Text as text, images as images (as `data:` URLs, embedded resources too), other content by a line that
    says what it is; structured content as JSON where there is no other."""
    texts: list[str] = []
    images: list[str] = []
    for block in result.content:
        if (data := _image_data(block)) is not None:
            images.append(f"data:image/png;base64,{data}")
        else:
            texts.append(_text(block))
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if result.is_error:
        return ToolResponse(text or "the tool failed without a word", tuple(images), error=True)
    return ToolResponse(text, tuple(images))


def _text(block: "ContentBlock") -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "audio":
        return f"[audio, {block.mime_type}, which you cannot hear]"
    if block.type == "resource_link":
        return f"[resource {block.name}: {block.uri}]"
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[resource {block.resource.uri}]"
    return f"[{block.type}]"


def _image_data(block: "ContentBlock") -> str | None:
    """The base64 text of an image, whatever its format is."""
    if block.type == "image":
        return str(block.data)
    resource = block.resource if block.type == "resource" else None
    is_image = str(getattr(resource, "mime_type", None) or "").startswith("image/")
    data = getattr(resource, "blob", None)
    return data if is_image and isinstance(data, str) else None


_ODD = re.compile(r"[^A-Za-z0-9_-]")
_UNREADABLE = (UserError, TypeError, AttributeError, KeyError, RecursionError)
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if")


class Server(Protocol):
    """Whom a tool asks."""

    async def lease(self, session: Session) -> object:
        """Connect the session to the server, if it is not yet."""

    async def give_back(self, session: Session) -> None:
        """End the connection with the last tool of the session."""

    async def call(self, name: str, arguments: dict[str, Json], session: Session) -> ToolResponse:
        """Call a tool by its name at the server. Raises InfrastructureError."""


class McpTool(Tool):
    """name: for the model. remote: its name at the server."""

    def __init__(self, server: Server, remote: str, prefix: str, description: str, schema: Mapping[str, Json]) -> None:
        self._server, self.remote = server, remote
        self.name = _ODD.sub("_", prefix + remote)[:64]
        self.description = description
        self.parameters = parameters_of(schema)

    async def create(self, session: Session, **create_kwargs: Json) -> None:
        session.state = await self._server.lease(session)

    # a parameter of theirs may be called session
    async def execute(self, session: Session, /, **arguments: Json) -> ToolResponse:  # type: ignore[override]
        return await self._server.call(self.remote, arguments, session)

    async def release(self, session: Session, **kwargs: Json) -> None:
        if session.state is not None:
            await self._server.give_back(session)
            session.state = None

    def check(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """Check arguments. Where the schema says what our checks do not know, the server alone judges the arguments."""
        try:
            return super().check(arguments)
        except _UNREADABLE:
            return dict(arguments)


def parameters_of(schema: Mapping[str, Json]) -> dict[str, Json]:
    """A schema with the keys that templates and checks rely on. Unknown arguments are refused where the schema
    lists the known ones and nothing else in it can name further ones: a slip of the model is then told to it."""
    made = {"properties": {}, **schema, "type": "object"}
    if not isinstance(made["properties"], Mapping):
        made["properties"] = {}
    if "additionalProperties" not in made and (not made["properties"] or any(key in made for key in _OPEN)):
        made["additionalProperties"] = True
    return made


_STARTS = 4  # servers that are started at the same time, of those that requests have for themselves


@dataclass
class _Lease:
    """A connection that the tools of one request share. holders: tools that were created and not released."""

    connection: Connection
    holders: int = 1


class McpSource(ToolSource):
    """Every tool of an MCP server.

    command, args, env, cwd: of a server that is started here and spoken to over its standard input and output.
    url, headers: of one that is reached over streamable HTTP instead.

    include, exclude: names of tools, or patterns such as `read_*`. prefix: stands before each name for the model.
    sessions: `shared`, or `per_request` where the server keeps state between calls: each request then has a connection
    (and a server process) to itself. connections: shared ones. concurrency: calls under way at once.
    start_timeout: seconds until it must have answered the handshake. retries: of a call, and of connecting again.
    """

    def __init__(
        self,
        command: str | None = None,
        args: list[str] | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        url: str | None = None,
        headers: dict[str, str] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        prefix: str = "",
        sessions: Literal["shared", "per_request"] = "shared",
        connections: int = 1,
        concurrency: int = 128,
        start_timeout: float = 30.0,
        retries: int = 2,
    ) -> None:
        if min(connections, concurrency) < 1 or start_timeout <= 0 or retries < 0:
            raise ValueError("connections, concurrency and start_timeout must be more than 0, retries 0 or more")
        self._endpoint = _endpoint(command, args, env, cwd, url, headers)
        self._include, self._exclude, self._prefix = include, exclude or [], prefix
        self._own = sessions == "per_request"
        self._mode = "legacy" if self._own and url is not None else "auto"  # only that one has sessions over HTTP
        self._seconds, self._retries = start_timeout, retries
        self._pools: PerLoop[Pool] = PerLoop(
            lambda: Pool(self._endpoint, connections, concurrency, start_timeout, retries)
        )
        self._leases: dict[str, _Lease] = {}
        self._starts: PerLoop[asyncio.Semaphore] = PerLoop(lambda: asyncio.Semaphore(_STARTS))

    async def open(self) -> Sequence[Tool]:
        self._endpoint.check()
        connection = Connection(self._endpoint, self._mode)
        try:
            await connection.open(self._seconds)
            offered = await connection.tools()
        except ConnectError as error:
            await connection.close()
            raise UserError(f"{self._endpoint}: {error}") from error
        except asyncio.CancelledError:
            await connection.close()
            raise
        if self._own:
            await connection.close()
        else:
            self._pools.here().adopt(connection)
        return self.chosen(offered)

    async def close(self) -> None:
        self._kill_orphans()
        leases, self._leases = list(self._leases.values()), {}
        pool = self._pools.take()
        await asyncio.gather(*(lease.connection.close() for lease in leases), *([pool.close()] if pool else []))

    async def lease(self, session: Session) -> _Lease | None:
        """What a request needs for itself. Raises InfrastructureError."""
        if not self._own:
            return None
        if lease := self._leases.get(session.id):
            lease.holders += 1
            return lease
        try:
            async with self._starts.here():
                connection = await connect(self._endpoint, self._mode, self._seconds, self._retries)
        except ConnectError as error:
            raise InfrastructureError(f"{self._endpoint}: {error}") from error
        lease = self._leases[session.id] = _Lease(connection)
        return lease

    async def give_back(self, session: Session) -> None:
        """End the connection with the last tool of the session."""
        lease = self._leases.get(session.id)
        if lease is None:
            return
        lease.holders -= 1
        if lease.holders == 0:
            del self._leases[session.id]
            await lease.connection.close()

    async def call(self, name: str, arguments: dict[str, Json], session: Session) -> ToolResponse:
        """Make one call. Raises InfrastructureError when the server cannot be asked, or not be understood."""
        try:
            if self._own:
                return response_of(await session.state.connection.call(name, arguments))
            return response_of(await self._shared(name, arguments))
        except RefusedError as error:
            return ToolResponse(f"Error: {error}", error=True)
        except (BrokenError, ConnectError) as error:
            raise InfrastructureError(f"{self._endpoint}, tool {name}: {error}") from error

    async def _shared(self, name: str, arguments: dict[str, Json]) -> "CallToolResult":
        self._kill_orphans()
        pool = self._pools.here()
        async with pool.turns:
            for attempt in range(self._retries + 1):
                connection = await pool.connection()
                try:
                    return await connection.call(name, arguments)
                except BrokenError as error:
                    if error.dead:
                        pool.drop(connection)
                    if attempt == self._retries:
                        raise
                await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _kill_orphans(self) -> None:
        for pool in self._pools.orphans():
            pool.kill()

    def chosen(self, offered: "Sequence[OfferedTool]") -> list[Tool]:
        """Those of `mcp_types.Tool` that the recipe wants. Raises UserError: none, or a name that fits
        nothing."""
        names = [tool.name for tool in offered]
        for pattern in [*(self._include or ()), *self._exclude]:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(f"{self._endpoint}: offers no tool {pattern!r}{nearest(pattern, names)}")
        tools: dict[str, Tool] = {}
        for one in offered:
            if self._wants(one.name):
                tool = McpTool(self, one.name, self._prefix, one.description or one.title or "", one.input_schema)
                if tool.name in tools:
                    raise UserError(f"{self._endpoint}: two of its tools would be called {tool.name!r} by the model")
                self._check(tool)
                tools[tool.name] = tool
        if not tools:
            raise UserError(f"{self._endpoint}: it offers no tool{' that is included' if names else ''}")
        return list(tools.values())

    def _check(self, tool: Tool) -> None:
        try:
            _ = tool.schema
        except UserError as error:
            raise UserError(f"{self._endpoint}: {error}; leave it out with `exclude`") from None

    def _wants(self, name: str) -> bool:
        included = self._include is None or any(fnmatchcase(name, pattern) for pattern in self._include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self._exclude)


def _endpoint(
    command: str | None,
    args: list[str] | None,
    env: dict[str, str] | None,
    cwd: str | None,
    url: str | None,
    headers: dict[str, str] | None,
) -> Endpoint:
    if (command is None) == (url is None):
        raise UserError("tool source 'mcp': give one of the arguments `command` and `url`")
    if url is not None:
        if args or env or cwd:
            raise UserError("tool source 'mcp': `args`, `env` and `cwd` belong to `command`, not to `url`")
        return Url(url, headers or {})
    if headers:
        raise UserError("tool source 'mcp': `headers` belong to `url`, not to `command`")
    return Command(command or "", tuple(args or ()), env or {}, cwd)
