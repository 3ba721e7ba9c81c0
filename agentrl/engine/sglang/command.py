"""The flags and variables that an SGLang server is launched with."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import ClassVar

from agentrl.addresses import KEY_VARIABLE
from agentrl.engine.servers.adapters import IN_A_BATCH, LOADED, AdapterNeeds
from agentrl.engine.servers.compilers import cuda_built_for
from agentrl.engine.servers.launch import CACHE_BYTES, Flag, LaunchPlan, Program
from agentrl.models.allocator import without_expandable
from agentrl.plugins.types import Json

SGLANG = Program("sglang", "SGLang", "AGENTRL_SGLANG_VENV", KEY_VARIABLE, ("-m", "sglang.launch_server"))
SIGHT: dict[str, Flag] = {
    "image-processor-backend": "pil",
    "enable-precise-embedding-interpolation": True,
    "mm-preprocess-cache-size-mb": 256,
}
"""Flags with which a server computes of an image what transformers does, from pixels that our image processor makes,
and takes the ids of a prompt as they are."""


@dataclass(frozen=True, slots=True)
class SglangPlan(LaunchPlan):
    """How to launch SGLang servers. On a CPU they take adapters only where the flags have `enable-lora`: SGLang keeps
    adapters in page-locked memory, which a CPU alone does not have (the servers of scripts/sglang_cpu do without)."""

    program: ClassVar[Program] = SGLANG
    """See `LaunchPlan.program`."""

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
            "constrained-json-disable-any-whitespace": True,  # a model that may write any may write it for ever
            "api-key": self.key,
        }
        if not self.cpu:  # by default graphs end at 256 requests where a GPU has 60 to 90 GB
            flags["cuda-graph-max-bs-decode"] = self.flag("max-running-requests") or self.max_batch
        else:
            flags |= {
                "device": "cpu",
                "attention-backend": "torch_native",
                "sampling-backend": "pytorch",
                "grammar-backend": "xgrammar",
                "max-total-tokens": self._cpu_tokens(),
                "sleep-on-idle": True,  # its polling takes a core from the trainer
            }
        if self.part is not None:
            flags |= {"nnodes": self.part.count, "node-rank": self.part.rank, "dist-init-addr": self.part.meeting}
        if self.adapter is not None and self.adapted:
            flags |= _adapter_flags(self.adapter, self.cpu)
        if self.sees:
            flags |= SIGHT
        return flags

    def arguments(self, port: int, index: int) -> list[str]:
        """The command of the recipe with all flags."""
        flags = self._own_flags(port, index) | self._given()
        if not self.cpu:
            flags["base-gpu-id"] = self._first_device(index)
        return [*self.command, *self._words(flags)]

    def _first_device(self, index: int) -> int:
        """The first GPU of server `index`: by the table of the run's devices, or one server after the other."""
        if index < len(self.devices) and self.devices[index]:
            return self.devices[index][0]
        given = self._given()
        return int(given.get("base-gpu-id") or 0) + index * ranks_of(given)

    def _libraries(self, venv: Path) -> list[str]:
        return cuda_libraries(venv) if self._memory_saver else []

    def _variables(self, index: int) -> dict[str, str]:
        # log-probs must be those of the temperature that is asked for
        ours = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "PYTHONUNBUFFERED": "1"}
        if self.cpu:
            ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            if (ranks := ranks_of(self._given())) > 1:  # by itself it places one rank on a NUMA node
                cores = cycle(sorted(os.sched_getaffinity(0)))
                ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(next(cores)) for _ in range(ranks))
        if self.sees:
            ours["SGLANG_VLM_CACHE_SIZE_MB"] = "0"  # it would keep the features of an image over new weights
        if Path(self.model_path).is_dir():
            ours["HF_HUB_OFFLINE"] = "1"
        if self._memory_saver:
            ours |= without_expandable(os.environ)  # the two do not go together
            ours["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # graphs are released too, by the tag `cuda_graph`
            # a restart beside the trainer finds GPUs of unequal free memory
            ours["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        return {**ours, **self.env}

    @property
    def _memory_saver(self) -> bool:
        return bool(self._given().get("enable-memory-saver"))

    def _cpu_tokens(self) -> int:
        return max(self.context, min(self.max_batch * self.context, CACHE_BYTES // max(1, self.token_bytes)))


def _adapter_flags(needs: AdapterNeeds, cpu: bool) -> dict[str, Json]:
    flags = {
        "enable-lora": True,
        "max-lora-rank": needs.rank,
        "lora-target-modules": sorted(needs.targets),
        "max-loaded-loras": LOADED,
        "max-loras-per-batch": IN_A_BATCH,
    }
    return flags | ({"lora-backend": "torch_native"} if cpu else {})


def cuda_libraries(venv: Path) -> list[str]:
    """The folders with the CUDA libraries that pip installed into a virtual environment. The loader does not
    look there for what the hook of SGLang's memory saver needs, which is loaded before anything else (LD_PRELOAD)."""
    found = venv.glob("lib/python*/site-packages/nvidia/*/lib")
    return sorted(str(folder) for folder in found if any(folder.glob("libcudart.so*")))


def memory_saver_fault(venv: Path, environment: Mapping[str, str]) -> str | None:
    """Why processes of SGLang's memory saver would not start there, in the loader's words; None: they do. Tries
    its hooks, those for the CUDA of that torch where they say which they are for."""
    site = next(iter(venv.glob("lib/python*/site-packages")), venv)
    major = cuda_built_for(venv)
    hooks = sorted(site.glob("torch_memory_saver_hook_mode_preload*.so"))
    own = [hook for hook in hooks if major is not None and f"_cu{major}" in hook.name]
    if not hooks:
        return "torch_memory_saver is not installed"
    for hook in own or hooks:
        variables = {**environment, "LD_PRELOAD": str(hook)}
        done = subprocess.run(
            [str(venv / "bin" / "python"), "-c", "pass"], env=variables, capture_output=True, text=True, check=False
        )
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        if done.returncode or any("cannot be preloaded" in line for line in said):
            return said[-1] if said else f"exit code {done.returncode}"
    return None


def ranks_of(flags: Mapping[str, Flag]) -> int:
    """The GPUs of one server: tensor x pipeline parallelism. Raises ValueError for what is no number."""
    return tensors_of(flags) * stages_of(flags)


def tensors_of(flags: Mapping[str, Flag]) -> int:
    """The GPUs that share each layer of a server. Raises ValueError for what is no number."""
    return int(flags.get("tp-size") or flags.get("tp") or flags.get("tensor-parallel-size") or 1)


def stages_of(flags: Mapping[str, Flag]) -> int:
    """The stages of a server's pipeline. Raises ValueError for what is no number."""
    return int(flags.get("pp-size") or flags.get("pp") or flags.get("pipeline-parallel-size") or 1)
