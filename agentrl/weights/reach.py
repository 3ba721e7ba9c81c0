"""Where launched servers listen, and the key without which they answer nobody.

The invariant: a server that this run launched is heard on loopback alone, or it asks for the run's key.
"""

import os
import secrets
import socket

from agentrl.errors import UserError

KEY_VARIABLE = "AGENTRL_SGLANG_KEY"
"""The key (`--api-key`) of servers that run already; of launched ones that listen on a network it replaces ours."""
LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::", "*")
_RAY_VARIABLE = "RAY_ADDRESS"
_FAR_AWAY = "8.8.8.8", 80


def listen_host(cluster: str | None) -> str:
    """The address of this machine that every machine of a Ray cluster reaches; loopback where there is none.

    cluster: HOST:PORT of its head, or `auto`. Raises UserError for a host that has no address.
    """
    if cluster is None:
        return LOOPBACK
    if cluster == "auto":
        cluster = os.environ.get(_RAY_VARIABLE, "auto")
    host, _, port = cluster.rpartition(":")
    return own_address(host.strip("[]"), int(port)) if host and port.isdecimal() else own_address(*_FAR_AWAY)


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; nothing is sent. Raises UserError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((host, port))
            return str(way.getsockname()[0])
    except OSError as error:
        if (host, port) == _FAR_AWAY:
            return LOOPBACK  # a machine without a network
        raise UserError(f"engine sglang: this machine has no way to {host}: {error.strerror}") from error


def is_own(address: str) -> bool:
    """Whether an address, such as 10.0.0.7, is of this machine: only then can it be listened on."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def given_key() -> str | None:
    return os.environ.get(KEY_VARIABLE) or None


def new_key() -> str:
    """Of one run; nobody guesses it."""
    return given_key() or secrets.token_hex(32)


def authorization(key: str | None) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def url_of(host: str, port: int) -> str:
    """Where a server that listens on `host` is called from every machine that reaches it."""
    if host in ANY:
        host = own_address(*_FAR_AWAY)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
