"""`EgressProxy`: what lets a workspace reach a list of hosts, and no other."""

import asyncio
import contextlib
import fnmatch
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

PORT = 3128
"""Of the proxy, on the loopback inside."""
_URL = f"http://127.0.0.1:{PORT}"
VARIABLES = {
    "HTTP_PROXY": _URL, "HTTPS_PROXY": _URL, "http_proxy": _URL, "https_proxy": _URL,
    "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
}  # fmt: skip
"""By which programs inside find it."""
_HEAD = 32 << 10
"""Bytes of a request's head."""
_CHUNK = 1 << 16
_CONNECT_SECONDS, _HEAD_SECONDS, _IDLE_SECONDS = 30.0, 30.0, 600.0
_MOST = 256
"""Connections at once."""


class EgressProxy:
    """An HTTP proxy (CONNECT, and requests with a whole URL) for some hosts: each `name`, `name:port` or `*.name`."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(host.lower() for host in hosts)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve connections to a socket that listens, until it is closed; then another one may be served."""
        self._server = await asyncio.start_server(self._connected, sock=listener, limit=_HEAD)

    async def close(self) -> None:
        """End what it serves, connections too."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def allows(self, host: str, port: int) -> bool:
        """Whether a host may be reached at a port."""
        names = host.lower().rstrip("."), f"{host.lower().rstrip('.')}:{port}"
        return any(fnmatch.fnmatchcase(name, allowed) for allowed in self._hosts for name in names)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if len(self._tasks) > _MOST:
                await _refuse(writer, "503 Service Unavailable", f"more than {_MOST} connections")
            else:
                await self._carry(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the program sees that its connection is closed
        finally:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        method, target, version = first.decode("latin-1").split(" ", 2)
        tunnel = method == "CONNECT"
        url = urlsplit(f"//{target}" if tunnel else target)
        host, port = url.hostname or "", url.port or (443 if tunnel or url.scheme == "https" else 80)
        if not host or (not tunnel and url.scheme != "http"):
            await _refuse(writer, "400 Bad Request", "this proxy takes CONNECT and requests with a whole http URL")
            return
        if not self.allows(host, port):
            await _refuse(writer, "403 Forbidden", f"workspace.network does not list {host}:{port}")
            return
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                there, back = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            await _refuse(writer, "502 Bad Gateway", f"{host}:{port}: {error}")
            return
        try:
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                path = f"{url.path or '/'}{'?' + url.query if url.query else ''}"
                # One request a connection: the next one might name another host.
                back.write(f"{method} {path} {version}\r\nConnection: close\r\n".encode("latin-1") + _without_hop(rest))
            await _both_ways(reader, writer, there, back)
        finally:
            back.close()


def _without_hop(head: bytes) -> bytes:
    """The header without what concerns the connection to the proxy."""
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith((b"connection:", b"proxy-")))


async def _both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    there: asyncio.StreamReader,
    back: asyncio.StreamWriter,
) -> None:
    await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(_IDLE_SECONDS):
                data = await reader.read(_CHUNK)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _refuse(writer: asyncio.StreamWriter, status: str, why: str) -> None:
    body = f"{why}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
