"""`WeightServer`: an SGLang server's calls about weights. Each raises WeightUpdateError with one line, or has
worked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import aiohttp
import torch


class WeightUpdateError(Exception):
    """A server did not take what was sent to it."""


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
    """Of SGLang."""
    lora: bool
    """Whether it takes adapters."""
    adapters: int | None = None
    """The most adapters that it holds (None: any number)."""

    @property
    def hashes_whole(self) -> bool:
        """Whether its checksums are those of whole tensors, which can be computed here."""
        return self.device == "cpu" and self.ranks == 1 and not self.quantized

    @property
    def kind(self) -> tuple[Any, ...]:
        """What servers with the same weights must share to have the same checksums."""
        return self.device, self.dtype, self.ranks, self.quantized, self.version


class WeightServer:
    """url: http://HOST:PORT. session: of the running event loop. timeout: seconds that one call may take."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._facts: Facts | None = None
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def facts(self) -> Facts:
        """Return what the server tells about itself; asked once."""
        if self._facts is None:
            info = await self._call("GET", "/server_info", None)
            self._facts = Facts(
                device=str(info.get("device")),
                dtype=str(info.get("dtype")),
                ranks=int(info.get("tp_size", 1)) * int(info.get("pp_size", 1)),
                quantized=info.get("quantization") is not None,
                version=str(info.get("version")),
                lora=bool(info.get("enable_lora")),
                adapters=info.get("max_loaded_loras"),
            )
        return self._facts

    async def pause(self, mode: PauseMode) -> None:
        """Treat requests in flight as `mode` says; new ones wait until `resume`."""
        await self._post("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        """Let the server generate again."""
        await self._post("/continue_generation", {})

    async def begin(self) -> None:
        """Open an update. One that an earlier failure left open will do: all that it holds is overwritten."""
        try:
            await self._post("/begin_weight_update", {})
        except WeightUpdateError as error:
            if "already open" not in str(error):
                raise

    async def end(self) -> None:
        """Close an update, so that the server uses what it was sent."""
        await self._post("/end_weight_update", {})

    async def load_tensors(self, payloads: Sequence[str], flush: bool) -> None:
        """Load a bucket. payloads: base64, a pickled flattened bucket for each rank. flush: drop the caches."""
        body = {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket", "flush_cache": flush}
        await self._post("/update_weights_from_tensor", body)

    async def load_folder(self, folder: str, flush: bool) -> None:
        """Load *.safetensors of the whole model from `folder`, a path that the server can read."""
        body = {
            "model_path": folder,
            "load_format": "auto",
            "flush_cache": flush,
        }  # also where it started with dummy weights
        await self._post("/update_weights_from_disk", body)

    async def join_group(self, host: str, port: int, first_rank: int, world: int, name: str, backend: str) -> None:
        """Join a process group whose rank 0 is at `host`, with ranks from `first_rank` on. Returns once all of `world`
        have joined."""
        address = {"master_address": host, "master_port": port, "rank_offset": first_rank, "world_size": world}
        await self._post("/init_weights_update_group", {**address, "group_name": name, "backend": backend})

    async def leave_group(self, name: str) -> None:
        """Leave the process group `name`."""
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def load_broadcast(
        self, layout: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], group: str, flush: bool
    ) -> None:
        """Load tensors that rank 0 of `group` broadcasts. layout: name, torch dtype and shape of each, in order."""
        names, dtypes, shapes = zip(*layout, strict=True)
        kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        body = {"names": names, "dtypes": kinds, "shapes": shapes, "group_name": group, "flush_cache": flush}
        await self._post("/update_weights_from_distributed", body)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from `folder`, as PEFT saves one, a path that the server can read."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def load_adapter_tensors(self, name: str, config: Mapping[str, Any], payload: str) -> None:
        """Load an adapter by value. config: PEFT's adapter_config.json. payload: base64, the pickled tensors by PEFT's
        names."""
        ranks = (await self.facts()).ranks  # each reads its own copy
        body = {"lora_name": name, "config_dict": dict(config), "serialized_named_tensors": [payload] * ranks}
        await self._post("/load_lora_adapter_from_tensors", body)

    async def drop_adapter(self, name: str) -> None:
        """Unload an adapter. Returns once the requests that sample from it have ended."""
        await self._post("/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, version: str) -> None:
        """Set the version that the server returns with each generation."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; what it held is lost. A server that is not paused crashes over this."""
        await self._post("/release_memory_occupation", {"tags": list(tags)})

    async def take_memory(self, tags: Sequence[str]) -> None:
        """Take back the memory of tags that were released; a server crashes over any other."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)})

    async def checksums(self) -> list[dict[str, str]]:
        """Return for each rank: parameter name -> hash of its bytes."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in answer["ranks"]]

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the answer's JSON ({} when it has none)."""
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
            message = found.get("message") or found.get("error_message") or found.get("error") or text
            raise WeightUpdateError(f"{self.url}{path} answered {status}: {' '.join(str(message).split())[:300]}")
        return found

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        async with self._session.request(method, self.url + path, json=body, timeout=self._timeout) as answer:
            return answer.status, await answer.text()
