"""The flags and variables that a vLLM server is launched with."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from agentrl.addresses import is_loopback
from agentrl.cluster.placement import VISIBLE, names_of
from agentrl.engine.servers.adapters import IN_A_BATCH, LOADED, AdapterNeeds
from agentrl.engine.servers.launch import (
    CACHE_BYTES,
    Flag,
    Flags,
    LaunchPlan,
    Program,
    flag_words,
    is_container,
    venv_of,
)
from agentrl.engine.vllm.inside.agentrl_guard import KEY_VARIABLE
from agentrl.errors import UserError
from agentrl.plugins.types import Json

VLLM = Program(
    "vllm", "vLLM", "AGENTRL_VLLM_VENV", "AGENTRL_VLLM_KEY", ("-m", "vllm.entrypoints.cli.main", "serve"), "0.32"
)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank may have."""
TRANSFER = {"from_tensor": "ipc", "from_distributed": "nccl"}
"""Transport -> the weight transfer engine that a server is started with for it."""
INSIDE = Path(__file__).parent / "inside"
"""Folder of what servers import of ours."""


@dataclass(frozen=True, slots=True)
class VllmPlan(LaunchPlan):
    """How to launch vLLM servers."""

    program: ClassVar[Program] = VLLM
    """See `LaunchPlan.program`."""

    @property
    def answers(self) -> bool:
        return self.part is None or self.part.rank == 0

    @property
    def adapted(self) -> bool:
        enabled = self._given().get("enable-lora", True)
        return self.adapter is not None and self.adapter.unknown is None and enabled is True

    def _own_flags(self, port: int, index: int) -> dict[str, Flag | list[str]]:
        # those of `serve` that say which log-probs are returned, and open the calls by token ids
        flags: dict[str, Flag | list[str]] = {
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "max-model-len": self.context,
            "max-num-seqs": self.max_batch,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "enable-scale-out": True,
            "disable-uvicorn-access-log": True,
            "api-key": self.key,
            # a model that may write any white space may write it for ever
            "structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
        }
        if self.part is not None:
            address, _, meeting_port = self.part.meeting.rpartition(":")
            flags |= {"nnodes": self.part.count, "node-rank": self.part.rank, "headless": not self.answers}
            flags |= {"master-addr": address.strip("[]"), "master-port": meeting_port}
        if self.key is not None:
            flags["middleware"] = "agentrl_guard.RequireKey"
        if self._packs_again:
            flags["worker-extension-cls"] = "agentrl_worker.Reload"
        if self.cpu:
            flags |= {"enforce-eager": True, "kv-cache-memory-bytes": self._cache_bytes()}
        else:
            flags["enable-sleep-mode"] = True
            if engine := self._transfer:
                flags["weight-transfer-config"] = json.dumps({"backend": engine})
        if self.adapter is not None and self.adapted:
            flags |= _adapter_flags(self.adapter)
        if self.sees:
            flags["mm-processor-cache-gb"] = 0  # it is given all pixels with each prompt
        return flags

    def _words(self, flags: Flags) -> list[str]:
        return [self._model(), *flag_words(flags)]

    def _variables(self, index: int) -> dict[str, str]:
        ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if self.cpu:
            ours |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            ours["TORCHDYNAMO_DISABLE"] = "1"  # compiling its sampler takes up to 40 seconds
        elif VISIBLE not in self.env:
            ours[VISIBLE] = ",".join(names_of(self._devices(index)))
        if self.part is not None:
            ours["VLLM_HOST_IP"] = self.host  # by which the other parts reach this one
        if self._transfer == "ipc":
            ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its calls carry pickled handles of GPU memory
        if Path(self.model_path).is_dir():
            ours["HF_HUB_OFFLINE"] = "1"
        if self.adapted:
            ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.key is not None:
            if is_container(self.command):
                raise UserError(
                    "engine vllm: a server in a container that listens on a network cannot be guarded by a key; start "
                    "it yourself behind a network of your own, and name it in engine.args.urls"
                )
            ours[KEY_VARIABLE] = self.key
        if self.key is not None or self._packs_again:
            beside = os.environ.get("PYTHONPATH") if venv_of(self.command) is None else None
            ours["PYTHONPATH"] = os.pathsep.join([str(INSIDE), *filter(None, [beside])])
        return {**ours, **self.env}

    @property
    def _transfer(self) -> str | None:
        """The weight transfer engine of a server, which takes GPUs. Where the recipe does not say, it opens memory of a
        GPU that it shares with a worker, or joins a group where the cluster has other machines: they do not see our
        folder."""
        if self.cpu or self.weights != "auto":
            return None if self.cpu else TRANSFER.get(self.weights)
        if self.fed:
            return TRANSFER["from_tensor"]
        return None if is_loopback(self.host) else TRANSFER["from_distributed"]

    @property
    def _packs_again(self) -> bool:
        """Whether our worker extension is needed, and can be imported."""
        return self.cpu and not is_container(self.command)

    def _devices(self, index: int) -> Sequence[int]:
        """The GPUs of server `index`: by the table of the run's devices, or one server after the other."""
        if index < len(self.devices) and self.devices[index]:
            return self.devices[index]
        each = gpus_of(self._given())
        return range(index * each, (index + 1) * each)

    def _cache_bytes(self) -> int:
        """Room for the keys and values of all requests, or CACHE_BYTES where that is less."""
        one = self.context * self.token_bytes
        return max(2 * one, min(self.max_batch * one, CACHE_BYTES))


def _adapter_flags(needs: AdapterNeeds) -> dict[str, Flag]:
    rank = next((rank for rank in LORA_RANKS if rank >= needs.rank), needs.rank)
    return {"enable-lora": True, "max-lora-rank": rank, "max-loras": IN_A_BATCH, "max-cpu-loras": LOADED}


def gpus_of(flags: Mapping[str, Json]) -> int:
    """How many GPUs a server with these flags takes. Raises ValueError for one that is no number."""
    names = (("tensor-parallel-size", "tp"), ("pipeline-parallel-size", "pp"), ("data-parallel-size", "dp"))
    count = 1
    for long, short in names:
        count *= int(flags.get(long) or flags.get(short) or 1)
    return count
