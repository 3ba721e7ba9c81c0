"""Which way the weights go, and why."""

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentrl.engine.sglang.weights.channel import WeightChannel
from agentrl.engine.sglang.weights.from_disk import FromDisk
from agentrl.engine.sglang.weights.from_tensor import FromTensor
from agentrl.engine.sglang.weights.server import WeightServer
from agentrl.engine.sglang.weights.way import Way
from agentrl.errors import UserError, nearest

WAYS = ("auto", "from_tensor", "from_disk")


async def open_channel(
    urls: Sequence[str],
    session: aiohttp.ClientSession,
    *,
    folder: Path,
    way: str = "auto",
    headers: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    say: Callable[[str], None] = print,
) -> WeightChannel:
    """A channel to the servers at `urls`, which answer already.

    way: `auto`, or one of WAYS. folder: where `from_disk` writes; servers on other machines must see it by the same
    path. timeout: seconds a call of an update may take. say: is told in a line which way was chosen and why.
    Raises UserError for an unknown way, WeightUpdateError for a server that does not answer.
    """
    if way not in WAYS:
        raise UserError(f"engine.weights: no way {way!r}{nearest(way, WAYS)}")
    servers = [WeightServer(url, session, timeout, headers) for url in urls]
    infos = {server.url: await server.info() for server in servers}
    chosen, why = _choose(way, infos, folder)
    say(f"weights: {chosen.name} ({why})")
    return WeightChannel(servers, chosen, say)


def _choose(way: str, infos: Mapping[str, Mapping[str, Any]], folder: Path) -> tuple[Way, str]:
    far = [url for url in infos if not on_this_machine(url)]
    why = "as the recipe says"
    if way == "auto":
        way = "from_disk" if far else "from_tensor"
        why = f"{far[0]} is another machine" if far else "servers are on this machine"
    if way == "from_disk":
        return FromDisk(folder), why
    return FromTensor({url: int(info.get("tp_size", 1)) for url, info in infos.items()}), why


def on_this_machine(url: str) -> bool:
    """Whether the host of `url` is a name or address of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return all(str(address).startswith("127.") or address == "::1" or address in own for address in found)
