"""`LoraChannel`: only an adapter travels. Each step's adapter has a name of its own, so nothing has to pause.

A request names the adapter that it samples from (`lora_path` in /generate) and keeps it to its end: its tokens belong
to the step of that adapter, whatever `weight_versions` says, which is the server's. Servers are started with
`--enable-lora`, `--max-lora-rank`, `--lora-target-modules` and room for two adapters (`--max-loaded-loras 2` or more).

Servers of this machine read an adapter from a folder; others, and those of several machines, are sent its tensors by
value, in the body of the call. Shared memory would do, but servers keep it open, and a server that drops an adapter
whose sender has ended meanwhile, such as the run before, aborts: torch's manager of that memory is gone.
"""

import asyncio
import base64
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from safetensors.torch import save_file

from agentrl.addresses import same_host
from agentrl.containment.threads import in_thread
from agentrl.jsonable import dumps
from agentrl.plugins.types import Json
from agentrl.weights.channel import Published
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import WeightServer
from agentrl.weights.source import NamedTensor
from agentrl.weights.transports.base import Failures, each

KEPT = 2
"""Adapters that a server holds at least: the newest, and the one before, which a request may just have named."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one step."""

    version: int
    """The trainer's step."""
    config: Mapping[str, Json]
    """PEFT's adapter_config.json."""
    tensors: Sequence[NamedTensor]
    """By PEFT's names (`base_model.model...lora_A.weight`)."""


class LoraChannel:
    """folder: makes the folder where adapters are written until servers of this machine have read them. `names`: URL ->
    the newest adapter that a server holds whole; requests name no other. previous: the channel before this one, whose
    records it continues, also for servers that it does not have."""

    def __init__(
        self, servers: Sequence[WeightServer], folder: Callable[[], Path], previous: "LoraChannel | None" = None
    ) -> None:
        self.servers, self._folder = list(servers), folder
        self.names: dict[str, str] = {} if previous is None else previous.names
        self._held: dict[str, list[str]] = {} if previous is None else previous._held
        self._same_host: dict[str, bool] = {} if previous is None else previous._same_host
        self._read_again: dict[str, tuple[Path, set[str]]] = {} if previous is None else previous._read_again
        self._busy = asyncio.Lock()

    async def publish(self, adapter: Adapter, keep: Mapping[str, Collection[str]] | None = None) -> Published:
        """Give every server the adapter under a new name, and drop older ones.

        keep: URL -> adapters that requests in flight sample from: dropping one would wait for them. Raises nothing
        about a server: see `Published.failed`; one that failed goes on with its former adapter.
        """
        async with self._busy:
            start = perf_counter()
            failures: Failures = {}
            name = f"step-{adapter.version}-{uuid.uuid4().hex[:8]}"  # no server knows it, whatever failed before
            known = await each(self.servers, lambda server: server.facts(), failures)
            local = [s for s in known if self._sees_our_files(s) and (await s.facts()).machines == 1]
            remote = [server for server in known if server not in local]
            loaded = await self._by_folder(local, name, adapter, failures)
            loaded += await self._by_value(remote, name, adapter, failures)
            await each(loaded, lambda server: self._renew(server, name, (keep or {}).get(server.url, ())), {})
            size = sum(tensor.nbytes for _, tensor in adapter.tensors)
            good = tuple(server.url for server in loaded)
            return Published(adapter.version, "lora", good, failures, size, perf_counter() - start)

    async def _by_folder(
        self, servers: Sequence[WeightServer], name: str, adapter: Adapter, failures: Failures
    ) -> list[WeightServer]:
        if not servers:
            return []
        folder = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=self._folder().resolve()))
        folder.chmod(0o755)
        content = {key: tensor.detach().contiguous().cpu() for key, tensor in adapter.tensors}
        await in_thread(save_file, content, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(dumps(adapter.config), encoding="utf-8")
        loaded: list[WeightServer] = []
        try:
            loaded = await self._load(servers, lambda server: server.load_adapter(name, str(folder)), failures)
        finally:
            if holders := {server.url for server in loaded if server.reads_adapters_again}:
                self._read_again[name] = folder, holders
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return loaded

    async def _by_value(
        self, servers: Sequence[WeightServer], name: str, adapter: Adapter, failures: Failures
    ) -> list[WeightServer]:
        if not servers:
            return []
        payload = await in_thread(_by_value, adapter.tensors)
        return await self._load(
            servers, lambda server: server.load_adapter_tensors(name, adapter.config, payload), failures
        )

    def _sees_our_files(self, server: WeightServer) -> bool:
        if server.url not in self._same_host:
            self._same_host[server.url] = same_host(server.url)
        return self._same_host[server.url]

    async def _load(
        self, servers: Sequence[WeightServer], load: Callable[[WeightServer], Awaitable[object]], failures: Failures
    ) -> list[WeightServer]:
        async def checked(server: WeightServer) -> None:
            if not (await server.facts()).lora:
                raise WeightUpdateError(
                    f"{server.url} takes no adapters: start it with --enable-lora --max-lora-rank --lora-target-modules"
                )
            await load(server)

        return await each(servers, checked, failures)

    async def _renew(self, server: WeightServer, name: str, keep: Collection[str]) -> None:
        """Make `name` the newest, and drop what is too old, unless it is in use and there is room."""
        held = self._held.setdefault(server.url, [])
        held.append(name)
        self.names[server.url] = name
        room = (await server.facts()).adapters
        for old in held[:-KEPT]:
            if old not in keep or (room is not None and len(held) >= room):
                held.remove(old)
                await server.drop_adapter(old)
                self._forget_folder(old, server.url)

    def _forget_folder(self, name: str, url: str) -> None:
        """Remove an adapter's folder once no server holds the adapter."""
        folder, holders = self._read_again.get(name, (None, set[str]()))
        holders.discard(url)
        if folder is not None and not holders:
            shutil.rmtree(folder, ignore_errors=True)
            del self._read_again[name]


def _by_value(batch: Sequence[NamedTensor]) -> str:
    """Tensors as a pickle (base64) that servers' restricted reader admits. Cloned, since a view would bring its
    whole storage along."""
    content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in batch}
    return base64.b64encode(pickle.dumps(content, protocol=4)).decode()
