"""The flags and variables that an SGLang server is launched with."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from agentrl.engine.servers.adapters import IN_A_BATCH, LOADED, AdapterNeeds
from agentrl.engine.servers.launch import CACHE_BYTES, Flag, LaunchPlan, Program
from agentrl.weights.addresses import KEY_VARIABLE
from agentrl.weights.transports.shared_memory import without_expandable

SGLANG = Program("sglang", "SGLang", "AGENTRL_SGLANG_VENV", KEY_VARIABLE, ("-m", "sglang.launch_server"))


@dataclass(frozen=True, slots=True)
class SglangPlan(LaunchPlan):
    """How to launch SGLang servers. On a CPU they take adapters only where the flags have `enable-lora`: SGLang keeps
    adapters in page-locked memory, which a CPU alone does not have (the servers of scripts/sglang_cpu do without)."""

    program: ClassVar[Program] = SGLANG

    @property
    def adapted(self) -> bool:
        enabled = self._given().get("enable-lora", not self.cpu)
        return self.adapter is not None and self.adapter.unknown is None and enabled is True

    def _own_flags(self, port: int, index: int) -> dict[str, Flag | list[str]]:
        flags: dict[str, Flag | list[str]] = {
            "model-path": self._model(),
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "weight-version": "0",
            "max-running-requests": self.max_batch,
            "incremental-streaming-output": True,
            "skip-server-warmup": True,
            "api-key": self.key,
        }
        if self.cpu:
            flags |= {
                "device": "cpu",
                "attention-backend": "torch_native",
                "sampling-backend": "pytorch",
                "grammar-backend": "none",
                "max-total-tokens": self._cpu_tokens(),
                "sleep-on-idle": True,  # its polling takes a core from the trainer
            }
        if self.adapter is not None and self.adapted:
            flags |= _adapter_flags(self.adapter, self.cpu)
        given = self._given()
        if not self.cpu and index and "base-gpu-id" not in given:
            flags["base-gpu-id"] = index * int(given.get("tp-size") or given.get("tp") or 1)
        return flags

    def _variables(self, index: int) -> dict[str, str]:
        # log-probs must be those of the temperature that is asked for
        ours = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "PYTHONUNBUFFERED": "1"}
        if self.cpu:
            ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if Path(self.model_path).is_dir():
            ours["HF_HUB_OFFLINE"] = "1"
        if self._given().get("enable-memory-saver"):  # the two do not go together
            ours |= without_expandable(os.environ)
        return {**ours, **self.env}

    def _cpu_tokens(self) -> int:
        return max(self.context, min(self.max_batch * self.context, CACHE_BYTES // max(1, self.token_bytes)))


def _adapter_flags(needs: AdapterNeeds, cpu: bool) -> dict[str, Any]:
    flags = {
        "enable-lora": True,
        "max-lora-rank": needs.rank,
        "lora-target-modules": sorted(needs.targets),
        "max-loaded-loras": LOADED,
        "max-loras-per-batch": IN_A_BATCH,
    }
    return flags | ({"lora-backend": "torch_native"} if cpu else {})
