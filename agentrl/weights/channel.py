"""`WeightChannel`: one update of all servers, as a transaction on each.

pause -> drop the caches and load everything -> check -> set the version -> resume. A server is resumed only when all of
it worked; otherwise it stays paused and has no version.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from agentrl.weights.server import PauseMode, WeightServer, WeightUpdateError
from agentrl.weights.source import NamedTensor
from agentrl.weights.transports.base import Failures, Transport, each
from agentrl.weights.verify import Fingerprint, check

CHECK_EVERY = 50
"""Updates from one comparison of what servers hold with what was sent to the next; the first is compared."""
PARTIAL = "partial-"
"""How the version begins of a server that holds a part of an update."""

KEYS_AND_VALUES = ("kv_cache",)
MEMORY = ("weights", *KEYS_AND_VALUES)
"""What a server started with `--enable-memory-saver` can give back, and take again apart. A CPU frees nothing."""

CHANGED = "the trainer changed its weights while they were sent"


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

    def __init__(
        self,
        servers: Sequence[WeightServer],
        way: Transport,
        check_every: int = CHECK_EVERY,
        former: "WeightChannel | None" = None,
    ) -> None:
        self.servers, self.way, self._check_every = list(servers), way, check_every
        self._updates = 0
        self.versions: dict[str, int | None] = {server.url: None for server in servers}
        self._released: dict[str, tuple[str, ...]] = {} if former is None else former._released
        self._busy = asyncio.Lock()

    async def publish(
        self,
        version: int,
        weights: Iterable[NamedTensor],
        mode: PauseMode | str = PauseMode.RETRACT,
        resume: bool = True,
    ) -> Published:
        """Give every server `weights`, of the trainer's step `version`. Updates follow each other, never overlap.

        mode: what becomes of requests under way; under `in_place` the caches are kept. resume: whether servers generate
        again at the end. Servers that sleep are woken; those that failed before are tried again. Raises nothing about a
        server: see `Published.failed`. Raises WeightUpdateError, with every server as it was, when the weights are not
        those of their stamp (see ModelWeights).
        """
        mode = PauseMode(mode)
        if not _intact(weights):
            raise WeightUpdateError(
                f"the trainer's weights are no longer those of step {version}; the next update comes"
            )
        async with self._busy:
            began = perf_counter()
            self.versions = dict.fromkeys((s.url for s in self.servers), None)
            checking = self._check_every > 0 and self._updates % self._check_every == 0
            self._updates += 1
            failures: Failures = {}
            ready = await each(self.servers, lambda server: self._open(server, version, mode), failures)
            whole = [facts for server in ready if (facts := await server.facts()).hashes_whole]
            sent = Fingerprint(weights, checking and bool(whole), [facts.dtype for facts in whole])
            flush = mode is not PauseMode.IN_PLACE or bool(self._released)
            failures |= await self.way.send(version, ready, sent, flush)
            if not _intact(weights):
                failures |= {server.url: CHANGED for server in ready if server.url not in failures}
            ready = [server for server in ready if server.url not in failures]
            if checking:
                others: dict[tuple[Any, ...], str] = {}
                ready = await each(ready, lambda server: check(server, sent, others), failures)
            ready = await each(ready, lambda server: self._commit(server, version, resume), failures)
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
        await each([s for s in self.servers if self.versions.get(s.url) is not None], WeightServer.resume, failures)
        return failures

    async def sleep(self, tags: Sequence[str] = MEMORY) -> Failures:
        """Pause, and give memory back to the trainer until `publish`, or `wake`. What failed, by URL.

        tags: of MEMORY. With `weights` what servers held is lost: then only `publish` lets them generate again.
        """
        failures: Failures = {}
        async with self._busy:
            await each(self.servers, lambda server: self._release(server, tuple(tags)), failures)
        return failures

    async def wake(self) -> Failures:
        """Take back what `sleep` gave, and go on where the weights are whole. What failed, by URL."""
        failures: Failures = {}
        async with self._busy:
            await each(self.servers, lambda server: self._take(server, MEMORY), failures)
            return failures | await self.resume()

    async def close(self) -> None:
        await self.way.close()

    async def _open(self, server: WeightServer, version: int, mode: PauseMode) -> None:
        """From now on what it holds is a part of an update, and it says so itself, also to a later run."""
        await server.facts()
        await server.pause(mode if server.url not in self._released else PauseMode.RETRACT)
        await server.set_version(f"{PARTIAL}{version}")
        await self._take(server, ("weights",))

    async def _commit(self, server: WeightServer, version: int, resume: bool) -> None:
        await server.set_version(str(version))
        await self._take(server, MEMORY)
        if resume:
            await server.resume()

    async def _release(self, server: WeightServer, tags: tuple[str, ...]) -> None:
        if server.url in self._released:
            raise WeightUpdateError(f"{server.url} sleeps already")
        await server.pause(PauseMode.RETRACT)
        if "weights" in tags:
            self.versions[server.url] = None
            await server.set_version(f"{PARTIAL}sleeping")
        await server.release_memory(tags)
        self._released[server.url] = tags

    async def _take(self, server: WeightServer, tags: Sequence[str]) -> None:
        """Take back those of `tags` that were released, each once."""
        asleep = self._released.get(server.url, ())
        if due := [tag for tag in asleep if tag in tags]:
            await server.take_memory(due)
            del self._released[server.url]
            if left := tuple(tag for tag in asleep if tag not in tags):
                self._released[server.url] = left


def _intact(weights: Iterable[NamedTensor]) -> bool:
    return getattr(weights, "intact", lambda: True)()
