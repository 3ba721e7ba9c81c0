"""What a recipe may say in `engine.args` of an engine of servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from agentrl.addresses import KEY_VARIABLE, given_key, is_loopback, listen_host, new_key
from agentrl.engine.servers.adapters import AdapterNeeds
from agentrl.engine.servers.launch import Flag, LaunchPlan, launch_command, plain_flags, sizes_of
from agentrl.errors import UserError
from agentrl.models.vision import Vision
from agentrl.plugins.types import Json
from agentrl.weights.server import PauseMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_CLUSTER = "engine.args.remote_nodes: other machines are those of a running Ray cluster: name it in cluster.address"
GRACE_SECONDS = 5.0
"""Time to end for what a recipe's own command starts; servers themselves need none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `engine.args`."""

    urls: tuple[str, ...] = ()
    """Servers that run already, http://HOST:PORT; then none is launched. They are sent the key of AGENTRL_SGLANG_KEY
    (AGENTRL_VLLM_KEY), where there is one."""
    servers: int = 1
    """How many are launched."""
    remote_nodes: int = 0
    """Machines of the cluster at `cluster.address`, other than this one, that launched servers are spread over; each
    server lies on one of them. 0: all are launched on this machine. With `engine.sleep` they are the machines of the
    workers, whose GPUs they share, so it is `cluster.nodes`."""
    venv: str | None = None
    """Virtual environment with the server's program that launches them."""
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
    """How weights are sent: auto, from_tensor, from_distributed or from_disk; see `weights.open_channel`."""
    pause: str = "retract"
    """What an update does to requests in flight: `retract` computes their keys and values again with the new weights,
    `in_place` goes on over the old ones."""
    log_dir: str | None = None
    """Folder of launched servers' output (None: a temporary one, then the run's)."""

    def __post_init__(self) -> None:
        """Raise UserError for keys that contradict each other."""
        if self.urls and (self.venv or self.command or self.flags or self.servers != 1 or self.remote_nodes):
            raise UserError(
                "engine.args: `urls` are servers that run already; leave servers, remote_nodes, venv, command and "
                "flags out"
            )
        if "port" in self.flags:
            raise UserError("engine.args.flags.port: leave it out; each server is given a port that is free")
        if self.servers < 1:
            raise UserError(f"engine.args.servers is {self.servers}; it must be at least 1")
        most = self.servers * self.parts
        if not 0 <= self.remote_nodes <= most:
            times = f" x engine.args.flags.nnodes ({self.parts})" if self.parts > 1 else ""
            raise UserError(
                f"engine.args.remote_nodes is {self.remote_nodes}; it is from 0 to engine.args.servers ({self.servers})"
                f"{times}"
            )
        if self.parts > 1 and (not self.remote_nodes or self.remote_nodes % self.parts or most % self.remote_nodes):
            raise UserError(
                f"engine.args.remote_nodes is {self.remote_nodes}; with engine.args.flags.nnodes={self.parts} it is a "
                f"multiple of that, and engine.args.servers x nnodes ({most}) a multiple of it"
            )
        for flag in ("host", "base-gpu-id", "node-rank", "dist-init-addr", "master-addr", "master-port", "headless"):
            if self.remote_nodes and flag in plain_flags(self.flags):
                raise UserError(
                    f"engine.args.flags.{flag}: leave it out; with remote_nodes, Ray says where servers run"
                )
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

    @property
    def parts(self) -> int:
        """The machines that each server computes on. Raises UserError for what is no number of them."""
        given = plain_flags(self.flags).get("nnodes", 1)
        if not isinstance(given, int) or given < 1:
            raise UserError(f"engine.args.flags.nnodes is {given!r}; it is a whole number of machines")
        return given

    def plan(
        self,
        kind: type[LaunchPlan],
        model: "PreTrainedModel",
        model_path: str | None,
        max_batch: int,
        adapter: AdapterNeeds | None,
        cluster: str | None = None,
        devices: Sequence[Sequence[int]] = (),
        dtype: str | None = None,
        fed: bool = False,
    ) -> LaunchPlan | None:
        """How to launch servers for `model`, a transformers module at `model_path`; None where they run already.
        kind: of the servers. cluster: address of the Ray cluster whose machines are to reach them. devices, dtype, fed:
        see `LaunchPlan`. Raises UserError where nothing says what launches one."""
        if self.urls:
            return None
        command = launch_command(self.command, self.venv, kind.program)
        if self.remote_nodes and cluster is None:
            raise UserError(NO_CLUSTER)
        if model_path is None:
            raise UserError(f"engine {kind.program.name}: a server is launched with model_path, and none was given")
        token_bytes, context = sizes_of(model)
        plan = kind(
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
            weights=self.weights,
            fed=fed,
            sees=Vision.of(model),
            listen=listen_host(cluster),
            devices=devices,
            grace=GRACE_SECONDS if self.command is not None else 0.0,
        )
        alone = is_loopback(plan.host) and not self.remote_nodes
        return replace(plan, key=plan.flag("api-key") or (None if alone else new_key(kind.program.key_variable)))

    def key(self, plan: LaunchPlan | None, variable: str = KEY_VARIABLE) -> str | None:
        """The key that is sent with every request. variable: environment variable that has that of servers
        which run already."""
        return given_key(variable) if plan is None else plan.key


def settings_of(args: Mapping[str, Json]) -> Settings:
    """The settings that these `engine.args` say. Raises UserError."""
    urls = args.get("urls") or ()
    urls = (urls,) if isinstance(urls, str) else tuple(urls)
    return Settings(**{**args, "urls": urls, "flags": args.get("flags") or {}})
