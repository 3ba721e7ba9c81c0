"""The sandbox in ordinary use: state, values, images, notices; loops that come and go; cancellation; nothing left."""

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agentrl_tools.sandbox import Limits, Sandbox, SandboxSession, make_sandbox
from agentrl_tools.sandbox.base import MIB
from agentrl_tools.sandbox.bwrap import BrokenReplyError, BwrapSandbox, read_reply, runs_as_ordinary
from paths import ROOT
from processes import alive, command, eventually
from sandbox_help import MARK, descendants, left, more_than

from agentrl import InfrastructureError, UserError

pytestmark = pytest.mark.usefixtures("bubblewrap")

LIMITS = Limits(wall_seconds=10, memory=256 * MIB, image_bytes=MARK)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = make_sandbox("bwrap", limits=LIMITS, pool=1)
    yield sandbox
    await sandbox.close()


@pytest.fixture
async def session(sandbox: Sandbox) -> AsyncIterator[SandboxSession]:
    async with sandbox.session() as session:
        yield session


async def test_state_value_and_outputs(session: SandboxSession) -> None:
    assert (await session.run("x = 1")).value is None
    execution = await session.run("import sys\nprint('a')\nprint('b', file=sys.stderr)\nx + 1")
    assert (execution.stdout, execution.stderr, execution.value) == ("a\n", "b\n", "2")
    assert execution.ok
    assert (execution.cut, execution.lost, execution.lost_before) == (False, False, False)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("", None), ("# nothing", None), ("None", None), ("'ü€😀'", "'ü€😀'"), ("x = 3", None), ("1;2", "2"),
        ("'\\ud800'", "'\\ud800'"), ("await __import__('asyncio').sleep(0, 'late')", "'late'"),
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    a: int\npickle.loads(pickle.dumps(P(1)))",
         "P(a=1)"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)']).returncode", "0"),
        ("from multiprocessing import Pool\nwith Pool(2) as p: r = p.map(abs, [-1, 2])\nr", "[1, 2]"),
        # What has ended and waits for its parent holds nothing, and is looked at several times here.
        ("from multiprocessing import Pool\nwith Pool(8) as p: r = p.map(abs, [-1, 2])\nr", "[1, 2]"),
        ("import os, subprocess, sys, time\nkept = [subprocess.Popen([sys.executable, '-c', '']) for _ in range(4)]\n"
         "for one in kept: os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)\ntime.sleep(0.5)", None),
        ("import asyncio\nasync def echo(r, w): w.write(await r.readline()); w.close()\n"
         "async def main():\n    server = await asyncio.start_server(echo, '127.0.0.1', 0)\n    global where\n"
         "    where = server.sockets[0].getsockname()\n    return sum(await asyncio.gather(*map(ask, range(20))))\n"
         "async def ask(n):\n    r, w = await asyncio.open_connection(*where)\n    w.write(b'%d\\n' % n)\n"
         "    await asyncio.sleep(0.2)\n    return int(await r.readline())\n"
         "await main()", "190"),
    ],
)  # fmt: skip
async def test_values(session: SandboxSession, code: str, value: str | None) -> None:
    execution = await session.run(code)
    assert execution.error is None
    assert execution.value == value


async def test_an_interpreter_that_starts_late_is_no_memory() -> None:
    """On a busy machine the first call is measured before its interpreter shows what it uses."""
    sandbox = BwrapSandbox(dataclasses.replace(LIMITS, memory=128 * MIB), pool=0)
    late = "become = supervisor.Supervisor.become_worker; import time; "
    late += "supervisor.Supervisor.become_worker = lambda *a: (time.sleep(0.5), become(*a)); supervisor.main("
    sandbox._config["after"][-1] = sandbox._config["after"][-1].replace("supervisor.main(", late)
    async with sandbox.session() as session:
        assert (await session.run("1 + 1")).value == "2"
    await sandbox.close()


async def test_a_traceback_holds_the_cells_frames_only(session: SandboxSession) -> None:
    await session.run("import json\ndef f():\n    return json.loads('{')")
    error = (await session.run("f()")).error
    assert [line for line in error.splitlines() if line.strip(" ^~")] == [
        "Traceback (most recent call last):", '  File "<cell 2>", line 1, in <module>', "    f()",
        '  File "<cell 1>", line 3, in f', "    return json.loads('{')",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("exit()", "SystemExit"),
        ("x = '\0'", "SyntaxError: source code string cannot contain null bytes"),
        ("input()", "EOFError: EOF when reading a line"),
        ("try: 1/0\nexcept ZeroDivisionError: [][0]", "IndexError: list index out of range"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("(" * 5000 + ")" * 5000, "too many nested parentheses"),
    ],
)
async def test_errors(session: SandboxSession, code: str, end: str) -> None:
    execution = await session.run(code)
    assert end in (execution.error or "")
    assert "runtime" not in (execution.error or "")
    assert (await session.run("1 + 1")).value == "2"


async def test_images(session: SandboxSession) -> None:
    classes = (
        "class Drawn:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\nA'\n"
        "class Saved:\n    def save(self, file, format): file.write(b'\\x89PNG\\r\\n\\x1a\\nB')\n"
        "Saved.__module__ = 'PIL.Image'"
    )
    await session.run(classes)
    execution = await session.run("display(Drawn(), 3)\nSaved()")
    assert execution.images == (PNG + b"A", PNG + b"B")
    assert execution.value is None
    assert execution.stdout == "3\n"
    execution = await session.run("display(b'\\x89PNG\\r\\n\\x1a\\n' + bytes(5_000_000))")
    assert execution.images == ()
    assert execution.cut
    execution = await session.run("for i in range(1000): display(b'\\x89PNG\\r\\n\\x1a\\n%d' % i)")
    assert execution.images == tuple(PNG + b"%d" % i for i in range(LIMITS.images))
    assert execution.cut


async def test_packages_and_figures(tmp_path: Path) -> None:
    """matplotlib's open figures come back and are closed; here a small stand-in with the functions that matter."""
    package = tmp_path / "packages" / "matplotlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pyplot.py").write_text(
        "open_ = {}\n"
        "class Figure:\n    def savefig(self, file, format): file.write(b'\\x89PNG\\r\\n\\x1a\\nF')\n"
        "def plot(): open_[1] = Figure()\ndef get_fignums(): return list(open_)\n"
        "def figure(n): return open_[n]\ndef close(which): open_.clear()\n"
    )
    sandbox = make_sandbox("bwrap", limits=LIMITS, pool=0, packages=[str(tmp_path / "packages")])
    async with sandbox.session() as session:
        execution = await session.run("import matplotlib.pyplot as plt\nplt.plot()\nplt.figure(1)")
        assert execution.images == (PNG + b"F",)
        assert (await session.run("1")).images == ()
        failed = await session.run("plt.plot()\nplt.figure(1).savefig = lambda file, format: 1 / 0")
        assert "ZeroDivisionError" in (failed.error or "")
        assert (await session.run("plt.get_fignums()")).value == "[]"
        assert "Read-only" in ((await session.run("open(plt.__file__, 'w')")).error or "")
    await sandbox.close()
    with pytest.raises(UserError, match="no folder"):
        make_sandbox("bwrap", packages=[str(tmp_path / "absent")])


async def test_loops_that_come_and_go() -> None:
    """As phases of a trainer: each in a loop of its own, and one sandbox for all."""
    sandbox = make_sandbox("bwrap", limits=LIMITS, pool=1)

    async def phase() -> str | None:
        async with sandbox.session() as session:
            return (await session.run("40 + 2")).value

    def phases() -> list[str | None]:
        return [asyncio.run(phase()) for _ in range(3)]

    assert await asyncio.to_thread(phases) == ["42"] * 3
    assert await asyncio.to_thread(phases) == ["42"] * 3  # another thread, when the former has ended
    await sandbox.close()
    assert await phase() == "42"  # and after a close
    await sandbox.close()


async def test_a_cancelled_call_leaves_nothing(sandbox: Sandbox, session: SandboxSession) -> None:
    await session.run("x = 1")
    call = asyncio.create_task(session.run("import os, time\nos.fork()\ntime.sleep(60)"))
    await asyncio.sleep(0.3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    execution = await session.run("'x' in globals()")
    assert execution.value == "False"
    assert execution.lost_before
    assert not (await session.run("1")).lost_before


async def test_close_during_a_call(session: SandboxSession) -> None:
    call = asyncio.create_task(session.run("import time\ntime.sleep(60)"))
    await asyncio.sleep(0.2)
    await session.close()
    await session.close()
    assert (await call).lost
    with pytest.raises(RuntimeError, match="closed"):
        await session.run("1")


async def test_calls_at_once_wait_for_each_other(session: SandboxSession) -> None:
    await session.run("n = 0")
    executions = await asyncio.gather(*(session.run("n += 1\nn") for _ in range(10)))
    assert sorted(int(e.value or 0) for e in executions) == list(range(1, 11))


async def test_the_launchers_death_is_not_the_models_fault(sandbox: Sandbox, session: SandboxSession) -> None:
    assert isinstance(sandbox, BwrapSandbox)
    call = asyncio.create_task(session.run("import time\ntime.sleep(60)"))
    await asyncio.sleep(0.2)
    os.kill(sandbox._spawner._process.pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="launcher"):
        await call
    assert (await session.run("1 + 1")).value == "2"


async def test_a_sandbox_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = BwrapSandbox(LIMITS, pool=0)
    sandbox._config["before"] = ["--no-such-option"]
    before = left()
    with pytest.raises(InfrastructureError, match="no-such-option"):
        await sandbox.open()
    await sandbox.close()
    assert more_than(before) == (0, [], [])


def test_a_bubblewrap_that_does_not_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"does not work here .*No permissions.*max_user_namespaces") as caught:
        make_sandbox("bwrap")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="did you mean 'bwrap'"):
        make_sandbox("bwarp")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be compared with an ordinary user")
async def test_root_runs_it_as_an_ordinary_user(session: SandboxSession) -> None:
    if not runs_as_ordinary(shutil.which("bwrap") or ""):
        pytest.skip("this kernel gives ordinary users no namespaces")
    (await session.run("1"))
    owners = {one.uids().real for one in descendants() if command(one).startswith("/usr/bin/bwrap")}
    assert owners == {65534}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become an ordinary user")
def test_an_ordinary_user_can_run_it() -> None:
    pythons = [p for p in ("/usr/local/bin/python3", "/usr/bin/python3") if _is_recent(p)]
    if not pythons:
        pytest.skip("needs an interpreter (3.11 or later) where ordinary users can read it")
    code = (
        "import asyncio\nfrom agentrl_tools.sandbox import make_sandbox\n"
        "async def main():\n    async with make_sandbox('bwrap').session() as s:\n"
        "        print((await s.run('6 * 7')).value)\n"
        "        e = await s.run('import os, time\\nfor _ in range(99): os.fork() or time.sleep(9)')\n"
        "        print('BlockingIOError' in (e.error or '') or e.stop)\nasyncio.run(main())"
    )
    root = ROOT
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for source in (root / "agentrl", root / "tools" / "agentrl_tools"):
            shutil.copytree(source, f"{folder}/{source.name}", ignore=shutil.ignore_patterns("__pycache__"))
        os.chmod(folder, 0o755)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": folder}
        command = [pythons[0], "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, user=12345, group=12345, extra_groups=[], cwd="/", env=environment
        )
    assert done.stdout == "42\nTrue\n", done.stderr


def _is_recent(python: str) -> bool:
    if not os.path.exists(python):
        return False
    said = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    return said.stdout == b"True\n"


@pytest.mark.parametrize("data", [b"V", b"V\xff\xff\xff\xff", b"V\x05\0\0\0abc", b"S\x01\0\0\0?"])
def test_replies_that_are_none(data: bytes) -> None:
    with pytest.raises(BrokenReplyError):
        read_reply(data, LIMITS, False, 0.0)


def test_a_reply_is_bounded_whatever_it_says() -> None:
    long = b"o" + (10_000_000).to_bytes(4, "little") + b"x" * 10_000_000
    execution, _ = read_reply(long + b"I\x02\0\0\0ab", LIMITS, False, 0.0)
    assert len(execution.stdout) == 2 * LIMITS.output
    assert execution.images == ()


async def soak() -> None:
    sandbox = make_sandbox("bwrap", limits=LIMITS, pool=4)
    async with sandbox.session() as session:
        await session.run("1")
    await sandbox.close()
    before = left()

    async def one(n: int) -> None:
        async with sandbox.session() as session:
            await session.run(f"total = {n}")
            for i in range(18):
                await session.run(f"total += {i}\nopen('/tmp/f{i}', 'w').write('x')")
            if n % 10 == 0:
                await session.run("import os\nif os.fork() == 0:\n    while True: pass\nos._exit(0)")
            else:
                assert (await session.run("total")).value == str(n + 153)

    slots = asyncio.Semaphore(8)

    async def limited(n: int) -> None:
        async with slots:
            await one(n)

    await asyncio.gather(*(limited(n) for n in range(100)))
    await sandbox.close()
    assert more_than(before) == (0, [], [])


@pytest.mark.long
def test_soak(tmp_path: Path) -> None:
    """2,000 calls over 100 sessions, some of which misbehave; then nothing is left.

    In a process of its own: threads that other tests left in this one open and close descriptors as they like.
    """
    command = [sys.executable, "-c", "import asyncio, test_sandbox\nasyncio.run(test_sandbox.soak())"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


async def test_a_kill_while_it_starts_leaves_nothing() -> None:
    """bubblewrap's child waits for its parent then, for ever if need be."""
    before = len(descendants())
    for n in range(12):
        sandbox = make_sandbox("bwrap", limits=LIMITS, pool=3)
        opening = asyncio.create_task(sandbox.open())
        await asyncio.sleep(0.01 * n)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await sandbox.close()
    assert len(descendants()) == before


async def test_dropping_it_without_a_close_leaves_nothing() -> None:
    """A program that ends as it stands, in the middle of a call."""
    code = (
        "import asyncio, os\nfrom agentrl_tools.sandbox import make_sandbox\n"
        "async def main():\n    s = await make_sandbox('bwrap', pool=2).open()\n"
        "    asyncio.create_task(s.run('import time; time.sleep(60)'))\n    await asyncio.sleep(0.2)\n"
        "    print(s._sandbox._spawner._process.pid, flush=True)\n    os._exit(0)\nasyncio.run(main())"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    launcher = int(done.stdout)
    await eventually(lambda: not alive(launcher))
