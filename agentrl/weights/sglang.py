"""`SglangServer`: an SGLang server's calls about weights."""

from collections.abc import Mapping, Sequence

from agentrl.plugins.types import Json
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import Facts, Layout, PauseMode, WeightServer


class SglangServer(WeightServer):
    """Of SGLang 0.5."""

    async def facts(self) -> Facts:
        """What the server tells about itself; asked once. Raises WeightUpdateError for a pipeline: its first
        stage answers before the others are told to load (`event_loop_pp`), and the same rank of each stage would open
        one bucket, or join a group as one member."""
        if self._facts is None:
            info = await self._call("GET", "/server_info", None)
            if int(info.get("pp_size") or 1) > 1:
                raise WeightUpdateError(
                    f"{self.url} answers before all stages of its pipeline have loaded: use tp-size"
                )
            self._facts = Facts(
                device=str(info.get("device")),
                dtype=str(info.get("dtype")),
                ranks=int(info.get("tp_size", 1)),
                quantized=info.get("quantization") is not None,
                version=str(info.get("version")),
                lora=bool(info.get("enable_lora")),
                adapters=info.get("max_loaded_loras"),
                machines=int(info.get("nnodes") or 1),
            )
        return self._facts

    async def transport(self, near: bool, fed: bool = False) -> tuple[str, str]:
        """See `WeightServer.transport`."""
        if fed:
            return "from_tensor", "each rank of a server shares a GPU, or a machine's memory, with one of the trainer's"
        if (machines := (await self.facts()).machines) > 1:
            return "from_distributed", f"{self.url} computes on {machines} machines"
        if near:
            return "from_tensor", "servers share this machine's memory"
        return "from_distributed", f"{self.url} does not share this machine's memory"

    async def pause(self, mode: PauseMode) -> None:
        """Treat requests in flight as `mode` says; new ones wait until `resume`."""
        await self._post("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def begin(self) -> None:
        """Open an update. One that an earlier failure left open will do: all that it holds is overwritten."""
        try:
            await self._post("/begin_weight_update", {})
        except WeightUpdateError as error:
            if "already open" not in str(error):
                raise

    async def end(self) -> None:
        await self._post("/end_weight_update", {})

    async def load_tensors(self, payloads: Sequence[str], flush: bool) -> None:
        """Load a bucket. payloads: base64, a pickled flattened bucket for each rank. flush: drop the caches."""
        body = {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket", "flush_cache": flush}
        await self._post("/update_weights_from_tensor", body)

    async def load_folder(self, folder: str, flush: bool) -> None:
        """Load *.safetensors of the whole model from `folder`, a path that the server can read."""
        # `auto` also where it started with dummy weights
        body = {"model_path": folder, "load_format": "auto", "flush_cache": flush}
        await self._post("/update_weights_from_disk", body)

    async def join_group(self, host: str, port: int, first_rank: int, world: int, name: str, backend: str) -> None:
        """Join a process group whose rank 0 is at `host`, with ranks from `first_rank` on. Returns once all of `world`
        have joined."""
        address = {"master_address": host, "master_port": port, "rank_offset": first_rank, "world_size": world}
        await self._post("/init_weights_update_group", {**address, "group_name": name, "backend": backend})

    async def leave_group(self, name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def load_broadcast(self, layout: Layout, group: str, flush: bool) -> None:
        """Load tensors that rank 0 of `group` broadcasts, one after the other in one tensor of bytes."""
        names, dtypes, shapes = zip(*layout, strict=True)
        kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        body = {"names": names, "dtypes": kinds, "shapes": shapes, "group_name": group, "flush_cache": flush}
        body["load_format"] = "flattened_bucket"  # one broadcast
        await self._post("/update_weights_from_distributed", body)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from `folder`, as PEFT saves one, a path that the server can read."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def load_adapter_tensors(self, name: str, config: Mapping[str, Json], payload: str) -> None:
        """Load an adapter by value. config: PEFT's adapter_config.json. payload: base64, the pickled tensors by PEFT's
        names."""
        ranks = (await self.facts()).ranks  # each reads its own copy
        body = {"lora_name": name, "config_dict": dict(config), "serialized_named_tensors": [payload] * ranks}
        await self._post("/load_lora_adapter_from_tensors", body)

    async def drop_adapter(self, name: str) -> None:
        """Unload an adapter. Returns once the requests that sample from it have ended."""
        await self._post("/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def version(self) -> str:
        return str((await self._call("GET", "/model_info", None)).get("weight_version"))

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; what it held is lost. A server that is not paused crashes over this."""
        await self._post("/release_memory_occupation", {"tags": list(tags)})

    async def take_memory(self, tags: Sequence[str]) -> None:
        """Take back the memory of tags that were released; a server crashes over any other."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)})

    async def checksums(self) -> list[dict[str, str]]:
        """For each rank: parameter name -> hash of its bytes."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in answer["ranks"]]
