"""Cost of the sandbox: calls per second and latency, with and without a pool, and the memory of many sessions.

    python benchmarks/sandbox.py                a minute or two
    python benchmarks/sandbox.py --quick        fewer calls and sessions
    python benchmarks/sandbox.py --backend e2b  the service, or a server of your own (E2B_DEBUG=true)

The same small cell runs in a session that stays open, in a new session from the pool for each call, and in a new
session started for each call. The last columns compare the median of each with that of a fresh interpreter without any
isolation (`python -c`), the cheapest alternative.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl_tools.sandbox import Limits, Sandbox, SandboxSession, make_sandbox

CODE = "total = sum(i * i for i in range(100))\ntotal"
VALUE = "328350"
LIMITS = Limits(wall_seconds=60, cpu_seconds=60)


@dataclass(frozen=True)
class Row:
    """The measurement of one way to run calls."""

    way: str
    """Name of the way."""
    sessions: int
    """Number of sessions in parallel."""
    calls_per_second: float
    """Calls per second of all sessions."""
    p50: float
    """Median milliseconds of a call, including the start of a new session."""
    p99: float
    """99th percentile of the milliseconds of a call."""


Call = Callable[[], Awaitable[None]]


async def checked(session: SandboxSession) -> None:
    execution = await session.run(CODE)
    assert execution.value == VALUE, execution


async def timed(way: str, calls: list[Call], each: int) -> Row:
    """Run all of `calls` concurrently, each of them `each` times in sequence."""
    seconds: list[float] = []

    async def one(call: Call) -> None:
        for _ in range(each):
            began = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(one(call) for call in calls))
    whole = time.perf_counter() - began
    seconds.sort()
    p50, p99 = seconds[len(seconds) // 2], seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]
    return Row(way, len(calls), len(seconds) / whole, p50 * 1e3, p99 * 1e3)


async def open_sessions(sandbox: Sandbox, sessions: int, each: int) -> Row:
    opened = await asyncio.gather(*(sandbox.open() for _ in range(sessions)))
    calls: list[Call] = [lambda s=session: checked(s) for session in opened]  # type: ignore[misc]
    await timed("warm-up", calls, 2)
    row = await timed("open session", calls, each)
    await asyncio.gather(*(session.close() for session in opened))
    return row


async def new_sessions(way: str, sandbox: Sandbox, sessions: int, each: int, pause: float) -> Row:
    """Measure calls in new sessions. pause: seconds between two sessions, not counted, in which the pool refills."""
    waited = 0.0

    async def call() -> None:
        async with sandbox.session() as session:
            await checked(session)

    await call()
    rows = []
    for _ in range(each):
        if pause:
            await asyncio.sleep(pause)
            waited += pause
        rows.append(await timed(way, [call] * sessions, 1))
    p50s, p99s = sorted(row.p50 for row in rows), sorted(row.p99 for row in rows)
    rate = sum(row.calls_per_second for row in rows) / len(rows)
    return Row(way, sessions, rate, p50s[len(rows) // 2], p99s[-1])


def bare_interpreter(each: int) -> Row:
    seconds = []
    for _ in range(each):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", f"{CODE}; print(total)"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    p50, p99 = seconds[len(seconds) // 2] * 1e3, seconds[len(seconds) * 99 // 100] * 1e3
    return Row("python -c", 1, len(seconds) / sum(seconds), p50, p99)


@dataclass(frozen=True)
class Memory:
    """The memory of open sessions, as proportional set size (PSS: shared pages are counted once)."""

    sessions: int
    """Number of open sessions."""
    mib: float
    """MiB of all descendants of this process."""
    mib_per_session: float
    """MiB per session."""
    seconds: float
    """Seconds until all sessions were open."""


async def memory_of(sandbox: Sandbox, sessions: int) -> Memory:
    began = time.perf_counter()
    opened = await asyncio.gather(*(sandbox.open() for _ in range(sessions)))
    await asyncio.gather(*(checked(session) for session in opened))
    seconds = time.perf_counter() - began
    mib = descendants_pss() / 2**20
    await asyncio.gather(*(session.close() for session in opened))
    return Memory(sessions, mib, mib / sessions, seconds)


def descendants_pss() -> int:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    total, queue = 0, list(children.get(os.getpid(), []))
    while queue:
        pid = queue.pop()
        queue += children.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


async def measure(options: argparse.Namespace) -> tuple[list[Row], Memory | None]:
    few, many = (50, 5) if options.quick else (400, 20)
    bare = bare_interpreter(few // 5)
    print(f"{'way':<22} {'sessions':>8} {'calls/s':>9} {'p50 ms':>9} {'p99 ms':>9} {'bare/p50':>9}")
    rows = [bare]
    show(bare, bare)
    pooled = make_sandbox(options.backend, limits=LIMITS, pool=options.many)
    unpooled = make_sandbox(options.backend, limits=LIMITS, pool=0)
    for sessions in (1, options.many):
        each = few if sessions == 1 else many
        for work in (
            lambda n, k: open_sessions(unpooled, n, k),
            lambda n, k: new_sessions("new session, pooled", pooled, n, min(k, 20), 1.0 + 0.1 * n),
            lambda n, k: new_sessions("new session, on demand", unpooled, n, min(k, 20), 0.0),
        ):
            row = await work(sessions, each)
            rows.append(row)
            show(row, bare)
    await pooled.close()
    memory = None
    if options.backend != "e2b":
        memory = await memory_of(unpooled, options.memory)
        print(
            f"\n{memory.sessions} sessions at once: {memory.mib:.0f} MiB, {memory.mib_per_session:.1f} a session, "
            f"all open and called after {memory.seconds:.1f} s"
        )
    await unpooled.close()
    return rows, memory


def show(row: Row, bare: Row) -> None:
    print(
        f"{row.way:<22} {row.sessions:8} {row.calls_per_second:9.1f} {row.p50:9.2f} {row.p99:9.2f} "
        f"{bare.p50 / row.p50:8.1f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backend", choices=["auto", "bwrap", "e2b"], default="auto")
    parser.add_argument("--many", type=int, default=16, help="how many sessions at once")
    parser.add_argument("--memory", type=int, default=200, help="how many sessions whose memory is measured")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    rows, memory = asyncio.run(measure(options))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": [asdict(r) for r in rows], "memory": memory and asdict(memory)}, file, indent=1)


if __name__ == "__main__":
    main()
