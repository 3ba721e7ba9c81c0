"""Runs in the interpreter of a Harbor installation, by itself: opens its environments for whoever writes lines of JSON.

A line asks for a call, `{"id": 1, "call": "open", ...}`, and a line answers, `{"id": 1, "value": ...}` or `{"id": 1,
"error": "...", "kind": "refused"}` where what was asked for cannot be. When nobody writes any more, all is stopped.
"""

import asyncio
import contextlib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_STOP_SECONDS = 60.0
_LOCAL = ("docker", "podman")
"""Types that would delete the images, too: their containers go in any case."""
sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]  # where another `harbor` lies


class Runner:
    """kind: a type of Harbor's environments, or `module:Class`. options: further arguments of the class."""

    def __init__(self, kind: str, options: "dict[str, Any]") -> None:
        self._kind, self._options = kind, options
        self._open: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-harbor-")

    def environment(self, asked: "dict[str, Any]") -> Any:
        """An environment, not started."""
        from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
        from harbor.models.trial.paths import TrialPaths

        folder = Path(self._folder.name) / asked["name"]
        empty = folder / "environment"
        empty.mkdir(parents=True, exist_ok=True)
        config = {"network_mode": asked["network"], "memory_mb": asked["memory_mb"], "storage_mb": asked["storage_mb"]}
        if asked["hosts"]:
            config["allowed_hosts"] = asked["hosts"]
        if asked["image"]:
            config["docker_image"] = asked["image"]
        return self._class()(
            environment_dir=Path(asked["build"]) if asked["build"] else empty,
            environment_name=asked["name"],
            session_id=asked["name"],
            trial_paths=TrialPaths(trial_dir=folder),
            task_env_config=EnvironmentConfig(**config),
            network_policy=NetworkPolicy(network_mode=asked["network"], allowed_hosts=asked["hosts"]),
            persistent_env=asked["env"],
            **self._options,
        )

    def _class(self) -> Any:
        if ":" in self._kind:
            module, _, name = self._kind.partition(":")
            return getattr(importlib.import_module(module), name)
        from harbor.environments import factory
        from harbor.models.environment_type import EnvironmentType

        return factory._load_environment_class(EnvironmentType(self._kind))

    def networks(self, asked: "dict[str, Any]") -> "list[str]":
        """Which of Harbor's network modes it takes. Raises SystemExit with what is missing here."""
        self._class().preflight()
        able = []
        for mode, hosts in (("public", []), ("no-network", []), ("allowlist", ["a.example"])):
            try:
                self.environment({**asked, "network": mode, "hosts": hosts})
                able.append(mode)
            except Exception as error:
                if mode == "public":
                    raise
                print(f"{mode}: {error}", file=sys.stderr)
        return able

    async def call(self, asked: "dict[str, Any]") -> Any:
        """What a call comes to."""
        name = asked["name"]
        match asked["call"]:
            case "networks":
                return self.networks(asked)
            case "open":
                self._open[name] = self.environment(asked)
                await self._open[name].start(force_build=False)
            case "exec":
                result = await self._open[name].exec(
                    asked["command"], timeout_sec=asked["seconds"], user=asked["user"] or None
                )
                return {"stdout": result.stdout or "", "stderr": result.stderr or "", "code": result.return_code}
            case "upload":
                await self._open[name].upload_file(asked["local"], asked["remote"])
            case "download":
                await self._open[name].download_file(asked["remote"], asked["local"])
            case "stop":
                if name in self._open:
                    await self._stopped(self._open.pop(name))
        return None

    async def _stopped(self, environment: Any) -> None:
        local = str(getattr(environment.type(), "value", environment.type())) in _LOCAL
        if local:  # what stops them waits for ten seconds
            with contextlib.suppress(Exception):
                await asyncio.wait_for(environment.exec("kill -9 -1", user="root", timeout_sec=10), 15)
        await environment.stop(delete=not local)

    async def close(self) -> None:
        """Stop all."""
        stopping = [self._stopped(environment) for environment in self._open.values()]
        if stopping:
            work = [asyncio.ensure_future(one) for one in stopping]
            await asyncio.wait(work, timeout=_STOP_SECONDS)
        self._folder.cleanup()


async def answered(runner: Runner, asked: "dict[str, Any]", lock: asyncio.Lock, out: Any) -> None:
    """Do a call, and write its answer."""
    try:
        said: dict[str, Any] = {"value": await runner.call(asked)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - strangers' code, whose errors are the answer
        kind = "refused" if isinstance(error, (ValueError, SystemExit, FileNotFoundError)) else "failed"
        said = {"error": f"{type(error).__name__}: {error}", "kind": kind}
    async with lock:
        out.write(json.dumps({"id": asked["id"], **said}).encode() + b"\n")
        out.flush()


async def main() -> None:
    """Answer until there is no further line."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Harbor prints is no answer
    runner = Runner(sys.argv[1], json.loads(sys.argv[2]))
    loop, reader, lock = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 26), asyncio.Lock()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    calls = set()
    while line := await reader.readline():
        call = asyncio.ensure_future(answered(runner, json.loads(line), lock, out))
        calls.add(call)
        call.add_done_callback(calls.discard)
    await runner.close()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
