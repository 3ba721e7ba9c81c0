"""Faults around workspaces: a full disk of this machine, a clock that jumps, a daemon that dies under rollouts."""

import ast
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agentrl_tools.workspaces.bwrap import BwrapProvider
from agentrl_tools.workspaces.docker import DockerProvider
from fakes import Env, ScriptedEngine, make_driver
from paths import ROOT
from podman_help import IMAGE, Podman
from proxy import Proxy

from agentrl.errors import WorkspaceError
from agentrl.plugins.types import Task
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.rollout.groups import roll_out
from agentrl.rollout.workspaces import Workspaces
from agentrl.trajectory import FinishReason
from agentrl.workspace.provider import WorkspaceLimits, WorkspaceSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

FULL = """
import asyncio, os, sys
from agentrl_tools.workspaces.bwrap import BwrapProvider
from agentrl.errors import WorkspaceError
from agentrl.workspace.provider import WorkspaceSpec

async def main():
    provider = BwrapProvider()
    await provider.start("full")
    workspace = await provider.open(WorkspaceSpec())
    await workspace.write("small", b"kept")
    kept = await workspace.snapshot()
    await workspace.exec("head -c 8000000 /dev/urandom > large")
    for attempt in range(2):
        try:
            await workspace.snapshot()
            print("a snapshot was made")
        except WorkspaceError as error:
            print("refused:", error)
    print((await workspace.exec("wc -c <large")).text().strip())
    await workspace.exec("rm large")
    again = await provider.open(WorkspaceSpec(), await workspace.snapshot())
    first = await provider.open(WorkspaceSpec(), kept)
    print((await again.read("small")).decode(), (await first.read("small")).decode())
    filler = open(os.environ["TMPDIR"] + "/filler", "wb")
    try:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    except OSError:
        pass
    try:
        other = await provider.open(WorkspaceSpec())
        print((await other.exec("echo x > y; cat y")).text().strip())
    except WorkspaceError as error:
        print("refused:", error)
    os.remove(os.environ["TMPDIR"] + "/filler")
    print((await (await provider.open(WorkspaceSpec())).exec("echo opens")).text().strip())
    await provider.close()
    print(os.listdir(os.environ["TMPDIR"]))

asyncio.run(main())
"""


def test_a_full_disk_of_this_machine_is_the_machinerys_fault(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    apart = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mounted = f'mount -t tmpfs -o size=2m,mode=1777 none {folder} && exec "$@"'
    words = [*apart, "sh", "-c", mounted, "sh", sys.executable, "-c", FULL]
    if subprocess.run([*words[:-3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.partition(":")[0] for line in said[:2]] == ["refused", "refused"], said
    assert "No space left on device" in said[0]
    assert said[2:4] == ["8000000", "kept kept"]
    assert said[4] == "x" or said[4].startswith("refused:")
    assert said[5:] == ["opens", "[]"]


WALL_CLOCKS = {"time", "time_ns", "localtime", "now", "utcnow", "today"}
"""Names of functions of `time` and `datetime` by which a clock may jump."""


@pytest.mark.parametrize(
    "folder", ["agentrl/workspace", "agentrl/containment", "tools/agentrl_tools/workspaces", "agentrl/rollout"]
)
def test_no_deadline_is_measured_by_a_clock_that_may_jump(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                found += [f"{path.name}: {name.name}" for name in node.names if name.name in WALL_CLOCKS]
            if (
                isinstance(node, ast.Attribute)
                and node.attr in WALL_CLOCKS
                and isinstance(node.value, ast.Name)
                and node.value.id in ("time", "datetime", "date")
            ):
                found.append(f"{path.name}: {node.value.id}.{node.attr}")
    assert found == []


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
async def test_a_clock_that_jumps_changes_no_deadline(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = BwrapProvider()
    await provider.start("clock")
    try:
        workspace = await provider.open(WorkspaceSpec(limits=WorkspaceLimits(seconds=3.0)))
        real, began = time.time, time.monotonic()
        running = asyncio.ensure_future(workspace.exec("sleep 60", seconds=1.0))
        await asyncio.sleep(0.3)
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        done = await running
        assert done.timed_out
        assert 0.9 < time.monotonic() - began < 2.8
        assert (await workspace.exec("echo lives")).stdout == b"lives\n"
        await asyncio.sleep(3.2 - (time.monotonic() - began))
        with pytest.raises(WorkspaceError, match="its time is over"):
            await workspace.exec("true")
    finally:
        await provider.close()


async def test_a_dead_daemons_rollouts_are_played_elsewhere(podman: Podman) -> None:
    proxy, seen = Proxy(podman.address, f"{podman.folder}/dies.sock"), Counter[str]()
    await proxy.start()
    provider = DockerProvider([proxy.address, podman.address], IMAGE, deadline=5.0)

    async def begin(session: Any) -> Any:
        seen[session.task.id] += 1
        await session.workspace.write("mine", session.task.id.encode())
        if sum(seen.values()) == 4:  # all play: two on each
            await proxy.die()
        while sum(seen.values()) < 4:
            await asyncio.sleep(0.05)
        return [{"role": "user", "content": "?"}]

    async def judge(session: Any) -> float:
        return float((await session.workspace.read("mine")) == session.task.id.encode())

    env = Env(create=begin, calc_reward=judge)
    env.uses_workspace = True
    workspaces = Workspaces(provider, WorkspaceSection(ready=0), env)
    await workspaces.start("dies")
    try:
        driver = make_driver(ScriptedEngine(lambda *_: "4"), env, workspaces=workspaces, retries=3)
        groups = await roll_out(driver, [Task(f"t{i}", {}) for i in range(4)], 1)
        played = [trajectory for group in groups for trajectory in group.trajectories]
        assert [(one.finish, one.reward) for one in played] == [(FinishReason.STOP, 1.0)] * 4
        retried = [one.extra["retried"] for one in played if one.extra.get("retried")]
        assert len(retried) == 2
        assert all(reasons[0].startswith("workspace: ") for reasons in retried), retried
    finally:
        await workspaces.close()
        await proxy.die()
    podman.run("rm", "-af")
    podman.run("rmi", *(name for name in podman.images() if "snapshot" in name), check=False)
