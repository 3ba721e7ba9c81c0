"""Servers that a run launches: they start, die, come back and never outlive it."""

import asyncio
import os
import stat
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import psutil
import pytest
import torch
from paths import SUPPORT
from processes import alive, command, eventually, until
from sglang_help import embedded_path, tiny
from sglang_server_help import FAKE, plan, started
from sglang_weights_help import Weights, altered, ask, check_answer, spans_of
from warm import Python

from agentrl.addresses import KEY_VARIABLE, authorization
from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers import server as launched_server
from agentrl.engine.servers.server import Server
from agentrl.engine.sglang.command import SglangPlan
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.errors import UserError
from agentrl.weights.channel import WeightChannel
from agentrl.weights.sglang import SglangServer
from agentrl.weights.source import ModelWeights
from agentrl.weights.transports.nccl import GroupTransport


def fake(tmp_path: Path) -> tuple[SglangPlan, Path]:
    """A command that serves, with a child of its own; and where both ids will be written."""
    program, ids = tmp_path / "fake.py", tmp_path / "ids"
    program.write_text(FAKE)
    return plan(sys.executable, str(program), str(ids)), ids


def pids(file: Path) -> list[int]:
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(p) for p in file.read_text().split()]


async def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    launch, ids = fake(tmp_path)
    server = await started(launch, tmp_path / "log")
    found = pids(ids)
    assert all(map(alive, found))
    await server.stop()
    until(lambda: not any(map(alive, found)))
    assert "it serves" in (tmp_path / "log").read_text()


NAMED = """
import mmap, multiprocessing, os, pathlib, sys, time
from multiprocessing.shared_memory import SharedMemory
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    lock, memory = context.Lock(), SharedMemory(create=True, size=64)
    context.Process(target=time.sleep, args=(1000,), daemon=True).start()
    loads = f"sglang_loads_{os.getpid()}.shm"
    with open(f"/dev/shm/{loads}", "w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    pathlib.Path(sys.argv[1] + ".names").write_text(f"sem.{lock._semlock.name[1:]} {memory.name} {loads}")
    exec(open(sys.argv[2]).read())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_what_it_named_in_shared_memory_is_gone_with_it(tmp_path: Path, how: str) -> None:
    """Python's tracker removes what it knows of, where it is not killed as well; the supervisor what SGLang leaves."""
    _, ids = fake(tmp_path)
    (tmp_path / "named.py").write_text(NAMED)
    words = (sys.executable, str(tmp_path / "named.py"), str(ids), str(tmp_path / "fake.py"))
    server = await started(plan(*words), tmp_path / "log")
    names = [Path("/dev/shm") / name for name in Path(f"{ids}.names").read_text().split()]
    assert all(name.exists() for name in names)
    if how == "stop":
        await server.stop()
    else:
        server.kill()
    assert not any(name.exists() for name in names)


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


async def test_a_long_log_keeps_its_command_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_server, "LOG_BYTES", 1500)
    monkeypatch.setattr(launched_server, "LOG_END_BYTES", 700)
    program, log = tmp_path / "talks.py", tmp_path / "log"
    talk = 'for i in range(200):\n    print(f"line {i}", flush=True)\nprint("it serves"'
    program.write_text(FAKE.replace('print("it serves"', talk))
    server = await started(plan(sys.executable, str(program), str(tmp_path / "ids")), log)
    try:
        until(lambda: "it serves" in log.read_text())
        size = log.stat().st_size
        server.shorten_log()
        lines = log.read_text().splitlines()
        assert lines[0].startswith("$ ")
        assert lines[1].startswith("[")
        assert lines[-2:] == ["line 199", "it serves"]
        assert log.stat().st_size == size - int(lines[1].split()[0][1:]) + len(lines[1]) + 1
        server.shorten_log()
        assert log.read_text().splitlines() == lines
    finally:
        await server.stop()


async def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    program = tmp_path / "bad.py"
    program.write_text("import sys; print('ValueError: no such model'); sys.exit(3)")
    with pytest.raises(UserError, match=r"ended as it started: ValueError: no such model \(log: .*log\)"):
        await started(plan(sys.executable, str(program)), tmp_path / "log")


async def test_a_server_that_never_serves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up once it is loading."""
    log = tmp_path / "log"
    clock = SimpleNamespace(monotonic=lambda: 3.0 if log.exists() and "\nloading" in log.read_text() else 0.0)
    monkeypatch.setattr("agentrl.engine.servers.server.time", clock)
    program, ids = tmp_path / "slow.py", tmp_path / "ids"
    program.write_text(
        "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} 1'); print('loading', flush=True);"
        "time.sleep(1000)"
    )
    with pytest.raises(UserError, match=r"within 2 seconds \(engine.args.start_timeout\); its last line: loading"):
        await started(plan(sys.executable, str(program), str(ids)), log, 2.0)
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


@pytest.mark.slow
def test_it_does_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    _, ids = fake(tmp_path)
    run = tmp_path / "run.py"
    run.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(SUPPORT)!r})
        from pathlib import Path
        from sglang_server_help import plan, started
        async def main():
            launch = plan(sys.executable, {str(tmp_path / "fake.py")!r}, {str(ids)!r})
            await started(launch, Path({str(tmp_path / "log")!r}))
            await asyncio.sleep(1000)
        asyncio.run(main())
        """)
    )
    process = Python([str(run)])
    found = pids(ids)
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, found)))


def test_flags_of_the_recipe_come_over_ours() -> None:
    launch = SglangPlan(
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


def real_like(**sizes: int) -> SglangPlan:
    return SglangPlan(command=("x",), model_path="m", dtype="float32", flags={}, max_batch=4, cpu=True, **sizes)


@pytest.fixture(scope="module")
def engine(sglang_venv: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """One that launched a real server, which listens on every network of this machine."""
    torch.set_num_threads(1)
    model, tokenizer = tiny()
    made = SglangEngine(
        model, max_batch=16, tokenizer=tokenizer, model_path=str(embedded_path()), venv=sglang_venv, patience=600.0,
        flags={"max-total-tokens": 16384, "host": "0.0.0.0"}, log_dir=str(tmp_path_factory.mktemp("launched")),
    )  # fmt: skip

    async def start() -> None:
        await made.health()
        await made.fleet._sessions.close()

    asyncio.run(start())
    yield made
    asyncio.run(made.close())


@pytest.fixture
async def launched(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """Its server, up: started anew where an earlier test has killed it. Whoever is told its URL knows its key."""
    (server,) = engine.fleet._launched
    before = server.url
    made = await engine.generate([5, 6, 7], Sampling(2), "up?")
    assert len(made.ids) == 2
    assert engine.fleet._launched == [server]
    assert before == server.url or engine.fleet.pool.members[0].url == server.url
    monkeypatch.setenv(KEY_VARIABLE, str(engine.fleet._sessions.key))
    yield server
    await engine.fleet._sessions.close()


async def test_a_server_on_a_network_answers_nobody_without_its_key(engine: SglangEngine, launched: Server) -> None:
    """Neither to sample, nor what would change its weights or end it."""
    calls = [("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}), ("/model_info", None),
             ("/update_weights_from_disk", {"model_path": "/nowhere"}), ("/pause_generation", {}),
             ("/load_lora_adapter_from_tensors", {}), ("/init_weights_update_group", {})]  # fmt: skip
    key = engine.fleet._sessions.key
    for tried in (None, "", key[:-1], key + "0"):
        async with aiohttp.ClientSession(headers=authorization(tried)) as session:
            for path, body in calls:
                async with session.request("GET" if body is None else "POST", launched.url + path, json=body) as answer:
                    assert answer.status == 401
    assert stat.S_IMODE(launched.log.stat().st_mode) == 0o600  # SGLang writes its key there
    await engine.update_weights(engine.weight_version + 1)
    await engine.generate([5, 6, 7], Sampling(2), "x")


@pytest.mark.long
async def test_one_of_two_real_servers_is_killed_in_mid_run(
    engine: SglangEngine, launched: Server, sglang_url: str
) -> None:
    """Each of 32 conversations ends with as many tokens, greedy ones with the local engine's; the server is launched
    again, and serves."""
    model, tokenizer = tiny()
    said: list[str] = []
    both = SglangEngine(model, max_batch=16, tokenizer=tokenizer, say=said.append, urls=(sglang_url, launched.url))
    prompts = [tokenizer.encode(f"A farmer has {i} eggs and sells {i // 2}.") for i in range(32)]
    greedy = Sampling(120, temperature=0.0)
    try:
        await both.health()
        work = [asyncio.create_task(both.generate(p, greedy, f"{i}")) for i, p in enumerate(prompts)]
        (member,) = [m for m in both.fleet.pool.members if m.url == launched.url]
        begun = member.last_seen
        await eventually(lambda: member.calls and member.last_seen > begun)
        kill_schedulers(launched._tree.pid)
        made = await asyncio.gather(*work)
    finally:
        await both.close()
    assert [len(m.ids) for m in made] == [120] * 32
    local = LocalEngine(model, max_batch=32)
    ours = await asyncio.gather(*(local.generate(p, greedy, f"{i}") for i, p in enumerate(prompts)))
    await local.close()
    for a, b in zip(made, ours, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert any("taken out" in line and launched.url in line for line in said)
    ended = launched.url
    again = await engine.generate([5, 6, 7], Sampling(2), "again")
    assert len(again.ids) == 2
    assert launched.running
    assert launched.url != ended


async def test_two_real_servers_one_killed_in_mid_update(
    engine: SglangEngine, launched: Server, sglang_url: str
) -> None:
    """The broadcast breaks for both; the other one gets all of it again, and serves."""
    model, last = altered(31), altered(32)
    async with aiohttp.ClientSession(headers=authorization(engine.fleet._sessions.key)) as session:
        servers = [SglangServer(url, session, 60.0) for url in (sglang_url, launched.url)]
        channel = WeightChannel(servers, GroupTransport(timeout=20.0, bucket_bytes=200_000))
        assert not (await channel.publish(31, ModelWeights(model))).failed
        for server in servers:
            check_answer(await ask(session, server.url), [(model, 0, 16)])

        def kill(i: int) -> None:
            if i == 20:
                kill_schedulers(launched._tree.pid)

        done = await channel.publish(32, Weights(ModelWeights(last), before=kill))
        assert done.good == (sglang_url,)
        assert list(done.failed) == [launched.url]
        answer = await ask(session, sglang_url)
        assert spans_of(answer) == [("32", 0, 16)]
        check_answer(answer, [(last, 0, 16)])
        channel.servers = servers[:1]
        assert not (await channel.publish(0, ModelWeights(tiny()[0]))).failed
        await channel.close()


def kill_schedulers(group: int) -> None:
    """SIGKILL to the process that samples, of the servers in a process group."""
    for process in psutil.process_iter():
        if "scheduler" in command(process) and os.getpgid(process.pid) == group:
            process.kill()
