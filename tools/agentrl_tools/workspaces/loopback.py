"""Listen on the loopback of a container that runs on this machine, whatever its image has and its network is."""

import asyncio
import ctypes
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_NEW_NETWORK = 0x40000000
_SYS_ADMIN = 21
_BACKLOG = 1024
_START_SECONDS = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def may_enter() -> bool:
    """Whether this process may enter other network namespaces: it is root, and was left that right."""
    try:
        found = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> _SYS_ADMIN & 1)


async def listen_inside(pid: int, name: str, port: int) -> socket.socket:
    """Listen at a port of the loopback of a container. pid: its first process. name: the last word of that one's
    command line. Raises OSError: no such process is here, or the port is taken."""
    end = time.monotonic() + _START_SECONDS
    while not _is_named(pid, name) and time.monotonic() < end:
        await asyncio.sleep(0.01)  # a daemon says "started" a moment before the process becomes that program
    with ThreadPoolExecutor(1) as thread:  # which alone enters the namespace, and ends there
        return await asyncio.get_running_loop().run_in_executor(thread, _listen, pid, name, port)


def _is_named(pid: int, name: str) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[-2:] == [name, ""]


def _listen(pid: int, name: str, port: int) -> socket.socket:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _is_named(pid, name):
            raise OSError(0, "its daemon's processes are not this machine's")
        if _libc.setns(namespace, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(namespace)
    return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
