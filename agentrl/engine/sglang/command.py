"""The command line that launches a server: from a virtual environment, or as the recipe says, such as `docker run ...
IMAGE COMMAND`; and its flags."""

import os
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.engine.sglang.adapters import AdapterNeeds
from agentrl.errors import UserError
from agentrl.weights.addresses import LOOPBACK
from agentrl.weights.transports.shared_memory import without_expandable

VENV_VARIABLE = "AGENTRL_SGLANG_VENV"
CACHE_BYTES = 1 << 30
"""Memory for the keys and values of a server on a CPU, unless the flag `max-total-tokens` says otherwise: its default
is a large part of the machine's memory, which takes a minute to allocate."""
Flag = str | int | float | bool | None
Flags = Mapping[str, Flag | list[str]]
RUNTIMES = ("docker", "podman", "nerdctl")
OURS_ALONE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this process that belong to its own Python."""
LIBRARY_PATH = "LD_LIBRARY_PATH"
_CUDA = re.compile(r"""cuda[^=\n]*=\s*['"](\d+)\.""")
_RUN = "run"
_CONTAINER_OPTIONS = {"--rm": (), "--init": (), "--network": ("--net",)}
"""Options that are added unless the recipe gives them -> their other names."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to launch servers."""

    command: tuple[str, ...]
    """Words up to the flags."""
    model_path: str
    """What the server loads: a folder, or a name of the hub."""
    dtype: str
    """Of the weights, such as `bfloat16`."""
    flags: Mapping[str, Flag]
    """The recipe's flags, which come over ours."""
    max_batch: int
    """Requests that are decoded at once."""
    token_bytes: int
    """Bytes of keys and values a token, in float32."""
    context: int
    """Tokens of prompt and answer together."""
    cpu: bool
    """Whether there is no accelerator."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The recipe's environment variables, which come over ours."""
    adapter: AdapterNeeds | None = None
    """The adapter that servers are to take; on a CPU only where the flags have `enable-lora`: SGLang keeps adapters in
    page-locked memory, which a CPU alone does not have (the servers of scripts/sglang_cpu do without)."""
    listen: str = LOOPBACK
    """Address to listen on, unless the flags name a `host`."""
    key: str | None = None
    """Key that servers ask callers for."""
    devices: Sequence[Sequence[int]] = ()
    """The GPUs of each server, neighbours, as this process counts them; empty: from the first on."""
    grace: float = 0.0
    """Seconds between asking a server to end and killing it. SGLang only waits in them."""

    @property
    def host(self) -> str:
        return self.flag("host") or self.listen

    def flag(self, name: str) -> str | None:
        """Return the recipe's value of a flag."""
        value = self._given().get(name)
        return None if value is None else str(value)

    @property
    def adapted(self) -> bool:
        """Whether the servers take the run's adapter."""
        enabled = self._given().get("enable-lora", not self.cpu)
        return self.adapter is not None and self.adapter.unknown is None and enabled is True

    def launch(self, port: int, index: int) -> tuple[list[str], list[str]]:
        """Return the whole command of server `index` (0, 1, ...) on `port`, and the one that removes what outlives
        it."""
        words = self.arguments(port, index)
        return contained(words, self._variables(), self.model_path) if is_container(words) else (words, [])

    def arguments(self, port: int, index: int) -> list[str]:
        """Return the command of the recipe with all flags."""
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
        if not self.cpu:
            given["base-gpu-id"] = self._first_device(index)
        return [*self.command, *_flags(flags | given)]

    def _first_device(self, index: int) -> int:
        """Return the first GPU of server `index`: by the table of the run's devices, or one server after the other."""
        if index < len(self.devices) and self.devices[index]:
            return self.devices[index][0]
        given = self._given()
        return int(given.get("base-gpu-id") or 0) + index * ranks_of(given)

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the server's variables. One of a virtual environment gets that of its
        own in place of ours: it compiles kernels with what is on PATH."""
        inherited = dict(os.environ)
        if (venv := venv_of(self.command)) is not None:
            inherited = {name: value for name, value in inherited.items() if name not in OURS_ALONE}
            inherited["VIRTUAL_ENV"] = str(venv)
            inherited["PATH"] = os.pathsep.join([str(venv / "bin"), *filter(None, [inherited.get("PATH")])])
            if self._memory_saver:
                libraries = [*cuda_libraries(venv), *filter(None, [inherited.get(LIBRARY_PATH)])]
                inherited |= {LIBRARY_PATH: os.pathsep.join(libraries)} if libraries else {}
        return {**inherited, **self._variables()}

    def _variables(self) -> dict[str, str]:
        # log-probs must be those of the temperature that is asked for
        ours = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "PYTHONUNBUFFERED": "1"}
        if self.cpu:
            ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
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

    def _given(self) -> dict[str, Flag]:
        return plain_flags(self.flags)

    def _cpu_tokens(self) -> int:
        return max(self.context, min(self.max_batch * self.context, CACHE_BYTES // max(1, self.token_bytes)))


def venv_of(command: Sequence[str]) -> Path | None:
    """Return the virtual environment whose Python these words start, as `launch_command` writes them; None: another
    program."""
    program = Path(command[0])
    is_venv = program.name.startswith("python") and (program.parent.parent / "pyvenv.cfg").is_file()
    return program.parent.parent if is_venv else None


def cuda_libraries(venv: Path) -> list[str]:
    """Return the folders with the CUDA libraries that pip installed into a virtual environment. The loader does not
    look there for what the hook of SGLang's memory saver needs, which is loaded before anything else (LD_PRELOAD)."""
    found = venv.glob("lib/python*/site-packages/nvidia/*/lib")
    return sorted(str(folder) for folder in found if any(folder.glob("libcudart.so*")))


def memory_saver_fault(venv: Path, environment: Mapping[str, str]) -> str | None:
    """Return why processes of SGLang's memory saver would not start there, in the loader's words; None: they do. Tries
    its hooks, those for the CUDA of that torch where they say which they are for."""
    site = next(iter(venv.glob("lib/python*/site-packages")), venv)
    version = site / "torch" / "version.py"
    major = _CUDA.search(version.read_text(encoding="utf-8")) if version.is_file() else None
    hooks = sorted(site.glob("torch_memory_saver_hook_mode_preload*.so"))
    own = [hook for hook in hooks if major is not None and f"_cu{major[1]}" in hook.name]
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


def nccl_version(venv: Path) -> tuple[int, ...]:
    """Return the version of NCCL that torch has in a virtual environment; empty: it has none, or does not say."""
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", "import torch; print(*torch.cuda.nccl.version())"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    words = done.stdout.split()
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def plain_flags(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Return flags by their names as SGLang writes them: `tp_size` and `--tp-size` are `tp-size`."""
    return {key.replace("_", "-").removeprefix("--"): value for key, value in flags.items()}


def ranks_of(flags: Mapping[str, Flag]) -> int:
    """Return the GPUs of one server: tensor x pipeline parallelism. Raises ValueError for what is no number."""
    tensor = flags.get("tp-size") or flags.get("tp") or flags.get("tensor-parallel-size") or 1
    pipeline = flags.get("pp-size") or flags.get("pp") or flags.get("pipeline-parallel-size") or 1
    return int(tensor) * int(pipeline)


def _flags(flags: Flags) -> list[str]:
    """Return the words of flags; `true` is a flag without a value, `false` and `null` leave one out."""
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
    """Return the words that start a server, up to its flags. Raises UserError where nothing says what does, or it is
    not there."""
    if command is not None:
        words = shlex.split(command)
        if not words or shutil.which(words[0]) is None:
            raise UserError(f"engine.args.command: there is no program {' '.join(words[:1])!r}")
        if is_container(words):
            check_container(words)
        return tuple(words)
    folder = venv or os.environ.get(VENV_VARIABLE)
    if not folder:
        raise UserError(
            "engine sglang: say where servers run (engine.args.urls), or what launches one: engine.args.venv or "
            f"{VENV_VARIABLE}, a virtual environment that holds SGLang, or engine.args.command"
        )
    python = Path(folder).expanduser() / "bin" / "python"
    if not python.exists():
        source = "engine.args.venv" if venv else VENV_VARIABLE
        raise UserError(f"{source}: {folder} is not a virtual environment (it has no bin/python)")
    return str(python), "-m", "sglang.launch_server"


def sizes_of(model: Any) -> tuple[int, int]:
    """Return (bytes of keys and values a token in float32, context in tokens) of a transformers model."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = getattr(config, "max_position_embeddings", None) or 4096
    return 2 * 4 * config.num_hidden_layers * heads * size, context


def is_container(command: Sequence[str]) -> bool:
    """Return whether these words run a container."""
    return Path(command[0]).name in RUNTIMES and _RUN in command[1:]


def check_container(command: Sequence[str]) -> None:
    """Raise UserError for options with which a server could not be ended."""
    given = _options(command)
    if "--name" in given:
        raise UserError("engine.args.command: leave --name out; each server's container is given a name of its own")
    if found := given & {"-d", "--detach"}:
        raise UserError(f"engine.args.command: leave {min(found)} out; a run keeps its servers' output, and ends them")


def contained(command: Sequence[str], variables: Collection[str], model_path: str) -> tuple[list[str], list[str]]:
    """Return the words that start a container, and those that remove it, which is needed because it does not end with
    the client that started it.

    The container shares the network of its machine, gets `variables` of the client's environment, and sees a model
    folder by the same path.
    """
    at = command.index(_RUN, 1) + 1
    given, name = _options(command), f"agentrl_{uuid.uuid4().hex[:12]}"
    added = ["--name", name]
    for option, others in _CONTAINER_OPTIONS.items():
        if not given & {option, *others}:
            added.append("--network=host" if option == "--network" else option)
    for variable in variables:
        added += ["--env", variable]
    if (folder := Path(model_path)).is_dir():
        added += ["--volume", f"{folder.absolute()}:{folder.absolute()}:ro"]
    return [*command[:at], *added, *command[at:]], [*command[: at - 1], "rm", "--force", name]


def _options(command: Sequence[str]) -> set[str]:
    """Return the names of the options in a command."""
    return {word.partition("=")[0] for word in command if word.startswith("-")}
