"""Runs inside of a vLLM server, which asks for its key on some paths only: have it ask on all of them.

The calls that pause a server, change its weights or execute a method on its workers are among those that it leaves
open. This folder is all of ours that a server can import.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "AGENTRL_SERVER_KEY"
OPEN = ("/health",)
"""Paths that answer anybody."""
_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 for whoever does not send the key of KEY_VARIABLE."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "the key is missing, or another"}'})

    def _allowed(self, scope: _Message) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
