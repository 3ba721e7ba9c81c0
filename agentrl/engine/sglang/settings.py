"""What a recipe may say in `engine.args` of the engine `sglang`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from agentrl.engine.sglang.adapters import AdapterNeeds
from agentrl.engine.sglang.command import Flag, LaunchPlan, launch_command, sizes_of
from agentrl.errors import UserError
from agentrl.weights.reach import given_key, is_loopback, listen_host, new_key

GRACE_SECONDS = 5.0
"""For what a recipe's own command starts; SGLang itself needs none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """urls: servers that run already; then nothing is launched, and they are told the key of AGENTRL_SGLANG_KEY, where
    there is one. servers: how many are launched else, by `command` (up to its flags; see `container.py`) or by the
    virtual environment `venv`. flags: of its launch, over ours.
    start_timeout: seconds a server may take to serve. stall: seconds without a sign of life from a server that has
    requests. patience: seconds to wait for any server while all are out. restarts: of a launched server that ended.
    weights: how they travel, see `weights/`. log_dir: of launched servers' output (None: a temporary folder).
    """

    urls: tuple[str, ...] = ()
    servers: int = 1
    venv: str | None = None
    command: str | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 900.0
    stall: float = 120.0
    patience: float = 120.0
    restarts: int = 3
    weights: str = "auto"
    log_dir: str | None = None

    def __post_init__(self) -> None:
        """Raises UserError for what contradicts itself."""
        if self.urls and (self.venv or self.command or self.flags or self.servers != 1):
            raise UserError("engine.args: `urls` are servers that run already; leave servers, venv, command, flags out")
        if "port" in self.flags:
            raise UserError("engine.args.flags.port: leave it out; each server is given a port that is free")
        if self.servers < 1:
            raise UserError(f"engine.args.servers is {self.servers}; it must be at least 1")
        if len(set(self.urls)) != len(self.urls):
            raise UserError("engine.args.urls: a server is listed twice")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"engine.args.urls: {url!r} is no URL; write http://HOST:PORT")
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
    ) -> LaunchPlan | None:
        """How to launch servers for `model`, a transformers module at `model_path`; None where they run already.
        cluster: address of the Ray cluster whose machines are to reach them. Raises UserError where nothing says what
        launches one."""
        if self.urls:
            return None
        command = launch_command(self.command, self.venv)
        if model_path is None:
            raise UserError("engine sglang: a server is launched with model_path, and none was given")
        token_bytes, context = sizes_of(model)
        plan = LaunchPlan(
            command=command,
            model_path=model_path,
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            flags=self.flags,
            max_batch=max_batch,
            token_bytes=token_bytes,
            context=context,
            cpu=not torch.cuda.is_available(),
            env=self.env,
            adapter=adapter,
            listen=listen_host(cluster),
            grace=GRACE_SECONDS if self.command is not None else 0.0,
        )
        return replace(plan, key=plan.flag("api-key") or (None if is_loopback(plan.host) else new_key()))

    def key(self, plan: LaunchPlan | None) -> str | None:
        """What is said to servers with every request."""
        return given_key() if plan is None else plan.key
