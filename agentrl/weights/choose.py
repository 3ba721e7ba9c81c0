"""Which way the weights go, and why."""

from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from agentrl.errors import UserError, nearest
from agentrl.weights.addresses import same_host
from agentrl.weights.channel import CHECK_EVERY, WeightChannel
from agentrl.weights.server import WeightServer
from agentrl.weights.transports.base import Transport
from agentrl.weights.transports.disk import FromDisk
from agentrl.weights.transports.nccl import FromDistributed
from agentrl.weights.transports.shared_memory import FromTensor

WAYS = ("auto", "from_tensor", "from_distributed", "from_disk")


async def open_channel(
    urls: Sequence[str],
    session: aiohttp.ClientSession,
    *,
    folder: Path,
    way: str = "auto",
    timeout: float = 600.0,
    check_every: int = CHECK_EVERY,
    former: WeightChannel | None = None,
    say: Callable[[str], None] = print,
) -> WeightChannel:
    """A channel to the servers at `urls`, which answer already.

    way: `auto`, or one of WAYS. folder: where `from_disk` writes; servers on other machines must see it by the same
    path. timeout: seconds a call of an update may take. check_every: after the first update, and then after every so
    many, what servers hold is compared with what was sent (0: never). say: is told in a line which way, and why.
    former: the channel before this one: servers that it sent to sleep are woken by this one.
    Raises UserError for an unknown way, WeightUpdateError for a server that does not answer.
    """
    if way not in WAYS:
        raise UserError(f"engine.weights: no way {way!r}{nearest(way, WAYS)}")
    servers = [WeightServer(url, session, timeout) for url in urls]
    for server in servers:
        await server.facts()
    chosen, why = _choose(way, servers, folder)
    say(f"weights: {chosen.name} ({why})")
    return WeightChannel(servers, chosen, check_every, former)


def _choose(way: str, servers: Sequence[WeightServer], folder: Path) -> tuple[Transport, str]:
    why = "as the recipe says"
    if way == "auto":
        apart = [server.url for server in servers if not same_host(server.url)]
        way = "from_distributed" if apart else "from_tensor"
        why = f"{apart[0]} does not share this machine's memory" if apart else "servers share this machine's memory"
    if way == "from_disk":
        return FromDisk(folder), why
    return FromDistributed() if way == "from_distributed" else FromTensor(), why
