"""Addresses of this machine and of servers: where launched servers listen, the key without which they answer nobody,
and whether a server shares this machine's memory.

The invariant: a server that this run launched listens on loopback alone, or it asks for the run's key.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.errors import UserError

KEY_VARIABLE = "AGENTRL_SGLANG_KEY"
"""Environment variable with the key (`--api-key`) of servers that already run; for launched servers that listen on a
network it replaces a generated one."""
LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::", "*")
_RAY_VARIABLE = "RAY_ADDRESS"
_PUBLIC_ADDRESS = "8.8.8.8", 80
_LISTENING = "0A"
_PROC = Path("/proc")


def listen_host(cluster: str | None) -> str:
    """The address of this machine that every machine of a Ray cluster reaches; loopback without a cluster.

    cluster: HOST:PORT of its head, or `auto`. Raises UserError for a host that has no address.
    """
    if cluster is None:
        return LOOPBACK
    if cluster == "auto":
        cluster = os.environ.get(_RAY_VARIABLE, "auto")
    host, _, port = cluster.rpartition(":")
    return own_address(host.strip("[]"), int(port)) if host and port.isdecimal() else own_address(*_PUBLIC_ADDRESS)


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; nothing is sent. Raises UserError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((host, port))
            return str(route.getsockname()[0])
    except OSError as error:
        if (host, port) == _PUBLIC_ADDRESS:
            return LOOPBACK  # a machine without a network
        raise UserError(f"engine: this machine has no route to {host}: {error.strerror}") from error


def is_own(address: str) -> bool:
    """Whether an address such as 10.0.0.7 belongs to this machine: only then can a server listen on it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether `host` names the loopback interface."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def given_key(variable: str = KEY_VARIABLE) -> str | None:
    """The key in the environment variable; None without one."""
    return os.environ.get(variable) or None


def new_key(variable: str = KEY_VARIABLE) -> str:
    """The key of one run: the given one, or 256 random bits."""
    return given_key(variable) or secrets.token_hex(32)


def authorization(key: str | None) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def url_of(host: str, port: int) -> str:
    """The URL by which other machines call a server that listens on `host`."""
    if host in ANY:
        host = own_address(*_PUBLIC_ADDRESS)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def same_host(url: str) -> bool:
    """Whether a server shares this machine's memory and files.

    True only where that is certain: the process that listens there is visible, and in our mount and IPC namespaces. A
    server in a container is not: it would end over a piece of shared memory that it cannot find.
    """
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
    """Yield the sockets that listen on `port`, by their names in a process's `fd` folder."""
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
        return  # the process has ended, or belongs to another user
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
