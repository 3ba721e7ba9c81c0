"""`WeightServer`: a server's calls about weights, whatever kind it is. Each raises WeightUpdateError with one line, or
has worked."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import ClassVar

import aiohttp
import torch

from agentrl.plugins.types import Json
from agentrl.weights.request import WeightUpdateError

Layout = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
"""Name, dtype and shape of tensors, in the order in which they are sent."""


class PauseMode(StrEnum):
    """What happens to requests in flight while weights change."""

    RETRACT = "retract"
    """They wait, and are computed again from their tokens so far with the new weights."""
    IN_PLACE = "in_place"
    """They wait, and go on with the new weights over the keys and values of the old."""
    ABORT = "abort"
    """They end now, and answer with what they have."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server tells about itself (/server_info)."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Of its weights, or `auto`."""
    ranks: int
    """Processes that share the model (tensor x pipeline parallelism)."""
    quantized: bool
    """Whether its weights are quantized."""
    version: str
    """Of the product."""
    lora: bool
    """Whether it takes adapters."""
    adapters: int | None = None
    """The most adapters that it holds (None: any number)."""
    transfer: str | None = None
    """vLLM's weight transfer engine: `ipc`, `nccl`, or none."""
    sees: bool = False
    """Whether it keeps what it computed of images."""
    nccl: str | None = None
    """Version of its NCCL, as 2.29.7 (None: it does not say)."""
    machines: int = 1
    """That it computes on."""

    @property
    def hashes_whole(self) -> bool:
        """Whether its checksums are those of whole tensors, which can be computed here."""
        return self.device == "cpu" and self.ranks == 1 and not self.quantized

    @property
    def kind(self) -> tuple[object, ...]:
        """What servers with the same weights must share to have the same checksums."""
        return self.device, self.dtype, self.ranks, self.quantized, self.version


class WeightServer(ABC):
    """url: http://HOST:PORT. session: of the running event loop. timeout: seconds that one call may take."""

    in_memory: ClassVar[bool] = False
    """Whether weights usually reach it by a folder, which is then put into shared memory."""
    shows_all: ClassVar[bool] = True
    """Whether it has a checksum of every parameter."""
    joins_by_id: ClassVar[bool] = False
    """Whether its ranks join a bare NCCL communicator (`join_nccl`) instead of one of torch's process groups."""
    reads_adapters_again: ClassVar[bool] = False
    """Whether an adapter's folder has to stay as long as it holds the adapter."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._facts: Facts | None = None
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    @abstractmethod
    async def facts(self) -> Facts:
        """What the server tells about itself; asked once."""

    @abstractmethod
    async def transport(self, near: bool, fed: bool = False) -> tuple[str, str]:
        """The transport that suits it, and why. near: whether it shares this machine's memory and files. fed: whether
        each of its ranks shares a GPU, or else a machine's memory, with one of the trainer's."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Treat requests in flight as `mode` says; new ones wait until `resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Answer requests again."""

    @abstractmethod
    async def begin(self) -> None:
        """Open an update. One that an earlier failure left open will do: all that it holds is overwritten."""

    @abstractmethod
    async def end(self) -> None:
        """Close the update: all tensors were loaded."""

    async def load_tensors(self, payloads: Sequence[str], flush: bool) -> None:
        """Load a bucket. payloads: base64, a pickled flattened bucket for each rank. flush: drop the caches. Of SGLang
        alone."""
        raise WeightUpdateError(f"{self.url} opens no shared memory")

    @abstractmethod
    async def load_folder(self, folder: str, flush: bool) -> None:
        """Load *.safetensors of the whole model from `folder`, a path that the server can read."""

    async def open_packed(self) -> None:
        """Prepare for `load_packed`; of vLLM alone."""
        raise WeightUpdateError(f"{self.url} opens no memory by handles")

    async def load_packed(self, layout: Layout, handles: Sequence[tuple[object, ...]], flush: bool) -> None:
        """Load tensors that lie one after the other in memory that `handles` open, one for each rank's GPU; of vLLM
        alone."""
        raise WeightUpdateError(f"{self.url} opens no memory by handles")

    async def join_group(self, host: str, port: int, first_rank: int, world: int, name: str, backend: str) -> None:
        """Join a process group whose rank 0 is at `host`, with ranks from `first_rank` on. Returns once all of `world`
        have joined. Of SGLang alone."""
        raise WeightUpdateError(f"{self.url} joins bare NCCL communicators only")

    async def join_nccl(self, unique_id: bytes, first_rank: int, world: int) -> None:
        """Join the NCCL communicator of `unique_id`; of vLLM alone."""
        raise WeightUpdateError(f"{self.url} joins process groups of torch only")

    async def check_nccl(self) -> None:
        """Raise WeightUpdateError where it is known that its NCCL and that of this process do not connect."""
        return

    @abstractmethod
    async def leave_group(self, name: str) -> None:
        """Leave a group that it joined."""

    @abstractmethod
    async def load_broadcast(self, layout: Layout, group: str, flush: bool) -> None:
        """Load tensors that rank 0 of `group` broadcasts."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from `folder`, as PEFT saves one, a path that the server can read."""

    @abstractmethod
    async def load_adapter_tensors(self, name: str, config: Mapping[str, Json], payload: str) -> None:
        """Load an adapter by value. config: PEFT's adapter_config.json. payload: base64, the pickled tensors by PEFT's
        names."""

    @abstractmethod
    async def drop_adapter(self, name: str) -> None:
        """Unload an adapter. Returns once the requests that sample from it have ended."""

    @abstractmethod
    async def set_version(self, version: str) -> None:
        """Name the weights that it holds."""

    @abstractmethod
    async def version(self) -> str:
        """The name of the weights that it holds: that of `set_version`, unless it was restarted since."""

    @abstractmethod
    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; what it held is lost. A server that is not paused crashes over this."""

    @abstractmethod
    async def take_memory(self, tags: Sequence[str]) -> None:
        """Take back the memory of tags that were released; a server crashes over any other."""

    @abstractmethod
    async def checksums(self) -> list[dict[str, str]]:
        """For each rank: parameter name -> hash of its bytes."""

    async def _post(self, path: str, body: Mapping[str, Json]) -> dict[str, Json]:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Json] | None) -> dict[str, Json]:
        """The answer's JSON ({} when it has none)."""
        try:
            try:
                status, text = await self._once(method, path, body)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                status, text = await self._once(method, path, body)  # the server had closed this pooled connection
            found = json.loads(text) if text[:1] == "{" else {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise WeightUpdateError(f"{self.url}{path} did not answer: {reason}") from error
        if status != HTTPStatus.OK or found.get("success") is False:
            told = found.get("error")
            told = told.get("message") if isinstance(told, dict) else told
            message = found.get("message") or found.get("error_message") or told or text
            raise WeightUpdateError(f"{self.url}{path} answered {status}: {' '.join(str(message).split())[:300]}")
        return found

    async def _once(self, method: str, path: str, body: Mapping[str, Json] | None) -> tuple[int, str]:
        async with self._session.request(method, self.url + path, json=body, timeout=self._timeout) as answer:
            return answer.status, await answer.text()
