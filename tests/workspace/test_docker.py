"""The provider `docker` on a real podman: daemons that fail, images, several addresses."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agentrl_tools.workspaces import owner
from agentrl_tools.workspaces.container import Container
from agentrl_tools.workspaces.docker import DockerProvider
from agentrl_tools.workspaces.loopback import listen_inside
from podman_help import IMAGE, Podman, podman_service
from proxy import ANSWERS, Proxy
from workspace_contract import CALLS

from agentrl.errors import PathError, UserError, WorkspaceError
from agentrl.workspace.archive import packed
from agentrl.workspace.grading import Grading, grade
from agentrl.workspace.provider import Network, WorkspaceLimits, WorkspaceSpec
from agentrl.workspace.workspace import MIB, Workspace

pytestmark = pytest.mark.slow

SPEC = WorkspaceSpec(IMAGE)


@pytest.fixture
async def proxy(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxy]:
    made = Proxy(podman.address, f"{podman.folder}/proxy.sock")
    await made.start()
    yield made
    made.mode = ""
    await made.die()


@asynccontextmanager
async def opened(**args: Any) -> AsyncIterator[tuple[DockerProvider, Container]]:
    provider = DockerProvider(**args)
    await provider.start("test")
    try:
        yield provider, await provider.open(SPEC)
    finally:
        await provider.close()


@pytest.mark.parametrize("faults", [["hang"], ["cut", *ANSWERS]], ids=["hangs", "answers nonsense"])
async def test_a_daemon_that_fails_is_not_the_programs_fault(podman: Podman, proxy: Proxy, faults: list[str]) -> None:
    async with opened(address=proxy.address, deadline=5.0) as (_, workspace):
        for fault in faults:
            proxy.mode = fault
            ends = await asyncio.wait_for(
                asyncio.gather(*(call(workspace) for call in CALLS.values()), return_exceptions=True), 60
            )
            answered = {"unpack"} if fault in ("no json", "other json") else set()  # nobody reads that answer
            for name, end in zip(CALLS, ends, strict=True):
                if name not in answered:
                    assert isinstance(end, WorkspaceError), f"{fault}: {name}: {end!r}"
                    assert 10 < len(str(end)) < 600
                    assert "\n" not in str(end)
            proxy.mode = ""
            assert (await workspace.exec("echo lives")).stdout == b"lives\n"
    assert podman.containers() == []


async def test_a_daemon_that_dies_under_a_program(proxy: Proxy, podman: Podman) -> None:
    async with opened(address=proxy.address, deadline=5.0) as (provider, workspace):
        terminal = await workspace.terminal()
        running = asyncio.ensure_future(workspace.exec("echo begun; sleep 60", seconds=60))
        await asyncio.sleep(0.5)
        await proxy.die()
        with pytest.raises(WorkspaceError):
            await running
        with pytest.raises(WorkspaceError):
            await _read_to_the_end(terminal)
        for call in CALLS.values():
            with pytest.raises(WorkspaceError):
                await call(workspace)
        with pytest.raises(WorkspaceError):
            await provider.open(SPEC)
    assert len(podman.containers()) == 1  # nobody could remove it
    podman.run("rm", "-af")


async def _read_to_the_end(terminal: Any) -> None:
    for _ in range(20):
        if await terminal.read(0.5) is None:
            return
    raise AssertionError("it does not end")


async def test_a_daemon_that_answers_slowly(proxy: Proxy) -> None:
    proxy.mode = "slow"
    async with opened(address=proxy.address, deadline=10.0) as (_, workspace):
        done = await workspace.exec("echo x", seconds=10)
        assert (done.stdout, done.ok) == (b"x\n", True)
        await workspace.write("file", b"data")
        assert await workspace.read("file") == b"data"


async def test_a_daemon_that_hangs_under_a_program_with_a_deadline(proxy: Proxy) -> None:
    async with opened(address=proxy.address, deadline=5.0) as (_, workspace):
        running = asyncio.ensure_future(workspace.exec("sleep 60", seconds=4.0))
        await asyncio.sleep(2.5)
        proxy.mode = "hang"
        began = time.monotonic()
        with pytest.raises(WorkspaceError, match="no answer within 5 s"):
            await running
        assert time.monotonic() - began < 20
        proxy.mode = ""


async def test_a_full_disk_of_the_daemon_is_the_machinerys_fault() -> None:
    with podman_service(megabytes=40) as small:
        provider = DockerProvider(small.address)
        await provider.start("full")
        filler = small.folder / "filler"
        try:
            workspace = await provider.open(SPEC)
            await workspace.write("answer", bytes(MIB))
            _fill(filler, leaving=800_000)
            grading = Grading("echo 1 > /logs/verifier/reward.txt", tests=packed({"/tests/x": b""}))
            with pytest.raises(WorkspaceError, match="no space left"):
                await grade(workspace, grading)
            with pytest.raises(WorkspaceError, match="no space left"):
                await workspace.write("more", bytes(MIB))
            with pytest.raises(WorkspaceError, match="no space left"):
                await _run_while_it_fills(workspace, filler)
            filler.unlink()
            assert (await grade(workspace, grading)).rewards == {"reward": 1.0}
            mine = await provider.open(replace(SPEC, limits=WorkspaceLimits(disk=2 * MIB)))
            await mine.write("own", bytes(2 * MIB - 1))
            _fill(filler, leaving=800_000)
            with pytest.raises(PathError, match="no space left"):
                await mine.write("more", bytes(MIB))
        finally:
            filler.unlink(missing_ok=True)
            await provider.close()


async def _run_while_it_fills(workspace: Workspace, filler: Path) -> None:
    for _ in range(20):  # until the daemon has freed all that it still had to tidy away
        _fill(filler)
        assert (await workspace.exec("echo x")).stdout == b"x\n"


def _fill(path: Path, leaving: int = 0) -> None:
    """Fill the disk on which a file lies, but for some bytes."""
    with path.open("ab", buffering=0) as file:
        try:
            while (room := shutil.disk_usage(path).free - leaving) > 0:
                file.write(bytes(min(room, MIB)))
        except OSError:
            pass


async def test_a_workspace_that_vanishes(podman: Podman) -> None:
    async with opened(address=podman.address) as (_, workspace):
        running = asyncio.ensure_future(workspace.exec("sleep 60", seconds=60))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(podman.run, "rm", "-f", workspace.container)
        with pytest.raises(WorkspaceError):
            await running
        for name, call in CALLS.items():
            if name != "fresh":
                with pytest.raises(WorkspaceError):
                    await call(workspace)


async def test_a_dead_daemons_workspaces_are_opened_elsewhere(podman: Podman, proxy: Proxy) -> None:
    provider = DockerProvider([proxy.address, podman.address, "unix:///nowhere.sock"], deadline=5.0)
    await provider.start("test")
    try:
        four = [await provider.open(SPEC) for _ in range(4)]
        snapshots = [await workspace.snapshot() for workspace in four]
        await proxy.die()
        ends = [await _end(workspace) for workspace in four]
        assert sorted(ends) == ["dead", "dead", "lives", "lives"]  # by load: two on each
        more = [await provider.open(SPEC) for _ in range(2)]
        assert [await _end(workspace) for workspace in more] == ["lives", "lives"]
        for end, snapshot in zip(ends, snapshots, strict=True):
            if end == "lives":
                assert await _end(await provider.open(SPEC, snapshot)) == "lives"
            else:
                with pytest.raises(WorkspaceError):
                    await provider.open(SPEC, snapshot)
    finally:
        await provider.close()
    podman.run("rm", "-af")
    podman.run("rmi", *(name for name in podman.images() if "snapshot" in name), check=False)


async def _end(workspace: Workspace) -> str:
    try:
        return "lives" if (await workspace.exec("true")).ok else "broken"
    except WorkspaceError:
        return "dead"


async def test_images_that_are_not_there(podman: Podman) -> None:
    provider = DockerProvider(podman.address, pull=False)
    await provider.start("test")
    with pytest.raises(UserError, match=r"'localhost/none:1'.*podman import"):
        await provider.open(WorkspaceSpec("localhost/none:1"))
    with pytest.raises(UserError, match="name an image"):
        await provider.open(WorkspaceSpec())
    await provider.close()
    with pytest.raises(UserError, match="is it running"):
        await DockerProvider("unix:///nowhere.sock").start("test")
    for wrong in ("nowhere:1", []):
        with pytest.raises(UserError, match="address"):
            await DockerProvider(wrong).start("test")


async def test_an_image_is_built_once(podman: Podman, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {IMAGE}\nCOPY answer /srv/answer\nENV WORD=here\nWORKDIR /srv\nUSER agent"
    )
    (tmp_path / "answer").write_text("42\n")
    provider = DockerProvider(podman.address, IMAGE)
    await provider.start("test")
    try:
        spec = WorkspaceSpec(build=str(tmp_path))
        one, two = await asyncio.gather(provider.open(spec), provider.open(spec))
        done = await one.exec("pwd; cat answer; echo $WORD; id -un")
        assert done.stdout == b"/srv\n42\nhere\nagent\n"
        assert await two.diff() == []
        plain = await two.fresh(image=IMAGE)
        assert (await plain.exec("pwd; id -un")).stdout == b"/home/user\nroot\n"
        again = await plain.fresh(build=str(tmp_path))
        assert await again.read("answer") == b"42\n"
        await one.write("/home/agent/mine", b"x")
        assert (await one.exec("echo y >> /home/agent/mine; echo z > /etc/no")).exit_code != 0
        assert await one.read("/home/agent/mine") == b"xy\n"
        assert (await one.exec("id -un", user="root")).stdout == b"root\n"
        with pytest.raises(PathError, match="nobody-here"):
            await one.exec("true", user="nobody-here")
        fork = await provider.open(spec, await one.snapshot())
        assert (await fork.exec("pwd; id -un; cat /home/agent/mine")).stdout == b"/srv\nagent\nxy\n"
        (tmp_path / "Dockerfile").write_text("FROM registry.invalid/none:1\n")
        with pytest.raises(UserError, match="Dockerfile: the"):
            await provider.open(spec := replace(spec, build=f"{tmp_path}/."))
        (tmp_path / "Dockerfile").unlink()
        with pytest.raises(UserError, match="no file Dockerfile"):
            await provider.open(replace(spec, build=f"{tmp_path}/./"))
    finally:
        await provider.close()


async def test_programs_reach_this_process_where_their_daemon_is_here(
    podman: Podman, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = WorkspaceSpec(IMAGE, network=Network(hosts=("a.example",)))
    for address in ("tcp://10.0.0.7:2375", [podman.address, "tcp://10.0.0.7:2375"]):
        with pytest.raises(UserError, match="a list of hosts only where the daemon is on this machine"):
            DockerProvider(address).check(hosts)
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.7:2375")
    assert not DockerProvider().capabilities.listens
    monkeypatch.setenv("DOCKER_HOST", podman.address)
    async with opened() as (provider, workspace):
        provider.check(hosts)
        workspace._config["Entrypoint"] = ["another machine's"]  # as one that a process of ours has by chance
        with pytest.raises(WorkspaceError, match="its daemon's processes are not this machine's"):
            await workspace.listen(5000)


async def test_a_first_process_that_is_not_yet_its_program_is_waited_for(podman: Podman) -> None:
    line = "read go; exec sh -c 'read end' the-name"
    with subprocess.Popen(["sh", "-c", line], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        listening = asyncio.create_task(listen_inside(process.pid, "the-name", 0))
        done, _ = await asyncio.wait({listening}, timeout=0.3)
        assert not done
        process.stdin.write(b"go\n")
        process.stdin.flush()
        (await listening).close()
        process.stdin.close()


async def test_what_a_program_may_do_as_root(podman: Podman) -> None:
    async with opened(address=podman.address) as (_, workspace):
        status = (await workspace.exec("grep -E 'NoNewPrivs|CapBnd' /proc/self/status")).stdout.split()
        assert status == [b"CapBnd:", b"00000000000000fb", b"NoNewPrivs:", b"1"]
        assert not (await workspace.exec("mount -t tmpfs none /tmp || mknod /tmp/sda b 8 0")).ok
        said = json.loads(podman.run("inspect", workspace.container))[0]["Config"]["Labels"]
        assert said["agentrl.run"] == "test"
        assert owner.is_dead(said["agentrl.owner"]) is False


async def test_a_shell_that_a_program_removed(podman: Podman) -> None:
    async with opened(address=podman.address) as (_, workspace):
        await workspace.exec("rm -rf /bin")
        done = await workspace.exec("echo x")
        assert (done.exit_code, done.ok) == (127, False)
        assert await workspace.read("/etc/passwd")
        assert [change.path for change in await workspace.diff()] == ["/bin"]
        await _read_to_the_end(await workspace.terminal())
