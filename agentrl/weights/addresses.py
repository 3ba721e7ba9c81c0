"""Whether a server shares this machine's memory. One in a container of this machine does not: it has mounts of its own,
and would end itself over a piece of shared memory that it cannot find."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.weights.reach import is_own

_LISTENING = "0A"
_PROC = Path("/proc")


def same_host(url: str) -> bool:
    """True only where that is sure: the process that listens there is visible, and in our mount namespace."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not on_this_machine(parts.hostname or ""):
        return False
    listeners = set(_sockets(port))
    owners = [pid for pid in _processes() if listeners & set(_open_sockets(pid))]
    ours = _namespaces(os.getpid())
    return bool(owners) and ours is not None and all(_namespaces(pid) == ours for pid in owners)


def on_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of this machine."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(map(is_own, found))


def _sockets(port: int) -> Iterator[str]:
    """The sockets that listen on `port`, as links in a process's folder `fd` name them."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (_PROC / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _processes() -> list[int]:
    return [int(entry.name) for entry in _PROC.glob("[0-9]*")]


def _open_sockets(pid: int) -> Iterator[str]:
    try:
        entries = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return  # ended meanwhile, or somebody else's
    for entry in entries:
        try:
            yield os.readlink(_PROC / str(pid) / "fd" / entry)
        except OSError:
            continue


def _namespaces(pid: int) -> tuple[str, str] | None:
    try:
        return os.readlink(_PROC / str(pid) / "ns" / "mnt"), os.readlink(_PROC / str(pid) / "ns" / "ipc")
    except OSError:
        return None
