"""What a recipe may say in `engine.args` of the engine `sglang`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from agentrl.engine.sglang.adapters import AdapterNeeds
from agentrl.engine.sglang.command import (
    Flag,
    LaunchPlan,
    launch_command,
    memory_saver_fault,
    nccl_version,
    plain_flags,
    sizes_of,
    venv_of,
)
from agentrl.errors import UserError
from agentrl.weights.addresses import given_key, is_loopback, listen_host, new_key
from agentrl.weights.server import PauseMode

GRACE_SECONDS = 5.0
"""Time to end for what a recipe's own command starts; SGLang itself needs none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `engine.args`."""

    urls: tuple[str, ...] = ()
    """Servers that run already, http://HOST:PORT; then none is launched. They are sent the key of AGENTRL_SGLANG_KEY,
    where there is one."""
    servers: int = 1
    """How many are launched."""
    venv: str | None = None
    """Virtual environment with SGLang that launches them."""
    command: str | None = None
    """Command that launches one, up to its flags; see `command.py`."""
    flags: Mapping[str, Flag] = field(default_factory=dict)
    """Flags of the launch, which come over ours."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of launched servers."""
    start_timeout: float = 900.0
    """Seconds that a server may take to serve."""
    stall: float = 120.0
    """Seconds without a sign of life after which a server that has requests is taken out."""
    patience: float = 120.0
    """Seconds to wait for any server while all are out."""
    restarts: int = 3
    """Restarts of a launched server that ended."""
    weights: str = "auto"
    """How weights are sent, see `weights.open_channel`."""
    pause: str = "retract"
    """What an update does to requests in flight: `retract` computes their keys and values again with the new weights,
    `in_place` goes on over the old ones."""
    log_dir: str | None = None
    """Folder of launched servers' output (None: a temporary one, then the run's)."""

    def __post_init__(self) -> None:
        """Raise UserError for keys that contradict each other."""
        if self.urls and (self.venv or self.command or self.flags or self.servers != 1):
            raise UserError("engine.args: `urls` are servers that run already; leave servers, venv, command, flags out")
        if "port" in self.flags:
            raise UserError("engine.args.flags.port: leave it out; each server is given a port that is free")
        if self.servers < 1:
            raise UserError(f"engine.args.servers is {self.servers}; it must be at least 1")
        if self.pause not in (PauseMode.RETRACT, PauseMode.IN_PLACE):
            raise UserError(f"engine.args.pause is {self.pause!r}; it is retract or in_place")
        if len(set(self.urls)) != len(self.urls):
            raise UserError("engine.args.urls: a server is listed twice")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"engine.args.urls: {url!r} is not a URL; write http://HOST:PORT")
        for name in ("start_timeout", "stall", "patience"):
            if getattr(self, name) <= 0:
                raise UserError(f"engine.args.{name} must be more than 0 seconds")

    def plan(
        self,
        model: Any,
        model_path: str | None,
        max_batch: int,
        adapter: AdapterNeeds | None,
        cluster: str | None = None,
        devices: Sequence[Sequence[int]] = (),
        dtype: str | None = None,
    ) -> LaunchPlan | None:
        """Return how to launch servers for `model`, a transformers module at `model_path`; None where they run already.
        cluster: address of the Ray cluster whose machines are to reach them. devices, dtype: see `LaunchPlan`. Raises
        UserError where nothing says what launches one."""
        if self.urls:
            return None
        command = launch_command(self.command, self.venv)
        if model_path is None:
            raise UserError("engine sglang: a server is launched with model_path, and none was given")
        token_bytes, context = sizes_of(model)
        plan = LaunchPlan(
            command=command,
            model_path=model_path,
            dtype=dtype or str(next(model.parameters()).dtype).removeprefix("torch."),
            flags=self.flags,
            max_batch=max_batch,
            token_bytes=token_bytes,
            context=context,
            cpu=not torch.cuda.is_available(),
            env=self.env,
            adapter=adapter,
            listen=listen_host(cluster),
            devices=devices,
            grace=GRACE_SECONDS if self.command is not None else 0.0,
        )
        return replace(plan, key=plan.flag("api-key") or (None if is_loopback(plan.host) else new_key()))

    def key(self, plan: LaunchPlan | None) -> str | None:
        """Return the key that is sent with every request."""
        return given_key() if plan is None else plan.key


def settings_of(args: Mapping[str, Any]) -> Settings:
    """Return the settings that these `engine.args` say. Raises UserError."""
    urls = args.get("urls") or ()
    urls = (urls,) if isinstance(urls, str) else tuple(urls)
    return Settings(**{**args, "urls": urls, "flags": args.get("flags") or {}})


def refused(settings: Settings, *, sleep: bool, lora: bool, gpus: bool) -> list[str]:
    """List what of the flags of launched servers starts well and fails later. sleep: servers release their memory.
    lora: an adapter is trained, and sent alone. gpus: servers run on GPUs."""
    flags, found = plain_flags(settings.flags), []
    replicas = flags.get("dp-size") or flags.get("dp") or flags.get("data-parallel-size") or 1
    if str(replicas) != "1":
        found.append(
            "engine.args.flags.dp-size: SGLang takes no new weights with replicas behind one address; set "
            f"engine.args.servers={settings.servers * int(replicas)} instead"
        )
    if flags.get("quantization") and not lora:
        found.append(
            f"engine.args.flags.quantization: weights of {flags['quantization']} cannot be replaced by the trainer's "
            "while a server runs; leave it out, or train an adapter (model.lora)"
        )
    if gpus and sleep and not flags.get("enable-memory-saver"):
        found.append("engine.sleep releases nothing of a server without engine.args.flags.enable-memory-saver=true")
    if gpus and sleep and settings.weights == "from_distributed":
        found.append(
            "engine.args.weights=from_distributed: NCCL connects no two processes that share a GPU (engine.sleep); "
            "leave it at auto"
        )
    return found


def faults(settings: Settings, command: Sequence[str]) -> list[str]:
    """List what the virtual environment of `command` lacks for servers on GPUs. Runs its Python, for a second."""
    venv, found = venv_of(command), []
    if venv is None:
        return []
    plan = LaunchPlan(tuple(command), "", "", settings.flags, 1, 1, 1, cpu=False, env=settings.env)
    saves = plain_flags(settings.flags).get("enable-memory-saver")
    if saves and (why := memory_saver_fault(venv, plan.environment())) is not None:
        found.append(f"engine.args.flags.enable-memory-saver: servers of {venv} would not start: {why}")
    if settings.weights == "from_distributed":
        theirs, ours = nccl_version(venv), torch.cuda.nccl.version()
        if theirs != ours:
            found.append(
                f"engine.args.weights=from_distributed: NCCL is {_dotted(theirs)} in {venv} and {_dotted(ours)} here, "
                "which do not connect; leave it at auto, or set from_disk"
            )
    return found


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version)) or "not there"
