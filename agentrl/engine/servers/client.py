"""`Client`: HTTP calls to one server. Whatever goes wrong is a ServerError: one line that names the server.

Connections are pooled in one aiohttp session per event loop, because a run may use several loops one after another.
"""

import asyncio
import http.client
import json
import os
from collections.abc import AsyncGenerator, Mapping
from urllib.parse import urlsplit

import aiohttp
import orjson

from agentrl.addresses import authorization
from agentrl.containment.threads import in_thread
from agentrl.engine.base import EngineError
from agentrl.plugins.types import Json
from agentrl.weights.publisher import KEEP_ALIVE_SECONDS

CONNECT_SECONDS = 10.0
_JSON = {"Content-Type": "application/json"}
_RETRYABLE = (408, 425, 429)
_BUSY_OR_BROKEN = 500
_SHOWN = 300


class ServerError(EngineError):
    """A server failed; another one, or a second try, may not."""


class RefusedError(ServerError):
    """A server refused a request (4xx): asking again would not help."""


class LateError(ServerError):
    """A server did not answer in time, or this process was too busy to read it."""


class LostAdapterError(ServerError):
    """A server does not know the adapter that it was sent: it was restarted."""


class Sessions:
    """One aiohttp session per event loop; `close` ends that of the running loop. key: of servers that ask for one
    (`--api-key`)."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self._open: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    def get(self) -> aiohttp.ClientSession:
        """The session of the running event loop."""
        loop = asyncio.get_running_loop()
        session = self._open.get(loop)
        if session is None or session.closed:
            self._forget_closed_loops()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=authorization(self.key))
            self._open[loop] = session
        return session

    async def close(self) -> None:
        session = self._open.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _forget_closed_loops(self) -> None:
        for loop in [loop for loop in self._open if loop.is_closed()]:
            self._open.pop(loop).detach()


class Client:
    """url: http://HOST:PORT of the server."""

    def __init__(self, url: str, sessions: Sessions) -> None:
        self.url = url.rstrip("/")
        self._sessions = sessions

    def __repr__(self) -> str:
        return self.url

    async def get(self, path: str, *, timeout: float = 30.0) -> Json:
        """The JSON that it answers (None: an empty body). Raises ServerError within `timeout` seconds."""
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, body: Mapping[str, Json], *, timeout: float = 60.0) -> Json:
        """Post JSON, and return the answer's. timeout: seconds. Raises ServerError."""
        return await self._call("POST", path, body, timeout)

    async def check_answers(self, path: str, *, timeout: float) -> None:
        """Raise ServerError where it gives no sign of life: no connection, or an error of its own (5xx) to a GET.
        LateError: none within `timeout` seconds.

        It is asked in a thread, which waits in the kernel: an event loop of ours that stands still does not make an
        answer late.
        """
        await in_thread(self._check_answers, path, timeout)

    def _check_answers(self, path: str, timeout: float) -> None:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        try:
            connection.request("GET", parts.path + path, headers=authorization(self._sessions.key))
            answer = connection.getresponse()
            if answer.status >= _BUSY_OR_BROKEN:
                raise self._refusal(path, answer.status, answer.read(_SHOWN))
        except TimeoutError as error:
            raise LateError(f"{self.url}{path}: no answer within {timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{path}: {_line(error)}") from error
        finally:
            connection.close()

    async def stream(self, path: str, body: Mapping[str, Json]) -> AsyncGenerator[bytes]:
        """Yield the payloads of the server-sent events that it answers with, as they come, without the closing
        `[DONE]`. body: JSON, in which lists of numbers may be arrays of numpy's.

        Ends only after `[DONE]`: an answer that is cut short raises ServerError. There is no deadline.
        """
        session, data = self._sessions.get(), orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with session.post(self.url + path, data=data, headers=_JSON) as response:
                if response.status != 200:
                    raise self._refusal(path, response.status, await response.read())
                buffer, done = b"", False
                async for part in response.content.iter_any():
                    *events, buffer = (buffer + part).split(b"\n\n")
                    for event in events:
                        payload = event.removeprefix(b"data:").strip()
                        if payload == b"[DONE]":
                            done = True  # read on to the end, so that the connection can be used again
                        elif not done:
                            yield payload
        except (aiohttp.ClientError, OSError) as error:
            raise self._fault(path, error) from error
        if not done:
            raise ServerError(f"{self.url}{path}: the answer ended early")

    async def _call(self, method: str, path: str, body: Mapping[str, Json] | None, timeout: float) -> Json:
        session = self._sessions.get()
        try:
            async with asyncio.timeout(timeout), session.request(method, self.url + path, json=body) as response:
                data = await response.read()
        except TimeoutError as error:
            raise LateError(f"{self.url}{path}: no answer within {timeout:g} seconds") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._fault(path, error) from error
        if response.status != 200:
            raise self._refusal(path, response.status, data)
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: the answer is not JSON: {_shortened(data)}") from error

    def _fault(self, path: str, error: BaseException) -> ServerError:
        if isinstance(error, aiohttp.InvalidURL):
            return RefusedError(f"{self.url}: not a URL; write http://HOST:PORT")
        if isinstance(error, aiohttp.ClientConnectorError):
            why = os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
            return ServerError(f"{self.url}{path}: cannot connect ({why})")
        kind = LateError if isinstance(error, aiohttp.ServerTimeoutError) else ServerError
        return kind(f"{self.url}{path}: {_line(error)}")

    def _refusal(self, path: str, status: int, data: bytes) -> ServerError:
        kind = ServerError if status >= _BUSY_OR_BROKEN or status in _RETRYABLE else RefusedError
        return kind(f"{self.url}{path}: it answers {status}: {message_of(data)}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def message_of(data: bytes) -> str:
    """The message in an error's body, in one line."""
    try:
        found: Json = json.loads(data)
    except ValueError:
        return _shortened(data)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return _shortened(str(found).encode())


def _shortened(data: bytes) -> str:
    text = " ".join(data.decode(errors="replace").split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
