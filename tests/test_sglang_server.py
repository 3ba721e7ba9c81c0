"""Servers that a run launches: they start, die, come back and never outlive it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang_help import real_plan, tiny

from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.sglang.client import Sessions
from agentrl.engine.sglang.command import LaunchPlan
from agentrl.engine.sglang.engine import SglangEngine
from agentrl.engine.sglang.server import Server
from agentrl.errors import UserError

FAKE = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("it serves", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ok).serve_forever()
"""


def plan(*command: str) -> LaunchPlan:
    return LaunchPlan(command=command, model_path="m", dtype="float32", flags={}, max_batch=4, token_bytes=1,
                      context=64, cpu=True)  # fmt: skip


def fake(tmp_path: Path) -> tuple[LaunchPlan, Path]:
    """A command that serves, with a child of its own; and where both ids will be written."""
    program, ids = tmp_path / "fake.py", tmp_path / "ids"
    program.write_text(FAKE)
    return plan(sys.executable, str(program), str(ids)), ids


def alive(pid: int) -> bool:
    """Whether it runs: what nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def pids(file: Path) -> list[int]:
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(p) for p in file.read_text().split()]


async def started(launch: LaunchPlan, log: Path, timeout: float = 60.0) -> Server:
    sessions = Sessions()
    server = Server(launch, 0, log, sessions)
    try:
        await server.start(timeout, lambda line: None)
    finally:
        await sessions.close()
    return server


async def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    launch, ids = fake(tmp_path)
    server = await started(launch, tmp_path / "log")
    found = pids(ids)
    assert all(map(alive, found))
    await server.stop()
    until(lambda: not any(map(alive, found)))
    assert "it serves" in (tmp_path / "log").read_text()


async def test_its_log_moves_to_the_run_folder_while_it_writes(tmp_path: Path) -> None:
    program = tmp_path / "talks.py"
    program.write_text(FAKE.replace('print("it serves"', 'import threading, time\ndef talk():\n    while True:\n'
                       '        print("more", flush=True); time.sleep(0.1)\n'
                       'threading.Thread(target=talk, daemon=True).start()\nprint("it serves"'))  # fmt: skip
    server = await started(plan(sys.executable, str(program), str(tmp_path / "ids")), tmp_path / "a" / "log")
    try:
        (tmp_path / "run").mkdir()
        server.move_log(tmp_path / "run" / "sglang_0.log")
        size = server.log.stat().st_size
        until(lambda: server.log.stat().st_size > size)
        assert "it serves" in (tmp_path / "run" / "sglang_0.log").read_text()
        assert not (tmp_path / "a" / "log").exists()
    finally:
        await server.stop()


async def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    program = tmp_path / "bad.py"
    program.write_text("import sys; print('ValueError: no such model'); sys.exit(3)")
    with pytest.raises(UserError, match=r"ended as it started: ValueError: no such model \(log: .*log\)"):
        await started(plan(sys.executable, str(program)), tmp_path / "log")


async def test_a_server_that_never_serves_is_ended(tmp_path: Path) -> None:
    program, ids = tmp_path / "slow.py", tmp_path / "ids"
    program.write_text(
        "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} 1'); print('loading', flush=True);"
        "time.sleep(1000)"
    )
    with pytest.raises(UserError, match=r"within 2 seconds \(engine.args.start_timeout\); its last line: loading"):
        await started(plan(sys.executable, str(program), str(ids)), tmp_path / "log", 2.0)
    until(lambda: not alive(pids(ids)[0]))


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    program, ids = tmp_path / "slow.py", tmp_path / "ids"
    program.write_text("import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} 1'); time.sleep(1000)")
    task = asyncio.create_task(started(plan(sys.executable, str(program), str(ids)), tmp_path / "log"))
    while not ids.exists():
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until(lambda: not alive(pids(ids)[0]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_a_run_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    _, ids = fake(tmp_path)
    run = tmp_path / "run.py"
    run.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_sglang_server import plan, started
        async def main():
            launch = plan(sys.executable, {str(tmp_path / "fake.py")!r}, {str(ids)!r})
            await started(launch, Path({str(tmp_path / "log")!r}))
            await asyncio.sleep(1000)
        asyncio.run(main())
        """)
    )
    process = subprocess.Popen([sys.executable, str(run)])
    found = pids(ids)
    process.send_signal(number)
    process.wait()
    until(lambda: not any(map(alive, found)))


def test_flags_of_the_recipe_come_over_ours() -> None:
    launch = LaunchPlan(
        command=("python", "-m", "x"), model_path="/m", dtype="bfloat16",
        flags={"max_total_tokens": 99, "trust-remote-code": True, "skip_server_warmup": False, "tp_size": 2},
        max_batch=4, token_bytes=1, context=64, cpu=False,
    )  # fmt: skip
    words = launch.arguments(31000, 1)
    assert words[:3] == ["python", "-m", "x"]
    assert words[words.index("--max-total-tokens") + 1] == "99"
    assert "--trust-remote-code" in words
    assert "--skip-server-warmup" not in words
    assert words[words.index("--base-gpu-id") + 1] == "2"  # the second server's devices follow the first's
    assert words[words.index("--port") + 1] == "31000"


def test_a_server_on_a_cpu_does_not_take_the_machines_memory() -> None:
    words = real_like(token_bytes=1 << 20, context=1024).arguments(1, 0)
    assert int(words[words.index("--max-total-tokens") + 1]) == 1024  # one context, although 1 GiB holds less
    words = real_like(token_bytes=1024, context=1024).arguments(1, 0)
    assert int(words[words.index("--max-total-tokens") + 1]) == 4 * 1024


def real_like(**sizes: int) -> LaunchPlan:
    return LaunchPlan(command=("x",), model_path="m", dtype="float32", flags={}, max_batch=4, cpu=True, **sizes)


async def test_one_of_two_real_servers_is_killed_in_mid_run(sglang_venv: str, tmp_path: Path) -> None:
    """Each of 48 conversations ends with as many tokens, greedy ones with the local engine's; the server comes back."""
    torch.set_num_threads(1)
    model, tokenizer = tiny()
    said: list[str] = []
    from sglang_help import embedded_path

    engine = SglangEngine(
        model, max_batch=16, tokenizer=tokenizer, model_path=str(embedded_path()), say=said.append,
        venv=sglang_venv, servers=2, flags={"max-total-tokens": 16384}, log_dir=str(tmp_path),
    )  # fmt: skip
    try:
        await engine.health()
        prompts = [tokenizer.encode(f"A farmer has {i} eggs and sells {i // 2}.") for i in range(48)]
        work = [asyncio.create_task(engine.generate(p, Sampling(200, temperature=0.0), f"{i}"))
                for i, p in enumerate(prompts)]  # fmt: skip
        await asyncio.sleep(2.0)
        first = engine._fleet._launched[0]
        kill_schedulers(first._keeper.pid)
        made = await asyncio.gather(*work)
        assert [len(m.ids) for m in made] == [200] * 48
        local = LocalEngine(model, max_batch=48)
        ours = await asyncio.gather(
            *(local.generate(p, Sampling(200, temperature=0.0), f"{i}") for i, p in enumerate(prompts))
        )
        await local.close()
        for a, b in zip(made, ours, strict=True):
            assert a.ids == b.ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert any("taken out" in line for line in said)
        async with asyncio.timeout(300):
            while not any("is back" in line for line in said):
                await engine.generate([5, 6, 7], Sampling(2), "tick")
                await asyncio.sleep(0.5)
    finally:
        await engine.close()
    assert not first.running


def kill_schedulers(group: int) -> None:
    """SIGKILL to the process that samples, of the servers in a process group."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            mine = os.getpgid(int(entry.name)) == group
            name = (entry / "cmdline").read_bytes()
        except (OSError, ProcessLookupError):
            continue
        if mine and b"scheduler" in name:
            os.kill(int(entry.name), signal.SIGKILL)


def test_real_plan_is_that_of_the_engine(sglang_venv: str) -> None:
    words = real_plan().arguments(1, 0)
    assert words[1:3] == ["-m", "sglang.launch_server"]
