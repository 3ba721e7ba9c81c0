"""`WeightChannel`: one update of all servers, as a transaction on each.

Pause, drop the caches and load everything, verify, set the version, resume. A server is resumed only when all of it
worked; otherwise it stays paused and has no version.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import aiohttp
import torch

from agentrl.addresses import same_host
from agentrl.errors import UserError, nearest
from agentrl.weights.kinds import SERVERS
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import Facts, PauseMode, WeightServer
from agentrl.weights.source import Rounded, WeightSource
from agentrl.weights.transports.base import Failures, Transport, each
from agentrl.weights.transports.disk import DiskTransport
from agentrl.weights.transports.handles import HandleTransport
from agentrl.weights.transports.nccl import GroupTransport
from agentrl.weights.transports.shared_memory import SharedMemoryTransport
from agentrl.weights.transports.split import SplitTransport
from agentrl.weights.verify import Fingerprint, check
from agentrl.weights.vllm import own_nccl

TRANSPORTS = ("auto", "from_tensor", "from_distributed", "from_disk")
"""Values of `engine.args.weights`, by the names of SGLang's endpoints; what each is for vLLM: vllm.py."""
CHECK_EVERY = 50
"""Updates between two comparisons of what servers hold with what was sent; the first update is compared."""
PARTIAL = "partial-"
"""Prefix of the version of a server that holds a part of an update."""

KEYS_AND_VALUES = ("cuda_graph", "kv_cache")
MEMORY = ("weights", *KEYS_AND_VALUES)
"""What a server started with `--enable-memory-saver` can release, and take again separately: graphs where it has
SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 besides, as launched ones do. A CPU frees nothing."""

GLOO_BYTES_PER_SECOND = 2e9
"""Of one copy over a network or loopback; an estimate."""
CHANGED = "the trainer changed its weights while they were sent"


@dataclass(frozen=True, slots=True)
class Published:
    """The result of one update."""

    version: int
    """The trainer's step."""
    transport: str
    """Name of the transport, or `lora`."""
    good: tuple[str, ...]
    """URLs of the servers that hold and serve `version`."""
    failed: dict[str, str] = field(default_factory=dict)
    """URL -> why; these servers are paused and must not be sampled from."""
    bytes: int = 0
    """Size of what was sent to each server."""
    seconds: float = 0.0
    """From the pause to the resume."""


class WeightChannel:
    """versions: URL -> the step whose weights a server holds. None: unknown, or a part of an update; it is not sampled
    from. `servers` may be changed between updates."""

    def __init__(
        self,
        servers: Sequence[WeightServer],
        transport: Transport,
        check_every: int = CHECK_EVERY,
        previous: "WeightChannel | None" = None,
    ) -> None:
        self.servers, self.transport, self._check_every = list(servers), transport, check_every
        self._updates = 0
        self.versions: dict[str, int | None] = {server.url: None for server in servers}
        self._released: dict[str, tuple[str, ...]] = {} if previous is None else previous._released
        self._names: dict[str, str] = {} if previous is None else previous._names  # what servers that sleep call theirs
        self._busy = asyncio.Lock()

    async def publish(
        self, version: int, weights: WeightSource, mode: PauseMode | str = PauseMode.RETRACT
    ) -> Published:
        """Give every server `weights`, of the trainer's step `version`. Updates follow each other, never overlap.

        mode: what happens to requests in flight; under `in_place` the caches are kept. Servers that sleep are woken;
        those that failed before are tried again. Raises nothing about a server: see `Published.failed`. Raises
        WeightUpdateError, with every server as it was, when the weights are not intact.
        """
        mode = PauseMode(mode)
        if not weights.intact():
            raise WeightUpdateError(
                f"the trainer's weights are no longer those of step {version}; the next update comes"
            )
        async with self._busy:
            start = perf_counter()
            self.versions = dict.fromkeys((s.url for s in self.servers), None)
            checking = self._check_every > 0 and self._updates % self._check_every == 0
            self._updates += 1
            failures: Failures = {}
            ready = await each(self.servers, lambda server: self._open(server, version, mode), failures)
            hashing = [facts for server in ready if (facts := await server.facts()).hashes_whole]
            if ready and all([(await server.facts()).dtype == "bfloat16" for server in ready]):
                weights = Rounded(weights, torch.bfloat16)
            sent = Fingerprint(weights, checking and bool(hashing), [facts.dtype for facts in hashing])
            flush = mode is not PauseMode.IN_PLACE or bool(self._released)
            failures |= await self.transport.send(version, ready, sent, flush)
            if not weights.intact():
                failures |= {server.url: CHANGED for server in ready if server.url not in failures}
            ready = [server for server in ready if server.url not in failures]
            if checking:
                others: dict[tuple[object, ...], str] = {}
                ready = await each(ready, lambda server: check(server, sent, others), failures)
            ready = await each(ready, lambda server: self._commit(server, version), failures)
            self.versions |= dict.fromkeys((s.url for s in ready), version)
            good = tuple(server.url for server in ready)
            return Published(version, self.transport.name, good, failures, sent.bytes, perf_counter() - start)

    async def resume(self) -> Failures:
        """Resume the servers whose weights are whole. Returns what failed, by URL."""
        failures: Failures = {}
        await each(
            [s for s in self.servers if self.versions.get(s.url) is not None], lambda server: server.resume(), failures
        )
        return failures

    async def sleep(self, tags: Sequence[str] = MEMORY) -> Failures:
        """Pause, and release memory for the trainer until `publish` or `wake`. Returns what failed, by URL.

        tags: of MEMORY. With `weights` what servers held is lost: then only `publish` lets them generate again.
        """
        failures: Failures = {}
        async with self._busy:
            await each(self.servers, lambda server: self._release(server, tuple(tags)), failures)
        return failures

    async def wake(self) -> Failures:
        """Take back the memory that `sleep` released, and resume where the weights are whole. Returns what failed, by
        URL."""
        failures: Failures = {}
        async with self._busy:
            await each(self.servers, self._wake, failures)
            return failures | await self.resume()

    async def close(self) -> None:
        """Close the transport."""
        await self.transport.close()

    async def _open(self, server: WeightServer, version: int, mode: PauseMode) -> None:
        """Mark what it holds from now on as a part of an update, also for a later run."""
        await server.facts()
        await self._restarted(server)  # then it takes the weights as any other
        await server.pause(mode if server.url not in self._released else PauseMode.RETRACT)
        await self._name(server, f"{PARTIAL}{version}")
        await self._take(server, ("weights",))

    async def _commit(self, server: WeightServer, version: int) -> None:
        await self._name(server, str(version))
        await self._take(server, MEMORY)
        await server.resume()

    async def _release(self, server: WeightServer, tags: tuple[str, ...]) -> None:
        if server.url in self._released and not await self._restarted(server):
            raise WeightUpdateError(f"{server.url} sleeps already")
        await server.pause(PauseMode.RETRACT)
        if "weights" in tags:
            self.versions[server.url] = None
            await server.set_version(f"{PARTIAL}sleeping")
        name = await server.version()
        await server.release_memory(tags)
        self._released[server.url], self._names[server.url] = tags, name

    async def _wake(self, server: WeightServer) -> None:
        if await self._restarted(server):
            raise WeightUpdateError(f"{server.url} was restarted while it slept: it has lost its weights")
        await self._take(server, MEMORY)

    async def _name(self, server: WeightServer, version: str) -> None:
        await server.set_version(version)
        if server.url in self._released:
            self._names[server.url] = version

    async def _restarted(self, server: WeightServer) -> bool:
        """Whether a server that sleeps is another process now, which has released nothing; it sleeps no more."""
        if server.url not in self._released or await server.version() == self._names[server.url]:
            return False
        del self._released[server.url]
        self.versions[server.url] = None
        return True

    async def _take(self, server: WeightServer, tags: Sequence[str]) -> None:
        """Take back those of `tags` that were released, each once."""
        asleep = self._released.get(server.url, ())
        if due := [tag for tag in asleep if tag in tags]:
            await server.take_memory(due)
            del self._released[server.url]
            if left := tuple(tag for tag in asleep if tag not in tags):
                self._released[server.url] = left


async def open_channel(
    urls: Sequence[str],
    session: aiohttp.ClientSession,
    *,
    folder: Path,
    transport: str = "auto",
    kind: str = "sglang",
    timeout: float = 600.0,
    check_every: int = CHECK_EVERY,
    previous: WeightChannel | None = None,
    say: Callable[[str], None] = print,
    nccl: str | None = None,
    parameters: int = 0,
    fed: Collection[str] = (),
) -> WeightChannel:
    """Open a channel to the servers at `urls`, which must answer already.

    kind: of the servers, one of SERVERS. transport: one of TRANSPORTS. folder: where `from_disk` writes; servers on
    other machines must see it by the same path. timeout: seconds that one call of an update may take. check_every:
    the first update is verified, and then one in so many (0: none). say: called with a line that names the
    transport and why. previous: the channel before this one: servers that it sent to sleep are woken by this one.
    nccl: version of NCCL in servers that do not tell theirs (None: not known). parameters: of the model. fed:
    servers of which each rank is fed by the trainer's rank at its place (see `Feed`).
    Raises UserError for an unknown transport, WeightUpdateError for a server that does not answer.
    """
    if transport not in TRANSPORTS:
        raise UserError(f"engine.args.weights: unknown transport {transport!r}{nearest(transport, TRANSPORTS)}")
    servers = [SERVERS[kind](url, session, timeout) for url in urls]
    for server in servers:
        await server.facts()
    chosen, how = await _by_server(kind, servers, transport, folder, nccl, parameters, fed)
    say(f"weights: {how}")
    return WeightChannel(servers, chosen, check_every, previous)


async def _by_server(
    kind: str,
    servers: Sequence[WeightServer],
    transport: str,
    folder: Path,
    nccl: str | None,
    parameters: int,
    fed: Collection[str],
) -> tuple[Transport, str]:
    """How to send to each of the servers, and a line about it."""
    if transport != "auto":
        return _transport(transport, kind, folder), f"{transport} (as the recipe says)"
    whys: dict[str, dict[str, str]] = {}  # transport -> URL -> why
    for server in servers:
        name, why = await server.transport(same_host(server.url), server.url in fed)
        whys.setdefault(name, {})[server.url] = why
    by_group = whys.pop("from_distributed", None)
    if by_group is not None:
        whys["from_distributed"] = by_group
    by_nccl = SERVERS[kind].joins_by_id or (nccl is not None and nccl == own_nccl())
    (first, *others), lines = whys or {"from_tensor": {}}, []
    chosen, near = _transport(first, kind, folder, by_nccl), list(whys.get(first, ()))
    for name in others:
        chosen = SplitTransport(chosen, _transport(name, kind, folder, by_nccl), tuple(near))
        near += whys[name]
    for name, some in whys.items():
        over = more = ""
        if name == "from_distributed" and not SERVERS[kind].joins_by_id:
            facts = [await server.facts() for server in servers if server.url in some]
            by_nccl = by_nccl and all(fact.device == "cuda" for fact in facts)
            over = f" over NCCL {nccl}" if by_nccl else f" over gloo{_slowness(facts, parameters)}"
            more = f", nor do {len(some) - 1} more" if len(some) > 1 else ""
        why = f" ({next(iter(some.values()), '')}{more})"
        lines.append(f"{name} to {len(some)} servers" if others and name == first else f"{name}{over}{why}")
    return chosen, ", ".join(lines)


def _slowness(facts: Sequence[Facts], parameters: int) -> str:
    """How long gloo takes, and what is faster, where servers have GPUs."""
    if any(fact.device != "cuda" for fact in facts):
        return ""
    size = parameters * (4 if any(fact.dtype == "float32" for fact in facts) else 2)
    seconds = gloo_seconds(size, sum(fact.ranks for fact in facts))
    return (
        f", estimated {seconds:.0f} s an update: their NCCL is not known to be {own_nccl() or 'ours'}; where it is, "
        "engine.args.weights=from_distributed is faster"
    )


def gloo_seconds(size: int, ranks: int) -> float:
    """Estimate how long gloo broadcasts `size` bytes to so many ranks of servers: its tree has the root send
    log2(ranks + 1) copies, one after the other."""
    return size * math.ceil(math.log2(ranks + 1)) / GLOO_BYTES_PER_SECOND


def _transport(name: str, kind: str, folder: Path, nccl: bool = True) -> Transport:
    """nccl: whether a group of GPUs may be one of NCCL, which wants its own version in servers."""
    if name == "from_disk":
        return DiskTransport(folder)
    if name == "from_distributed":
        return GroupTransport(nccl=nccl)
    return HandleTransport() if kind == "vllm" else SharedMemoryTransport()
