"""`WeightChannel`: one update of all servers, as a transaction on each.

pause -> load everything -> check -> set the version -> drop the caches -> resume. A server is resumed only when all of
it worked; otherwise it stays paused and has no version.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from agentrl.engine.sglang.weights.server import PauseMode, WeightServer
from agentrl.engine.sglang.weights.source import NamedTensor
from agentrl.engine.sglang.weights.verify import Fingerprint, check
from agentrl.engine.sglang.weights.way import Failures, Way, each

CHECK_EVERY = 50
"""Updates from one comparison of what servers hold with what was sent to the next; the first is compared."""
PARTIAL = "partial-"
"""How the version begins of a server that holds a part of an update."""


@dataclass(frozen=True, slots=True)
class Published:
    """good: URLs that hold and serve `version`. failed: URL -> why; these are paused and not to be sampled from."""

    version: int
    way: str
    good: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0  # from the pause to the resume


class WeightChannel:
    """versions: URL -> the step whose weights a server holds. None: unknown, or a part of an update; it is not sampled
    from. `servers` may be changed between updates."""

    def __init__(self, servers: Sequence[WeightServer], way: Way, check_every: int = CHECK_EVERY) -> None:
        self.servers, self.way, self._check_every = list(servers), way, check_every
        self._updates = 0
        self.versions: dict[str, int | None] = {server.url: None for server in servers}
        self._busy = asyncio.Lock()

    async def publish(
        self, version: int, weights: Iterable[NamedTensor], mode: PauseMode | str = PauseMode.RETRACT
    ) -> Published:
        """Give every server `weights`, of the trainer's step `version`. Updates follow each other, never overlap.

        mode: what becomes of requests under way; under `in_place` the caches are kept. Servers that failed before are
        tried again. Raises nothing about a server: see `Published.failed`.
        """
        mode = PauseMode(mode)
        async with self._busy:
            began = perf_counter()
            self.versions = dict.fromkeys((s.url for s in self.servers), None)
            checking = self._check_every > 0 and self._updates % self._check_every == 0
            self._updates += 1
            failures: Failures = {}
            ready = await each(self.servers, lambda server: _open(server, mode, version), failures)
            sent = Fingerprint(weights, checking, [(await server.facts()).dtype for server in ready])
            failures |= await self.way.send(version, ready, sent)
            ready = [server for server in ready if server.url not in failures]
            if checking:
                others: dict[tuple[Any, ...], str] = {}
                ready = await each(ready, lambda server: check(server, sent, others), failures)
            ready = await each(ready, lambda server: _commit(server, version, mode), failures)
            self.versions |= dict.fromkeys((s.url for s in ready), version)
            good = tuple(server.url for server in ready)
            return Published(version, self.way.name, good, failures, sent.bytes, perf_counter() - began)

    async def pause(self, mode: PauseMode | str = PauseMode.RETRACT) -> Failures:
        """Stop generating everywhere, as `PauseMode` says. What failed, by URL."""
        failures: Failures = {}
        await each(self.servers, lambda server: server.pause(PauseMode(mode)), failures)
        return failures

    async def resume(self) -> Failures:
        """Go on, on the servers whose weights are whole. What failed, by URL."""
        failures: Failures = {}
        whole = [server for server in self.servers if self.versions.get(server.url) is not None]
        await each(whole, WeightServer.resume, failures)
        return failures

    async def close(self) -> None:
        await self.way.close()


async def _open(server: WeightServer, mode: PauseMode, version: int) -> None:
    """From now on what it holds is a part of an update, and it says so itself, also to a later run."""
    await server.facts()
    await server.pause(mode)
    await server.set_version(f"{PARTIAL}{version}")


async def _commit(server: WeightServer, version: int, mode: PauseMode) -> None:
    await server.set_version(str(version))
    if mode is not PauseMode.IN_PLACE:
        await server.flush()
    await server.resume()
