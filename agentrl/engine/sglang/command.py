"""The command line that launches a server: of a virtual environment, or whatever the recipe says, and its flags."""

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.engine.sglang.adapters import AdapterNeeds
from agentrl.engine.sglang.container import check_container, contained, is_container
from agentrl.errors import UserError
from agentrl.weights.reach import LOOPBACK
from agentrl.weights.transports.segments import without_expandable

VENV_VARIABLE = "AGENTRL_SGLANG_VENV"
CACHE_BYTES = 1 << 30
"""What the keys and values of a server on a CPU may take, unless the flag `max-total-tokens` says otherwise: left alone
it takes a large part of the machine's memory, and a minute to do so."""
Flag = str | int | float | bool | None
Flags = Mapping[str, Flag | list[str]]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to launch servers. command: up to the flags. flags: the recipe's, over ours. cpu: there is no accelerator.
    adapter: what they are to take adapters for; on a CPU only where the flags have `enable-lora`: SGLang keeps adapters
    in page-locked memory, which a CPU alone has not (the servers of scripts/sglang_cpu do without). listen: the address
    that they listen on, unless the flags name a `host`. key: what they ask of whoever calls them. grace: seconds from
    asking them to end to killing them; what SGLang itself does in them is to wait."""

    command: tuple[str, ...]
    model_path: str
    dtype: str
    flags: Mapping[str, Flag]
    max_batch: int
    token_bytes: int  # of keys and values, float32
    context: int
    cpu: bool
    env: Mapping[str, str] = field(default_factory=dict)
    adapter: AdapterNeeds | None = None
    listen: str = LOOPBACK
    key: str | None = None
    grace: float = 0.0

    @property
    def host(self) -> str:
        return self.flag("host") or self.listen

    def flag(self, name: str) -> str | None:
        """What the recipe gives a flag with a value."""
        value = self._given().get(name)
        return None if value is None else str(value)

    @property
    def adapted(self) -> bool:
        """Whether the servers take the run's adapter."""
        wanted = self._given().get("enable-lora", not self.cpu)
        return self.adapter is not None and self.adapter.unknown is None and wanted is True

    def launch(self, port: int, index: int) -> tuple[list[str], list[str]]:
        """The whole command of server `index` (0, 1, ...) on `port`, and the one that removes what outlives it."""
        words = self.arguments(port, index)
        return contained(words, self._variables(), self.model_path) if is_container(words) else (words, [])

    def arguments(self, port: int, index: int) -> list[str]:
        """What the recipe starts it with, and its flags."""
        flags: dict[str, Flag | list[str]] = {
            "model-path": str(Path(self.model_path).absolute()) if Path(self.model_path).is_dir() else self.model_path,
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
            flags |= self.adapter.flags(self.cpu)
        given = self._given()
        if not self.cpu and index and "base-gpu-id" not in given:
            flags["base-gpu-id"] = index * int(given.get("tp-size") or given.get("tp") or 1)
        return [*self.command, *_flags(flags | given)]

    def environment(self) -> dict[str, str]:
        """Ours, with what the server wants."""
        return {**os.environ, **self._variables()}

    def _variables(self) -> dict[str, str]:
        """Log-probs must be those of the temperature that is asked for."""
        ours = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "PYTHONUNBUFFERED": "1"}
        if self.cpu:
            ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if Path(self.model_path).is_dir():
            ours["HF_HUB_OFFLINE"] = "1"
        if self._given().get("enable-memory-saver"):  # the two do not go together
            ours |= without_expandable(os.environ)
        return {**ours, **self.env}

    def _given(self) -> dict[str, Flag]:
        return {key.replace("_", "-").removeprefix("--"): value for key, value in self.flags.items()}

    def _cpu_tokens(self) -> int:
        return max(self.context, min(self.max_batch * self.context, CACHE_BYTES // max(1, self.token_bytes)))


def _flags(flags: Flags) -> list[str]:
    """`true` is a flag without a value; `false` and `null` leave one out."""
    words = []
    for key, value in flags.items():
        if value is True:
            words.append(f"--{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *value]
        elif value is not None and value is not False:
            words += [f"--{key}", str(value)]
    return words


def launch_command(command: str | None, venv: str | None) -> tuple[str, ...]:
    """What starts a server, up to its flags. Raises UserError where nothing says what does, or it is not there."""
    if command is not None:
        words = shlex.split(command)
        if not words or shutil.which(words[0]) is None:
            raise UserError(f"engine.args.command: there is no program {' '.join(words[:1])!r}")
        if is_container(words):
            check_container(words)
        return tuple(words)
    place = venv or os.environ.get(VENV_VARIABLE)
    if not place:
        raise UserError(
            "engine sglang: say where servers run (engine.args.urls), or what launches one: engine.args.venv or "
            f"{VENV_VARIABLE}, a virtual environment that holds SGLang, or engine.args.command"
        )
    python = Path(place).expanduser() / "bin" / "python"
    if not python.exists():
        source = "engine.args.venv" if venv else VENV_VARIABLE
        raise UserError(f"{source}: {place} is no virtual environment (it has no bin/python)")
    return str(python), "-m", "sglang.launch_server"


def sizes_of(model: Any) -> tuple[int, int]:
    """(bytes of keys and values a token in float32, context in tokens) by a transformers model's configuration."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = getattr(config, "max_position_embeddings", None) or 4096
    return 2 * 4 * config.num_hidden_layers * heads * size, context
