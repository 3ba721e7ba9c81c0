"""One tool of an MCP server. Its arguments are checked here as far as its schema can be read, and by the server."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from agentrl import Session, Tool, ToolResponse
from agentrl.errors import UserError

_ODD = re.compile(r"[^A-Za-z0-9_-]")
_UNREADABLE = (UserError, TypeError, AttributeError, KeyError, RecursionError)
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if")


class Server(Protocol):
    """Whom a tool asks."""

    async def lease(self, session: Session) -> Any: ...

    async def give_back(self, session: Session) -> None: ...

    async def call(self, name: str, arguments: dict[str, Any], session: Session) -> ToolResponse: ...


class McpTool(Tool):
    """name: for the model. remote: its name at the server."""

    def __init__(self, server: Server, remote: str, prefix: str, description: str, schema: Mapping[str, Any]) -> None:
        self._server, self.remote = server, remote
        self.name = _ODD.sub("_", prefix + remote)[:64]
        self.description = description
        self.parameters = parameters_of(schema)

    async def create(self, session: Session, **create_kwargs: Any) -> None:
        session.state = await self._server.lease(session)

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse:
        return await self._server.call(self.remote, arguments, session)

    async def release(self, session: Session, **kwargs: Any) -> None:
        if session.state is not None:
            await self._server.give_back(session)
            session.state = None

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Where the schema says what our checks do not know, the server alone judges the arguments."""
        try:
            return super().check(arguments)
        except _UNREADABLE:
            return dict(arguments)


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the keys that templates and checks rely on. Unknown arguments are refused where the schema lists
    the known ones and nothing else in it can name further ones: a slip of the model is then told to it."""
    made = {"properties": {}, **schema, "type": "object"}
    if not isinstance(made["properties"], Mapping):
        made["properties"] = {}
    if "additionalProperties" not in made and (not made["properties"] or any(key in made for key in _OPEN)):
        made["additionalProperties"] = True
    return made
