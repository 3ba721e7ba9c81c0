"""The provider bwrap beyond what every provider promises: what holds under attack, after a kill, and in images."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agentrl_tools.workspaces.bwrap import BwrapProvider
from containment_help import as_ordinary_user
from workspace_contract import FETCH, hello_server

from agentrl.containment.bubblewrap import ORDINARY_USER
from agentrl.errors import PathError, UserError, WorkspaceError
from agentrl.workspace.patch import patch_of
from agentrl.workspace.provider import Network, WorkspaceLimits, WorkspaceSpec
from agentrl.workspace.workspace import MIB, ChangeKind

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
async def provider() -> AsyncIterator[BwrapProvider]:
    made = BwrapProvider()
    await made.start("test")
    yield made
    await made.close()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "attack",
    [
        "cat /etc/shadow",
        "mount -t tmpfs none /mnt",
        "unshare -Ur true",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo x > /usr/bin/python3",
        "chmod u+w /usr/bin",
        "ls /root/.bashrc",
        "ls /work",
        "kill -9 1; sleep 0.1; kill -0 1 && false",
        "cat /proc/1/mem",
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 1)'",
        "python3 -c 'import ctypes; l=ctypes.CDLL(None,use_errno=True); raise SystemExit(l.ptrace(16,1,0,0) and 1)'",
        'python3 -c \'import fcntl; fcntl.ioctl(open("/dev/ptmx","wb"), 0x5412, b"x")\'',
    ],
)
async def test_attacks_from_inside_fail(provider: BwrapProvider, attack: str) -> None:
    workspace = await provider.open(WorkspaceSpec())
    assert (await workspace.exec(attack)).exit_code != 0
    assert (await workspace.exec("echo still here")).stdout == b"still here\n"


async def test_a_program_has_no_rights(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec())
    status = dict(re.findall(r"^(\w+):\s*(\S+)", (await workspace.exec("cat /proc/self/status")).text(), re.M))
    assert {status[f"Cap{one}"] for one in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["Seccomp"], status["NoNewPrivs"], status["Uid"]) == ("2", "1", "1000")


@pytest.mark.slow
async def test_files_larger_than_their_disk_and_many_names_are_packed_in_bounds(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec(limits=WorkspaceLimits(disk=32 * MIB)))
    await workspace.exec("for i in $(seq 9); do truncate -s 30M sparse$i; done", seconds=20)
    with pytest.raises(PathError, match="more than may be packed"):
        await workspace.pack(["."])
    await workspace.exec("rm -f sparse*; seq 5000 | sed s/^/a-rather-long-name-of-a-file-/ | xargs touch")
    names = [entry.path for entry in await workspace.listing()]
    assert len(names) == 5000
    with tarfile.open(fileobj=io.BytesIO(await workspace.pack(names))) as tar:
        assert len(tar.getmembers()) == 5000
    assert len(await workspace.diff()) == 5000


async def test_what_nobody_would_name_or_nest_is_told(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec())
    nest = "import os\nfor i in range(3000):\n  os.mkdir('d'); os.chdir('d')"
    assert (await workspace.exec(["python3", "-c", nest], seconds=30)).ok
    await workspace.exec("printf x > \"$(printf 'a\\377\\033[31m')\"")
    paths = [change.path for change in await workspace.diff()]
    assert 100 < len(paths) < 200
    assert "/home/user/a\udcff\x1b[31m" in paths
    kept = (await patch_of(workspace)).json()
    assert ["added", "/home/user/a\ufffd\x1b[31m", 1] in kept["changes"]
    with pytest.raises(PathError, match="lie within each other"):
        await workspace.snapshot()


async def test_many_requests_at_once_wait_for_the_keeper(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec())
    script = f"echo {'x' * 100_000} | wc -c"
    done = await asyncio.gather(*(workspace.exec(script) for _ in range(20)))
    assert {one.stdout.strip() for one in done} == {b"100001"}
    with pytest.raises(PathError, match="use a file"):
        await workspace.exec(["echo", *["x" * 1000] * 500])


async def test_nothing_of_this_machine_is_seen(provider: BwrapProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "secret-value")
    workspace = await provider.open(WorkspaceSpec(env={"MINE": "given"}))
    shown = (await workspace.exec("env; cat /proc/*/environ; ps -eo pid,args; ls /home /root /tmp")).text()
    assert "MINE=given" in shown
    assert "secret-value" not in shown
    assert "keeper.py" not in shown
    assert str(os.getpid()) not in re.findall(r"^\s*(\d+) ", shown, re.M)


async def test_ending_everything_from_inside_loses_no_files(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec())
    await workspace.write("kept.txt", b"kept")
    await workspace.exec("kill -9 -1")
    assert await workspace.read("kept.txt") == b"kept"
    done = await workspace.exec("cat kept.txt")
    if done.exit_code == 137:  # it met the end of those before it
        done = await workspace.exec("cat kept.txt")
    assert done.stdout == b"kept"


async def test_memory_of_all_processes_together_is_bounded(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec(limits=WorkspaceLimits(memory=200 * MIB)))
    eat = "python3 -c 'import time; x = bytearray(80 << 20); time.sleep(20)'"
    done = await workspace.exec(f"for i in 1 2 3 4 5; do {eat} & done; wait", seconds=30)
    assert done.stopped == "its processes used more than 200 MiB of memory"
    assert done.exit_code == 137
    one = await workspace.exec("python3 -c 'bytearray(300 << 20)'")
    assert b"MemoryError" in one.stderr
    assert (await workspace.exec("echo works")).ok


@pytest.mark.slow
async def test_a_fork_bomb_ends(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec(limits=WorkspaceLimits(processes=40)))
    bomb = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.05)"
    done = await workspace.exec(["python3", "-c", bomb], seconds=2)
    assert done.timed_out or done.stopped
    await workspace.end_processes()
    assert (await workspace.exec("ls /proc | grep -c '^[0-9]'")).stdout.strip() in (b"4", b"5", b"6")


async def test_disk_and_files_are_bounded(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec(limits=WorkspaceLimits(disk=8 * MIB, files=200)))
    full = await workspace.exec("head -c 20000000 /dev/zero > big; head -c 20000000 /dev/zero > /dev/shm/big; true")
    assert b"No space left" in full.stderr or b"File size" in full.stderr
    sizes = [len(await workspace.read(path)) for path in ("big", "/dev/shm/big")]
    assert sum(sizes) <= 8 * MIB
    many = await workspace.exec("rm -f big; for i in $(seq 300); do echo > f$i || exit 3; done")
    assert many.exit_code != 0
    with pytest.raises(PathError, match="No space left"):
        await workspace.write("more", bytes(10 * MIB))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root folder with a few programs."""
    image = tmp_path / "image"
    for program in ("sh", "cat", "ls"):
        found = os.path.realpath(str(shutil.which(program)))
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for path in [found, *re.findall(r"(/\S+) \(0x", listed)]:
            place = image / (f"bin/{program}" if path == found else path[1:])
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), place)
    (image / "hello.txt").write_text("hello")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == image.owner() and folder != Path("/"):
            with contextlib.suppress(PermissionError):
                folder.chmod(folder.stat().st_mode | 0o055)
    return image


async def test_an_image_is_a_root_folder(provider: BwrapProvider, image: Path) -> None:
    workspace = await provider.open(WorkspaceSpec(image=str(image)))
    assert (await workspace.exec("cat /hello.txt; ls /")).stdout.startswith(b"hello")
    assert b"usr/bin/python3" not in (await workspace.exec("ls /usr/bin/python3")).stdout
    await workspace.write("/made.txt", b"made")
    assert [(c.path, c.kind) for c in await workspace.diff()] == [("/made.txt", ChangeKind.ADDED)]
    assert not (image / "made.txt").exists()
    with pytest.raises(UserError, match="is no folder"):
        await provider.open(WorkspaceSpec(image="/no/such/image"))


OWNER = f"{ORDINARY_USER}:{ORDINARY_USER}"
OPENED = """
import asyncio, json, logging, sys
from agentrl_tools.workspaces.bwrap import BwrapProvider
from agentrl.workspace.provider import WorkspaceSpec

async def main():
    said = []
    logging.getLogger("agentrl.workspaces.bwrap").addFilter(lambda record: said.append(record.getMessage()))
    provider = BwrapProvider()
    await provider.start("image")
    for _ in range(2):
        workspace = await provider.open(WorkspaceSpec(image="IMAGE"))
    made = await workspace.exec("echo x > /srv/new && echo made; echo y > /new; cat /new")
    await provider.close()
    print(json.dumps([said, made.stdout.decode()]))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("ordinary", [False, True], ids=["as root", "as an ordinary user"])
def test_what_others_own_in_an_image_is_said_once(image: Path, ordinary: bool) -> None:
    (image / "srv").mkdir()
    (image / "srv").chmod(0o777)
    script = OPENED.replace("IMAGE", str(image))
    command = [sys.executable, "-c", script]

    def opened() -> list[Any]:
        if ordinary:
            return as_ordinary_user(script, image)
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    [line], made = opened()
    assert f"as {OWNER}" in line
    assert "/bin, /hello.txt, /lib" in line
    assert line.endswith(f"`chown -R {OWNER} {image}` gives it to them")
    assert made == "y\n"
    subprocess.run(["chown", "-R", OWNER, str(image)], check=True)
    assert opened() == [[], "made\ny\n"]


@pytest.mark.slow
async def test_everything_is_reached_where_that_is_asked_for(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec(network=Network(everything=True)))
    assert not workspace.listens  # its loopback is this machine's
    with hello_server() as port:
        assert (await workspace.exec(["sh", "-c", FETCH, f"http://127.0.0.2:{port}/"])).ok


async def test_a_workspace_ends_when_its_time_is_over(provider: BwrapProvider) -> None:
    workspace = await provider.open(WorkspaceSpec(limits=WorkspaceLimits(seconds=0.3)))
    with pytest.raises(WorkspaceError, match="its time is over"):
        await workspace.exec("sleep 20", seconds=30)


async def test_the_end_of_the_script_is_the_machinery_s_fault_and_the_next_workspace_opens(
    provider: BwrapProvider,
) -> None:
    workspace = await provider.open(WorkspaceSpec())
    running = asyncio.ensure_future(workspace.exec("sleep 30"))
    await asyncio.sleep(0.1)
    for pid in _script_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkspaceError):
        await running
    again = await provider.open(WorkspaceSpec())
    assert (await again.exec("echo hi")).ok


def _script_of(parent: int) -> list[int]:
    """Scripts of keepers that are children of a process."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "keeper.py" in args]


_OPENER = """
import asyncio, sys
from agentrl_tools.workspaces.bwrap import BwrapProvider
from agentrl.workspace.provider import WorkspaceSpec
async def main():
    provider = BwrapProvider()
    await provider.start("killed")
    opened = await asyncio.gather(*(provider.open(WorkspaceSpec()) for _ in range(100)))
    await asyncio.gather(*(one.exec("sleep 98765 & setsid sleep 98765 &") for one in opened))
    await opened[0].snapshot()
    print(provider.state, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_run_leaves_no_process_and_its_files_are_swept(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", _OPENER], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    state = await asyncio.to_thread(run.stdout.readline)
    assert len(_sleepers()) == 200
    run.kill()
    run.wait()
    end = time.monotonic() + 10
    while _sleepers() and time.monotonic() < end:
        await asyncio.sleep(0.05)
    assert not _sleepers()
    assert Path(state.strip()).parent == Path(tempfile.gettempdir())
    await asyncio.sleep(0.2)
    provider = BwrapProvider()
    await provider.start("next")
    assert not Path(state.strip()).exists()
    await provider.close()


def _sleepers() -> list[str]:
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith("sleep 98765")]


@pytest.mark.slow
async def test_many_open_at_once(provider: BwrapProvider) -> None:
    opened = await asyncio.gather(*(provider.open(WorkspaceSpec()) for _ in range(50)))
    done = await asyncio.gather(*(one.exec(f"echo {n} > n; cat n") for n, one in enumerate(opened)))
    assert [int(one.stdout) for one in done] == list(range(50))
