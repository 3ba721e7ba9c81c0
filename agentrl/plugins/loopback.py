"""The program that an agent in a sandbox runs under: it carries connections of the loopback to the gateway's socket.

A sandbox has no network but a loopback of its own. It imports only the standard library.

usage: python loopback.py PORT SOCKET COMMAND [ARGUMENT ...]

It listens on 127.0.0.1:PORT, runs the command, and ends with its exit code.
"""

import asyncio
import os
import sys
from contextlib import suppress

_CHUNK = 1 << 16


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _carry(socket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there, back = await asyncio.open_unix_connection(socket)
        await asyncio.gather(_pump(reader, back), _pump(there, writer))
        back.close()
    except OSError:
        pass  # the client sees that its connection is closed
    finally:
        writer.close()


async def main() -> int:
    """Run the command, and return its exit code."""
    port, socket, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _carry(socket, reader, writer)

    async with await asyncio.start_server(carry, "127.0.0.1", port, backlog=1024):
        child = await asyncio.create_subprocess_exec(*command)
        return await child.wait()


if __name__ == "__main__":
    code = asyncio.run(main())
    os._exit(code if code >= 0 else 128 - code)
