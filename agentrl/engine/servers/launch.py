"""The command line that launches a server: from a virtual environment, or as the recipe says, such as `docker run ...
IMAGE COMMAND`; and its flags."""

import os
import shlex
import shutil
import subprocess
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from agentrl.addresses import LOOPBACK
from agentrl.engine.servers.adapters import AdapterNeeds
from agentrl.errors import UserError
from agentrl.models.shape import context_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_BYTES = 1 << 30
"""Memory for the keys and values of a server on a CPU, unless a flag of the recipe says otherwise: by default servers
take a large part of the machine's memory, which takes a minute to allocate."""
Flag = str | int | float | bool | None
Flags = Mapping[str, Flag | list[str]]
RUNTIMES = ("docker", "podman", "nerdctl")
OURS_ALONE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this process that belong to its own Python."""
LIBRARY_PATH = "LD_LIBRARY_PATH"
_RUN = "run"
_CONTAINER_OPTIONS = {"--rm": (), "--init": (), "--network": ("--net",)}
"""Options that are added unless the recipe gives them -> their other names."""


@dataclass(frozen=True, slots=True)
class Program:
    """A product that serves models."""

    name: str
    """Of its engine."""
    title: str
    """For people."""
    venv_variable: str
    """Environment variable that names a virtual environment with it."""
    key_variable: str
    """Environment variable with the key of servers that already run."""
    module: tuple[str, ...]
    """Arguments of Python that start a server, up to its flags."""
    release: str = ""
    """Version that an environment has to hold, as far as it matters; empty: any."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine has of a server that computes on several."""

    rank: int
    """0 answers requests."""
    count: int
    """Machines of the server."""
    meeting: str
    """HOST:PORT on the machine of rank 0, where they meet."""


@dataclass(frozen=True, slots=True)
class LaunchPlan(ABC):
    """How to launch servers of one kind."""

    program: ClassVar[Program]
    """What is launched."""

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
    """The adapter that servers are to take."""
    listen: str = LOOPBACK
    """Address to listen on, unless the flags name a `host`."""
    key: str | None = None
    """Key that servers ask callers for."""
    devices: Sequence[Sequence[int]] = ()
    """The GPUs of each server, neighbours, as this process counts them; empty: from the first on."""
    weights: str = "auto"
    """How weights are to be sent, as the recipe says."""
    fed: bool = False
    """Whether each of their ranks shares its GPU with a worker of the trainer."""
    sees: bool = False
    """Whether prompts may hold images."""
    part: Part | None = None
    """None: the server computes on one machine."""
    grace: float = 0.0
    """Seconds between asking a server to end and killing it. Servers only wait in them."""

    @property
    def host(self) -> str:
        """The address to listen on."""
        return self.flag("host") or self.listen

    def flag(self, name: str) -> str | None:
        """The recipe's value of a flag."""
        value = self._given().get(name)
        return None if value is None else str(value)

    @property
    def answers(self) -> bool:
        """Whether what is launched answers calls, by which it is known to have started."""
        return True

    @property
    @abstractmethod
    def adapted(self) -> bool:
        """Whether the servers take the run's adapter."""

    def launch(self, port: int, index: int) -> tuple[list[str], list[str]]:
        """The whole command of server `index` (0, 1, ...) on `port`, and the one that removes what outlives
        it."""
        words = self.arguments(port, index)
        return contained(words, self._variables(index), self.model_path) if is_container(words) else (words, [])

    def arguments(self, port: int, index: int) -> list[str]:
        """The command of the recipe with all flags."""
        return [*self.command, *self._words(self._own_flags(port, index) | self._given())]

    def _words(self, flags: Flags) -> list[str]:
        """What follows the command."""
        return flag_words(flags)

    @abstractmethod
    def _own_flags(self, port: int, index: int) -> dict[str, Flag | list[str]]:
        """Our flags of server `index`, those of the recipe aside."""

    def environment(self, index: int = 0) -> dict[str, str]:
        """This process's environment with the variables of server `index`. One of a virtual environment gets
        that of its own in place of ours: it compiles kernels with what is on PATH."""
        inherited = dict(os.environ)
        if (venv := venv_of(self.command)) is not None:
            inherited = {name: value for name, value in inherited.items() if name not in OURS_ALONE}
            inherited["VIRTUAL_ENV"] = str(venv)
            inherited["PATH"] = os.pathsep.join([str(venv / "bin"), *filter(None, [inherited.get("PATH")])])
            libraries = [*self._libraries(venv), *filter(None, [inherited.get(LIBRARY_PATH)])]
            inherited |= {LIBRARY_PATH: os.pathsep.join(libraries)} if libraries else {}
        return {**inherited, **self._variables(index)}

    def _libraries(self, venv: Path) -> list[str]:
        """Folders of a virtual environment in which the loader is to look first."""
        return []

    @abstractmethod
    def _variables(self, index: int) -> dict[str, str]:
        """The environment variables of server `index`, ours and the recipe's."""

    def _given(self) -> dict[str, Flag]:
        return plain_flags(self.flags)

    @property
    def hub_model(self) -> str | None:
        """The model that a server takes from this machine's cache of the hub; None: a folder, or a cache of its
        own."""
        own = is_container(self.command) or any(name in self.env for name in ("HF_HOME", "HF_HUB_CACHE"))
        return None if own or Path(self.model_path).is_dir() else self.model_path

    def _model(self) -> str:
        return str(Path(self.model_path).absolute()) if Path(self.model_path).is_dir() else self.model_path


def venv_of(command: Sequence[str]) -> Path | None:
    """The virtual environment whose Python these words start, as `launch_command` writes them; None: another
    program."""
    program = Path(command[0])
    is_venv = program.name.startswith("python") and (program.parent.parent / "pyvenv.cfg").is_file()
    return program.parent.parent if is_venv else None


def nccl_version(venv: Path) -> tuple[int, ...]:
    """The version of NCCL that torch has in a virtual environment; empty: it has none, or does not say."""
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", "import torch; print(*torch.cuda.nccl.version())"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    words = done.stdout.split()
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def nccl_installed(venv: Path) -> str | None:
    """The version of NCCL that pip installed into a virtual environment, as 2.30.7; None: it has none."""
    found = sorted(venv.glob("lib/python*/site-packages/nvidia_nccl_cu*-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


def plain_flags(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Flags by their names as servers write them: `tp_size` and `--tp-size` are `tp-size`."""
    return {key.replace("_", "-").removeprefix("--"): value for key, value in flags.items()}


def flag_words(flags: Flags) -> list[str]:
    """The words of flags; `true` is a flag without a value, `false` and `null` leave one out."""
    words = []
    for key, value in flags.items():
        if value is True:
            words.append(f"--{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *value]
        elif value is not None and value is not False:
            words += [f"--{key}", str(value)]
    return words


def launch_command(command: str | None, venv: str | None, program: Program) -> tuple[str, ...]:
    """The words that start a server, up to its flags. Raises UserError where nothing says what does, or it is
    not there."""
    if command is not None:
        words = shlex.split(command)
        if not words or shutil.which(words[0]) is None:
            raise UserError(f"engine.args.command: there is no program {' '.join(words[:1])!r}")
        if is_container(words):
            check_container(words)
        return tuple(words)
    folder = venv or os.environ.get(program.venv_variable)
    if not folder:
        raise UserError(
            f"engine {program.name}: say where servers run (engine.args.urls), or what launches one: engine.args.venv "
            f"or {program.venv_variable}, a virtual environment that holds {program.title}, or engine.args.command"
        )
    python = Path(folder).expanduser() / "bin" / "python"
    if not python.exists():
        source = "engine.args.venv" if venv else program.venv_variable
        raise UserError(f"{source}: {folder} is not a virtual environment (it has no bin/python)")
    if program.release:
        _check_release(Path(folder).expanduser(), program)
    return str(python), *program.module


def _check_release(venv: Path, program: Program) -> None:
    """Raise UserError where a virtual environment holds another release of the program, or none."""
    pattern = f"lib/python*/site-packages/{program.name}-*.dist-info"
    found = [path.name.removesuffix(".dist-info").partition("-")[2] for path in venv.glob(pattern)]
    if not any(version.startswith(f"{program.release}.") for version in found):
        holds = f"{program.title} {found[0]}" if found else f"no {program.title}"
        raise UserError(
            f"engine {program.name}: {venv} holds {holds}, and {program.release} is wanted (pip install "
            f"'{program.name}=={program.release}.*', or scripts/{program.name}_cpu/install VENV without a GPU)"
        )


def sizes_of(model: "PreTrainedModel") -> tuple[int, int]:
    """(bytes of keys and values a token in float32, context in tokens) of a transformers model."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * config.num_hidden_layers * heads * size, context_of(config)


def is_container(command: Sequence[str]) -> bool:
    """Whether these words run a container."""
    return Path(command[0]).name in RUNTIMES and _RUN in command[1:]


def check_container(command: Sequence[str]) -> None:
    """Raise UserError for options with which a server could not be ended."""
    given = _options(command)
    if "--name" in given:
        raise UserError("engine.args.command: leave --name out; each server's container is given a name of its own")
    if found := given & {"-d", "--detach"}:
        raise UserError(f"engine.args.command: leave {min(found)} out; a run keeps its servers' output, and ends them")


def contained(command: Sequence[str], variables: Collection[str], model_path: str) -> tuple[list[str], list[str]]:
    """The words that start a container, and those that remove it, which is needed because it does not end with
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
    """The names of the options in a command."""
    return {word.partition("=")[0] for word in command if word.startswith("-")}
