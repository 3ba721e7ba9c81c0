"""Cost of workspaces: open, exec, snapshot, fork and close, one after the other and many at once, and memory of each.

    python benchmarks/workspaces.py                                       the provider bwrap
    python benchmarks/workspaces.py docker --address unix:///run/podman.sock --image IMAGE
    python benchmarks/workspaces.py --quick

Where an image is given and `podman` is installed, the last rows are podman's own command line on the same image: `run`,
`exec`, `commit` and `rm`, each a process (options of it in PODMAN_OPTIONS, such as `--root DIR`).
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from sandbox import descendants_pss

from agentrl.plugins.registry import make_workspace_provider
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.workspace.provider import WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import Snapshot, Workspace

PREPARE = "mkdir -p state && for i in 1 2 3 4; do head -c 100000 /dev/zero > state/$i; done"


@dataclass(frozen=True)
class Row:
    """The measurement of one operation."""

    way: str
    """Whose operation it is."""
    operation: str
    """Its name."""
    at_once: int
    """How many were under way together."""
    a_second: float
    """Operations a second."""
    p50: float
    """Median milliseconds of one."""
    worst: float
    """Milliseconds of the longest."""


@dataclass(frozen=True)
class Many:
    """Many workspaces that are open at once."""

    open: int
    """How many."""
    seconds: float
    """Until all were open and had run a program."""
    mib: float
    """MiB of memory (PSS) of this process's descendants, for each; 0 where they are none of ours."""


async def timed(way: str, operation: str, at_once: int, calls: Sequence[Callable[[], Awaitable[object]]]) -> Row:
    """Make calls, `at_once` of them at a time."""
    seconds: list[float] = []
    turn = asyncio.Semaphore(at_once)

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        async with turn:
            began = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(one, calls))
    whole = time.perf_counter() - began
    seconds.sort()
    row = Row(way, operation, at_once, len(seconds) / whole, seconds[len(seconds) // 2] * 1e3, seconds[-1] * 1e3)
    print(f"{way:<8} {operation:<10} {at_once:7} {row.a_second:9.1f} {row.p50:9.1f} {row.worst:9.1f}", flush=True)
    return row


async def of_provider(
    way: str, provider: WorkspaceProvider, spec: WorkspaceSpec, count: int, at_once: int
) -> list[Row]:
    workspaces: list[Workspace] = []
    snapshots: list[Snapshot] = []

    async def open_one(snapshot: Snapshot | None = None) -> None:
        workspaces.append(await provider.open(spec, snapshot))

    async def exec_in(workspace: Workspace) -> None:
        assert (await workspace.exec(["true"])).ok

    async def keep(workspace: Workspace) -> None:
        snapshots.append(await workspace.snapshot())

    rows = [await timed(way, "open", at_once, [open_one] * count)]
    for workspace in workspaces:
        assert (await workspace.exec(PREPARE)).ok
    rows.append(await timed(way, "exec", at_once, [lambda w=w: exec_in(w) for w in workspaces * 2]))  # type: ignore[misc]
    rows.append(await timed(way, "snapshot", at_once, [lambda w=w: keep(w) for w in workspaces[:8]]))  # type: ignore[misc]
    rows.append(await timed(way, "fork", at_once, [lambda: open_one(snapshots[0])] * count))
    rows.append(await timed(way, "close", at_once, [workspace.close for workspace in workspaces]))
    for snapshot in snapshots:
        await provider.forget(snapshot)
    return rows


async def many_at_once(provider: WorkspaceProvider, spec: WorkspaceSpec, count: int) -> Many:
    before, began = descendants_pss(), time.perf_counter()
    workspaces = await asyncio.gather(*(provider.open(spec) for _ in range(count)))
    ends = await asyncio.gather(*(workspace.exec(["true"], seconds=120) for workspace in workspaces))
    seconds = time.perf_counter() - began
    assert all(end.ok for end in ends)
    mib = (descendants_pss() - before) / 2**20 / count
    await asyncio.gather(*(workspace.close() for workspace in workspaces))
    return Many(count, seconds, max(0.0, mib))


async def of_podman(image: str, count: int, at_once: int) -> list[Row]:
    """What podman's command line takes for the same."""
    podman = [shutil.which("podman") or "podman", *shlex.split(os.environ.get("PODMAN_OPTIONS", ""))]
    names: list[str] = []
    waits = "while :; do sleep 60; done"

    async def call(*words: str) -> str:
        process = await asyncio.create_subprocess_exec(*podman, *words, stdout=subprocess.PIPE)
        said = (await process.communicate())[0].decode().strip()
        assert process.returncode == 0, words
        return said

    async def run(what: str = image) -> None:
        names.append(await call("run", "-d", "--network=none", "--stop-timeout=0", what, "/bin/sh", "-c", waits))

    rows = [await timed("podman", "open", at_once, [run] * count)]
    rows.append(await timed("podman", "exec", at_once, [lambda n=n: call("exec", n, "true") for n in names * 2]))  # type: ignore[misc]
    commits = [f"localhost/agentrl-benchmark:{n}" for n in range(min(8, count))]
    pairs = list(zip(names, commits, strict=False))
    rows.append(await timed("podman", "snapshot", at_once, [lambda p=p: call("commit", "-q", *p) for p in pairs]))  # type: ignore[misc]
    rows.append(await timed("podman", "fork", at_once, [lambda: run(commits[0])] * count))
    rows.append(await timed("podman", "close", at_once, [lambda n=n: call("rm", "-f", n) for n in names]))  # type: ignore[misc]
    await call("rmi", *commits)
    return rows


async def measure(options: argparse.Namespace) -> tuple[list[Row], Many]:
    count, at_once = (8, 4) if options.quick else (40, 8)
    args = {"address": options.address} if options.address else {}
    provider = make_workspace_provider(WorkspaceSection(provider=options.provider, args=args))
    spec = WorkspaceSpec(options.image)
    await provider.start("benchmark")
    print(f"{'way':<8} {'operation':<10} {'at once':>7} {'a second':>9} {'p50 ms':>9} {'worst ms':>9}")
    way = options.provider.rpartition(".")[2].partition(":")[0]
    rows: list[Row] = []
    try:
        for together in (1, at_once):
            rows += await of_provider(way, provider, spec, count, together)
        many = await many_at_once(provider, spec, options.many or (16 if options.quick else 200))
    finally:
        await provider.close()
    if options.image and shutil.which("podman"):
        for together in (1, at_once):
            rows += await of_podman(options.image, count, together)
    print(f"\n{many.open} at once: all open and called after {many.seconds:.1f} s, {many.mib:.1f} MiB each")
    return rows, many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("provider", nargs="?", default="bwrap")
    parser.add_argument("--address", default="", help="of a Docker daemon")
    parser.add_argument("--image", default="", help="what is opened; the provider's default where it has one")
    parser.add_argument("--many", type=int, default=0, help="how many at once at last")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    rows, many = asyncio.run(measure(options))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": [asdict(r) for r in rows], "many": asdict(many)}, file, indent=1)


if __name__ == "__main__":
    main()
