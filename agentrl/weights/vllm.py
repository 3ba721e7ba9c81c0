"""`VllmServer`: a vLLM server's calls about weights (its routes for RL, which VLLM_SERVER_DEV_MODE=1 opens).

Weights come from a folder, by a call that every worker executes, or by the weight transfer engine that the server was
started with (`--weight-transfer-config`): `ipc` opens memory of the trainer's GPU, `nccl` joins a group with it. Those
two follow the protocol of vLLM 0.32, and its own code reads them in the tests; neither was tried on a GPU.
"""

import base64
import hashlib
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.cuda import nccl as _nccl

from agentrl.plugins.types import Json
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import Facts, Layout, PauseMode, WeightServer

nccl: Any = _nccl  # torch leaves it untyped
LOOSE_HASH = 16
"""Characters of a hash that are compared."""
TAGS = ("weights", "kv_cache")
"""What it releases and takes back; its graphs stay."""
_OF_NOTHING = hashlib.sha256().hexdigest()
_LORA_LAYER = ".base_layer."
UNTRIED = "not tried on a GPU by us"
_PACKAGE = re.compile(r"nvidia-nccl-cu\d+(?:==|\s+)(\d+\.\d+\.\d+)")


class VllmServer(WeightServer):
    """A server without adapters of its own accord: it knows them by name, and reads each from its folder again when it
    has put it out of its cache."""

    in_memory = True
    shows_all = False  # on a CPU linear layers are packed, and their parameters empty
    joins_by_id = True
    reads_adapters_again = True

    async def facts(self) -> Facts:
        if self._facts is None:
            info = await self._call("GET", "/server_info?config_format=json", None)
            self._facts = facts_in(info)
        return self._facts

    async def transport(self, near: bool, fed: bool = False) -> tuple[str, str]:
        facts = await self.facts()
        engine, near = facts.transfer, near and facts.machines == 1
        if engine == "ipc" and (fed or (near and facts.ranks == 1)):
            return "from_tensor", f"servers open memory of the trainer's GPU; {UNTRIED}"
        apart = await self._apart()
        if engine == "nccl" and apart is None:
            return "from_distributed", f"servers were started with the weight transfer engine nccl; {UNTRIED}"
        if near:
            return "from_disk", "through a folder, which servers of this machine read"
        start = apart if engine == "nccl" else """start it with --weight-transfer-config '{"backend": "nccl"}'"""
        several = f"computes on {facts.machines} machines"
        lacking = several if facts.machines > 1 else "does not see this machine's files"
        raise WeightUpdateError(
            f"{self.url} {lacking}: {start}, or share a folder (TMPDIR) and say engine.args.weights=from_disk"
        )

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause?mode=abort" if mode is PauseMode.ABORT else "/pause?mode=keep", {})

    async def resume(self) -> None:
        await self._post("/resume", {})

    async def begin(self) -> None:
        await self._post("/start_weight_update", {})

    async def end(self) -> None:
        await self._post("/finish_weight_update", {})

    async def load_folder(self, folder: str, flush: bool) -> None:
        if (await self.facts()).device == "cpu":
            await self._reload_on_cpu(folder)
        else:
            await self._rpc("reload_weights", weights_path=folder)
        await self._drop_caches(flush)

    async def load_packed(self, layout: Layout, handles: Sequence[tuple[object, ...]], flush: bool) -> None:
        """Load tensors that lie one after the other in memory of its own GPUs; it has copied them when it answers.
        handles: of `shared_memory.exported`, one for each rank, which finds its own by its GPU; equal ones in one
        update are opened once."""
        info = {
            **_names(layout),
            "tensor_sizes": [math.prod(shape) * dtype.itemsize for _, dtype, shape in layout],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps({handle[6]: handle for handle in handles})).decode(),
        }
        await self._post("/update_weights", {"update_info": info})
        await self._drop_caches(flush)

    async def open_packed(self) -> None:
        """Tell it that tensors come packed (`load_packed`)."""
        await self._post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    async def join_nccl(self, unique_id: bytes, first_rank: int, world: int) -> None:
        """Join the NCCL group of `unique_id`, with ranks from `first_rank` on. Returns once all of `world` have."""
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": first_rank, "world_size": world,
            "packed": False,
        }  # fmt: skip
        await self._post("/init_weight_transfer_engine", {"init_info": info})

    async def check_nccl(self) -> None:
        if (why := await self._apart()) is not None:
            raise WeightUpdateError(f"{self.url}: {why}; set engine.args.weights=from_disk")

    async def _apart(self) -> str | None:
        """Why no NCCL group of it and this process can be formed, None: nothing is known against it."""
        theirs, ours = (await self.facts()).nccl, own_nccl()
        if theirs is None or ours is None or theirs == ours:
            return None
        return f"NCCL is {theirs} there and {ours} here, which do not connect"

    async def leave_group(self, name: str) -> None:
        await self._post("/shutdown_weight_transfer_engine", {})

    async def load_broadcast(self, layout: Layout, group: str, flush: bool) -> None:
        await self._post("/update_weights", {"update_info": _names(layout)})
        await self._drop_caches(flush)

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def load_adapter_tensors(self, name: str, config: Mapping[str, Json], payload: str) -> None:
        raise WeightUpdateError(f"{self.url} reads adapters from folders only, and does not see this machine's files")

    async def drop_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version})

    async def version(self) -> str:
        return str((await self._call("GET", "/weight_info", None)).get("weight_version"))

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`. What is computed of requests in flight is dropped first: they are computed
        again from their tokens."""
        await self._drop_caches(True)
        if "weights" in tags:
            await self._post("/sleep?level=2&mode=keep", {})
        else:
            await self._post("/release_kv_cache_memory", {})

    async def take_memory(self, tags: Sequence[str]) -> None:
        if own := [tag for tag in tags if tag in TAGS]:
            await self._post("/wake_up?" + "&".join(f"tags={tag}" for tag in own), {})

    async def checksums(self) -> list[dict[str, str]]:
        found: Mapping[str, str] = (await self._post("/weight_checker", {"action": "checksum"}))["checksums"]
        pairs = sorted((*key.rpartition(":")[::2], value) for key, value in found.items() if value != _OF_NOTHING)
        return [
            {name.replace(_LORA_LAYER, "."): value[:LOOSE_HASH] for _, name, value in rank}
            for _, rank in groupby(pairs, key=lambda pair: pair[0])
        ]

    async def _drop_caches(self, flush: bool) -> None:
        """Drop the keys and values of the old weights, those of requests in flight too, which wait."""
        if flush:
            await self._post("/reset_prefix_cache?reset_running_requests=true", {})
            if (await self.facts()).sees:
                await self._post("/reset_encoder_cache", {})

    async def _reload_on_cpu(self, folder: str) -> None:
        """Have it load by our own method: its own leaves an output layer that shares the embedding's weights as it
        was."""
        try:
            await self._rpc("agentrl_reload", weights_path=folder)
        except WeightUpdateError as error:
            if "agentrl_reload" not in str(error):
                raise
            raise WeightUpdateError(
                f"{self.url} on a CPU takes no new weights: start it with --worker-extension-cls agentrl_worker.Reload "
                "(scripts/vllm_cpu/serve shows how)"
            ) from error

    async def _rpc(self, method: str, **arguments: str) -> None:
        await self._post("/collective_rpc", {"method": method, "kwargs": arguments})


def facts_in(info: Mapping[str, Json]) -> Facts:
    """Read the answer of /server_info, asked for as JSON. Raises WeightUpdateError where it is not one."""
    try:
        config = info["vllm_config"]
        model, parallel, lora = config["model_config"], config["parallel_config"], config.get("lora_config")
        transfer = (config.get("weight_transfer_config") or {}).get("backend")
        return Facts(
            device="cpu" if str(config["device_config"]["device"]) == "cpu" else "cuda",
            dtype=str(model["dtype"]).removeprefix("torch."),
            ranks=int(parallel["world_size"]),
            quantized=model.get("quantization") is not None,
            version=str(info.get("version", "")),
            lora=lora is not None,
            sees=model.get("multimodal_config") is not None,
            adapters=None if lora is None else lora.get("max_cpu_loras"),
            transfer=None if transfer is None else str(transfer),
            nccl=_nccl_in(info.get("system_env")),
            machines=int(parallel.get("nnodes") or 1),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"its /server_info is not that of vLLM: {error!r}") from error


def own_nccl() -> str | None:
    """The version of NCCL in this process, None: it has none."""
    return ".".join(map(str, nccl.version()[:3])) if torch.cuda.is_available() else None


def _nccl_in(system: object) -> str | None:
    """Find NCCL's version among the packages that a server lists."""
    packages = system.get("pip_packages") if isinstance(system, Mapping) else None
    found = _PACKAGE.search(packages) if isinstance(packages, str) else None
    return None if found is None else found[1]


def _names(layout: Layout) -> dict[str, Json]:
    names, dtypes, shapes = zip(*layout, strict=True)
    return {
        "names": names,
        "dtype_names": [str(dtype).removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
    }
