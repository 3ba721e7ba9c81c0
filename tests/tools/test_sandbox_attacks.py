"""Code that means harm, run for real: stopped within its limits, told; the next call works, and nothing is left."""

import asyncio
import os
import platform
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agentrl_tools.sandbox import Execution, Limits, SandboxSession, Stop, make_sandbox
from agentrl_tools.sandbox.base import MIB
from agentrl_tools.sandbox.bwrap import BwrapSandbox
from sandbox_help import MARK, descendants

pytestmark = pytest.mark.usefixtures("bubblewrap")

LIMITS = Limits(
    wall_seconds=8.0, cpu_seconds=0.6, memory=192 * MIB, processes=12, file_size=4 * MIB, disk=8 * MIB, files=300,
    output=2000, image_bytes=MARK,
)  # fmt: skip


@pytest.fixture
async def session() -> AsyncIterator[SandboxSession]:
    """A session; after the test nothing of it is left."""
    before = len(descendants())
    sandbox = make_sandbox("bwrap", limits=LIMITS, pool=0)
    async with sandbox.session() as session:
        yield session
    await sandbox.close()
    assert len(descendants()) == before


async def survives(session: SandboxSession) -> None:
    """The next call works, and nothing but the interpreter runs."""
    execution = await session.run("import os\n[pid for pid in os.listdir('/proc') if pid.isdigit()].__len__()")
    assert execution.ok, execution
    assert execution.value == "2"


async def attack(session: SandboxSession, code: str) -> Execution:
    execution = await session.run(code)
    await survives(session)
    return execution


EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine(), -1)  # the system call that ends one thread
_FILL_DISK = "n = 0\nwhile True:\n    with open(f'{}/{{n}}', 'wb') as f:\n        f.write(b'x' * (1 << 20))\n    n += 1"
ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "forks without end": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"stop": (Stop.CPU, Stop.WALL, Stop.PROCESSES)},
    ),
    "forks in the background of a call that ends at once": (
        "import os\nif os.fork() == 0:\n    while True:\n        try: os.fork()\n        except OSError: pass\n'done'",
        {"value": ("'done'",)},
    ),
    "allocates without end": (
        "x = []\ntry:\n    while True: x.append(bytearray(1 << 20))\n"
        "except MemoryError:\n    x.pop()  # room for the next call, which lists a folder\n    raise",
        {"error": "MemoryError"},
    ),
    "allocates spread over many": (
        "import os, time\nfor n in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(100 << 20)\n        time.sleep(60)\ntime.sleep(60)",
        {"stop": (Stop.MEMORY,), "lost": (True,)},
    ),
    "allocates shared memory, which no limit of one process counts": (
        "import mmap\nx = []\nwhile True:\n    x.append(mmap.mmap(-1, 1 << 20))\n    x[-1].write(b'x' * (1 << 20))",
        {"stop": (Stop.MEMORY,)},
    ),
    "allocates in processes whose first thread has ended": (
        f"import ctypes, os, threading, time\nEXIT = {EXIT}\n"
        "def fill():\n    x = bytearray(100 << 20)\n    time.sleep(60)\n"
        "for n in range(2):\n    if os.fork() == 0:\n        threading.Thread(target=fill).start()\n"
        "        ctypes.CDLL(None).syscall(EXIT, 0)\ntime.sleep(60)",
        {"stop": (Stop.MEMORY,)},
    ),
    "goes on in a process whose first thread has ended": (
        f"import ctypes, os, threading, time\nEXIT = {EXIT}\nif os.fork() == 0:\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n    ctypes.CDLL(None).syscall(EXIT, 0)\n"
        "time.sleep(0.2)\n'done'",
        {"value": ("'done'",)},
    ),
    "makes an anonymous file": ("import os\nos.memfd_create('x')", {"error": "PermissionError"}),
    **{
        f"fills {folder}": (_FILL_DISK.format(folder), {"error": "No space left"})
        for folder in ("/tmp", "/dev/shm", "/run")
    },
    "writes one large file": (
        "f = open('/tmp/x', 'wb')\nwhile True: f.write(b'x' * (1 << 16))",
        {"error": "File too large"},
    ),
    **{
        f"writes to {place}": (f"open('{place}/x', 'w')", {"error": "Error"})
        for place in ("/", "/etc", "/usr/lib", "/python", "/runtime", "/dev", "/proc/sys/kernel")
    },
    "prints a gigabyte from another process to both": (
        "import os, time\nif os.fork() == 0:\n"
        "    while True: os.write(1, b'x' * 65536), os.write(2, b'y' * 65536)\ntime.sleep(60)",
        {"stop": (Stop.OUTPUT,), "stdout": "x", "stderr": "y"},
    ),
    "daemonizes": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 128)\n"
        "        while True: time.sleep(0.01)\n    os._exit(0)\n'away'",
        {"value": ("'away'",)},
    ),
    "writes on every descriptor": (
        "import os\nfor fd in range(128):\n    try: os.write(fd, b'\\xff' * 64)\n    except OSError: pass\n'over'",
        {"stop": (Stop.ENDED,), "lost": (True,)},
    ),
    "forges a reply": (
        "import os, struct\nforged = struct.pack('<I16s', 9, b'') + b'V' + struct.pack('<I', 4) + b'1000'\n"
        "for fd in range(3, 128):\n    try: os.write(fd, forged)\n    except OSError: pass\n"
        "import time\ntime.sleep(0.3)",
        {"value": (None,), "stop": (Stop.ENDED,)},
    ),
    "closes every descriptor": ("import os\nos.closerange(0, 128)\nwhile True: pass", {"stop": (Stop.ENDED,)}),
}
"""By name: the code, and by field of its Execution what that holds (a text), or is one of (a tuple)."""


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_stopped_and_the_next_call_works(session: SandboxSession, name: str) -> None:
    code, wanted = ATTACKS[name]
    execution = await attack(session, code)
    for field, value in wanted.items():
        found = getattr(execution, field)
        assert found in value if isinstance(value, tuple) else value in (found or ""), (field, found)


async def test_a_fork_under_way_at_the_end_of_a_call_leaves_nothing(session: SandboxSession) -> None:
    code, _ = ATTACKS["forks in the background of a call that ends at once"]
    for _ in range(150):
        assert (await session.run(code)).value == "'done'"
        await survives(session)


async def test_forks_in_both_branches_answer_once(session: SandboxSession) -> None:
    execution = await session.run("import os, time\nx = os.fork()\nif x: time.sleep(0.3)\nx > 0")
    assert execution.value == "True"
    assert (await session.run("x > 0")).value == "True"


async def test_starts_threads_without_end(session: SandboxSession) -> None:
    code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    execution = await attack_threads(session, code)
    assert "can't start new thread" in (execution.error or "") or execution.stop


async def attack_threads(session: SandboxSession, code: str) -> Execution:
    execution = await session.run(code)
    assert (await session.run("1 + 1")).value == "2"
    return execution


async def test_one_process_that_runs_out_of_memory_keeps_its_variables(session: SandboxSession) -> None:
    await session.run("kept = 'safe'")
    execution = await session.run("bytearray(1 << 30)")
    assert "MemoryError" in (execution.error or "")
    assert (await session.run("kept")).value == "'safe'"


_CROWD = (
    "import ctypes, mmap, os, socket, time\nfor n in range(10):\n    if os.fork() == 0: break\nelse: time.sleep(60)\n"
)
_FILL = (
    "kept = []\ndef fill(one):\n    one.setblocking(False)\n    kept.append(one)\n"
    "    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 26)\n    try:\n"
    "        while one.send(b'x' * (1 << 16)): os.write(1, b'.')\n    except BlockingIOError: pass\n"
)
_KERNEL = {
    "stream": "while True: [fill(one) for one in socket.socketpair()]",
    "datagram": "while True: [fill(one) for one in socket.socketpair(type=socket.SOCK_DGRAM)]",
    "not accepted": (  # in no process's table of descriptors
        "server = socket.socket(socket.AF_UNIX)\nserver.bind(f'/tmp/{os.getpid()}')\nserver.listen(4096)\n"
        "while True:\n    with socket.socket(socket.AF_UNIX) as one:\n"
        "        one.connect(server.getsockname())\n        fill(one)\n        kept.clear()"
    ),
    "tcp": (
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "while True: [fill(one) for one in (socket.create_connection(server.getsockname()), server.accept()[0])]"
    ),
    "pipe": (
        "while True:\n    try: end = os.pipe()[1]\n    except OSError: time.sleep(60)\n"
        "    os.set_blocking(end, False)\n    try:\n"
        "        while os.write(end, b'x' * (1 << 16)): os.write(1, b'.')\n    except BlockingIOError: pass"
    ),
}


@pytest.mark.parametrize("kind", _KERNEL)
async def test_what_the_kernel_holds_counts_as_memory(kind: str) -> None:
    """Each point printed is 64 KiB that the kernel took and keeps; ten processes went on to hundreds of MiB."""
    limits = Limits(
        wall_seconds=60.0, cpu_seconds=40.0, memory=64 * MIB, processes=24, output=200_000, image_bytes=MARK
    )
    sandbox = BwrapSandbox(limits, pool=0)
    async with sandbox.session() as session:
        execution = await session.run(_CROWD.replace("10", "20" if kind == "pipe" else "10") + _FILL + _KERNEL[kind])
        assert execution.stop is Stop.MEMORY
        assert execution.lost
        assert execution.stdout.count(".") << 16 < 2 * limits.memory
        await survives(session)
    await sandbox.close()


@pytest.mark.parametrize(
    "code",
    [
        "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nkept = bytearray(24 << 20)\ntime.sleep(60)",  # hides what it uses
        "kept = mmap.mmap(-1, 1 << 38, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)\n"
        "for place in range(0, 1 << 38, 1 << 21): kept[place]\ntime.sleep(60)",  # half a gigabyte of page tables each
        "kept = []\nwhile True: kept.append(mmap.mmap(-1, 4096))",
    ],
)
async def test_memory_that_no_process_shows_counts(session: SandboxSession, code: str) -> None:
    execution = await attack(session, _CROWD + code)
    assert execution.stop is Stop.MEMORY


async def test_larger_buffers_and_queues_are_not_to_be_had(session: SandboxSession) -> None:
    ask = (
        "import ctypes, fcntl, os, socket\none = socket.socketpair()[0]\nsize = (socket.SOL_SOCKET, socket.SO_SNDBUF)\n"
    )
    code = f"{ask}before = one.getsockopt(*size)\none.setsockopt(*size, 1 << 22)\none.getsockopt(*size) == before"
    assert (await attack(session, code)).value == "True"
    ordinary = f"{ask}one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)\none.getsockopt(1, socket.SO_KEEPALIVE)"
    assert (await attack(session, ordinary)).value == "1"
    assert "PermissionError" in ((await attack(session, f"{ask}fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)")).error or "")
    calls = (
        "[call(0, 0, 0, 0) for name in ('inotify_init1', 'vmsplice') for call in [getattr(ctypes.CDLL(None), name)]]"
    )
    assert (await attack(session, f"{ask}{calls}")).value == "[-1, -1]"


async def test_makes_files_without_end(session: SandboxSession) -> None:
    execution = await session.run("n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1")
    assert execution.stop is Stop.FILES
    assert execution.lost
    assert (await session.run("import os\nos.listdir('/tmp')")).value == "[]"


async def test_opens_sockets(session: SandboxSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert "Connection refused" in ((await attack(session, code)).error or "")
    code = "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)"
    assert "unreachable" in ((await attack(session, code)).error or "")
    code = "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"
    assert "unreachable" in ((await attack(session, code)).error or "")


async def test_opens_sockets_that_no_namespace_bounds(session: SandboxSession) -> None:
    for family in ("AF_VSOCK", "AF_NETLINK", "AF_ALG", "AF_PACKET"):
        execution = await attack(session, f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)")
        assert "Error" in (execution.error or ""), family


async def test_connects_to_an_abstract_socket_of_the_host(session: SandboxSession) -> None:
    name = f"\0agentrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        execution = await attack(session, f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})")
    assert "Connection refused" in (execution.error or "")


async def test_reads_the_host(session: SandboxSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    passwd = await attack(session, "print(open('/etc/passwd').read())")
    assert passwd.stdout.startswith("user:x:1000:")
    assert passwd.stdout.count("\n") <= 2
    for place in (str(tmp_path), os.path.expanduser("~"), "/home", "/root", "/work", "/etc/shadow", "/sys", "/var"):
        execution = await attack(session, f"import os\nos.stat({place!r})")
        assert "FileNotFoundError" in (execution.error or ""), place
    everything = await attack(
        session, "import os, subprocess\nprint(dict(os.environ), open('/proc/self/mounts').read())"
    )
    assert "hunter2" not in everything.stdout
    assert "SECRET_TOKEN" not in everything.stdout


async def test_environment_of_process_1_holds_nothing(session: SandboxSession, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("environ", "mem", "fd", "root", "cwd", "maps"):
        how = "os.listdir" if file in ("fd", "root", "cwd") else "open"
        execution = await attack(session, f"import os\n{how}('/proc/1/{file}')")
        assert "PermissionError" in (execution.error or ""), file
    assert (await session.run("import os\nsorted(p for p in os.listdir('/proc') if p.isdigit())")).value == "['1', '2']"


async def test_other_sessions_files_are_out_of_sight(session: SandboxSession) -> None:
    sandbox = make_sandbox("bwrap", limits=LIMITS, pool=1)
    try:
        async with sandbox.session() as other:
            await other.run("open('/tmp/mine', 'w').write('x')\nopen('/dev/shm/mine', 'w').write('x')\nname = 1")
            look = "import os\n[os.listdir(p) for p in ('/tmp', '/dev/shm', '/run')], 'name' in globals()"
            assert (await session.run(look)).value == "([[], [], []], False)"
        async with sandbox.session() as later:
            assert (await later.run(look)).value == "([[], [], []], False)"
    finally:
        await sandbox.close()


async def test_kills_its_parent_and_everything(session: SandboxSession) -> None:
    await session.run("x = 1")
    for target in ("os.getppid()", "1"):
        for number in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"):
            execution = await attack(session, f"import os, signal\nos.kill({target}, signal.{number})\nx")
            assert execution.value == "1"
    execution = await attack(session, "import os\nos.kill(-1, 9)")
    if execution.stop:  # all but process 1 and the caller itself
        assert execution.stop is Stop.ENDED
    execution = await session.run("import os\nos.kill(os.getpid(), 9)")
    assert execution.stop is Stop.ENDED
    assert execution.lost
    await survives(session)


async def test_stops_itself(session: SandboxSession) -> None:
    execution = await session.run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", seconds=0.2)
    assert execution.stop is Stop.WALL
    await survives(session)


async def test_reaches_for_the_supervisors_limits(session: SandboxSession) -> None:
    for code in ("resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))", "os.sched_setaffinity(1, {0})",
                 "os.setpriority(os.PRIO_PROCESS, 1, 19)", "os.setpriority(os.PRIO_USER, 0, 19)",
                 "resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))", "os.setuid(0)",
                 "os.chroot('/')"):  # fmt: skip
        execution = await attack(session, f"import os, resource\n{code}")
        assert execution.error is not None, code


async def test_prints_a_gigabyte(session: SandboxSession) -> None:
    execution = await attack(session, "line = 'x' * (1 << 20)\nfor _ in range(1024): print(line)")
    assert execution.stop is Stop.OUTPUT
    assert execution.cut
    assert len(execution.stdout) < 3 * LIMITS.output


async def test_prints_without_end_and_does_not_stop(session: SandboxSession) -> None:
    execution = await attack(
        session,
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "while True:\n    try: print('x' * (1 << 16))\n    except OSError: pass",
    )
    assert execution.stop is Stop.OUTPUT
    assert execution.lost
    assert execution.cut


async def test_an_interrupt_after_the_code_has_ended_changes_nothing(session: SandboxSession) -> None:
    execution = await attack(
        session,
        "import os, signal\nours = os.getpid\ndef late():\n    os.getpid = ours\n"
        "    signal.raise_signal(signal.SIGINT)\n    return ours()\nos.getpid = late\nraise ValueError('mine')",
    )
    assert "mine" in (execution.error or "")
    assert not execution.lost


async def test_returns_and_raises_more_than_is_kept(session: SandboxSession) -> None:
    execution = await attack(session, "'x' * 10_000_000")
    assert execution.cut
    assert len(execution.value or "") < 2 * LIMITS.output
    execution = await attack(session, "raise ValueError('x' * 10_000_000)")
    assert execution.cut
    assert len(execution.error or "") < 2 * LIMITS.output


async def test_never_returns(session: SandboxSession) -> None:
    await session.run("kept = 1")
    execution = await session.run("while True: pass")
    assert execution.stop is Stop.CPU
    assert not execution.lost
    execution = await session.run("import time\ntime.sleep(60)", seconds=0.2)
    assert execution.stop is Stop.WALL
    assert "KeyboardInterrupt" in (execution.error or "")
    assert (await session.run("kept")).value == "1"


@pytest.mark.parametrize(
    "stubborn",
    [
        "import signal\nfor s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass",
        "import itertools\nsum(itertools.repeat(1))",
    ],
)
async def test_swallows_every_signal(session: SandboxSession, stubborn: str) -> None:
    execution = await session.run(f"print('before')\n{stubborn}", seconds=0.2)
    assert execution.stop is Stop.WALL
    assert execution.lost
    assert execution.stdout == "before\n"
    await survives(session)


async def test_swallows_the_interrupt_and_ends(session: SandboxSession) -> None:
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: x = 'caught'"
    execution = await session.run(code, seconds=0.2)
    assert execution.stop is Stop.WALL
    assert not execution.lost
    assert (await session.run("x")).value == "'caught'"


async def test_a_repr_that_never_returns(session: SandboxSession) -> None:
    execution = await session.run("class A:\n    def __repr__(self):\n        while True: pass\nA()", seconds=0.2)
    assert execution.stop is Stop.WALL
    await survives(session)


async def test_closes_its_streams(session: SandboxSession) -> None:
    await session.run("import os, sys\nsys.stdout.close()\nos.close(1)\nos.close(2)\nsys.stderr = None")
    execution = await attack(session, "print('back')\nimport sys\nprint('too', file=sys.stderr)")
    assert (execution.stdout, execution.stderr) == ("back\n", "too\n")


async def test_reads_what_is_meant_for_the_worker(session: SandboxSession) -> None:
    """It eats the next call: only its own session suffers."""
    code = (
        "import os, threading\ndef eat():\n    for fd in range(112, 128):\n        try: os.read(fd, 1 << 16)\n"
        "        except OSError: pass\nfor _ in range(3): threading.Thread(target=eat, daemon=True).start()"
    )
    await session.run(code)
    for _ in range(4):  # each thread may eat a call, and the worker may come first
        execution = await session.run("1 + 1", seconds=0.3)
        assert execution.value == "2" or execution.stop
        if execution.lost:
            break
    assert (await session.run("1 + 1")).value == "2"


async def test_breaks_what_the_worker_uses(session: SandboxSession) -> None:
    code = (
        "import builtins, sys, os\nfor name in ('compile', 'eval', 'len', 'print', 'repr', 'sum'):\n"
        "    setattr(builtins, name, None)\nos.write = os.read = None\nsys.modules.clear()"
    )
    execution = await session.run(code)
    assert execution.stop is Stop.ENDED or execution.error or execution.ok
    again = await session.run("1 + 1")
    assert again.value == "2" or again.lost or again.error
    assert (await session.run("1 + 1")).ok or (await session.run("1 + 1")).ok


async def test_the_supervisor_is_killed_from_outside(session: SandboxSession) -> None:
    """By the kernel, for instance, when memory is short: told as the interpreter's end, and the next call works."""
    running = asyncio.create_task(session.run("import time\ntime.sleep(60)"))
    await asyncio.sleep(0.2)
    session._process._spawner.kill(session._process._name)  # type: ignore[attr-defined]
    execution = await running
    assert execution.stop is Stop.ENDED
    assert (await session.run("1 + 1")).value == "2"


async def test_limits_hold_for_root_too() -> None:
    """Processes are counted even where the kernel's own limit does not bind."""
    sandbox = BwrapSandbox(LIMITS, pool=0)
    sandbox._config["after"][-1] = sandbox._config["after"][-1].replace(
        "'count_processes': True", "'count_processes': False"
    )
    async with sandbox.session() as session:
        execution = await session.run(
            "import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
        )
        assert execution.stop is Stop.PROCESSES
        await survives(session)
    await sandbox.close()


async def test_background_work_stands_still_between_calls(session: SandboxSession) -> None:
    spin = "import threading, time\ndef spin():\n    while True: pass\n"
    await session.run(f"{spin}threading.Thread(target=spin, daemon=True).start()")
    await session.run("before = time.process_time()")
    await asyncio.sleep(0.5)
    used = (await session.run("time.process_time() - before")).value
    assert float(used or "") < 0.3
