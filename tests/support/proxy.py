"""A proxy before a daemon, which hangs, dies or lies as a test wants."""

import asyncio
import contextlib
from pathlib import Path

HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
ANSWERS = {
    "nonsense": b"\xff\x00\xfe nothing of HTTP \r\n\r\n" * 40,
    "no json": HEAD % (b"200 OK", 6, b"<html>"),
    "other json": HEAD % (b"200 OK", 4, b"[17]"),
    "error": HEAD % (b"500 No", 15, b'{"message": ""}'),
}
"""What a daemon says instead of an answer."""


class Proxy:
    """Stands in front of a daemon, and does to new and open connections what `mode` says."""

    def __init__(self, socket: str, path: str) -> None:
        self.mode = ""
        self.address = f"unix://{path}"
        self._socket, self._path = socket, path
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(self._socket.removeprefix("unix://"))
        self._writers |= {writer, ours}
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._carry(reader, ours), self._answer(theirs, writer))
        for end in (writer, ours):
            end.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
        target.write_eof()

    async def _answer(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if self.mode == "hang":
                await asyncio.sleep(3600)
            elif self.mode == "cut":
                target.transport.abort()
            elif self.mode in ANSWERS:
                target.write(ANSWERS[self.mode])
                target.close()
            await asyncio.sleep(0.2 if self.mode == "slow" else 0.0)
            target.write(data)
            await target.drain()
        target.write_eof()

    async def die(self) -> None:
        """Let nothing and nobody answer any more."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        Path(self._path).unlink(missing_ok=True)
