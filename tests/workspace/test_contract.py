"""One contract for all providers of workspaces: each that works here passes every test of this file."""

import asyncio
import io
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from e2b_service import Service, e2b_service
from podman_help import IMAGE, Podman, podman_service
from python_image import GNU_IMAGE, gnu_root
from venvs import harbor_venv
from workspace_contract import FETCH, Offer, eventually, hello_server, said

from agentrl.errors import UserError
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.workspace.archive import packed
from agentrl.workspace.provider import Network, WorkspaceLimits, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import (
    MIB,
    READ,
    Change,
    ChangeKind,
    FileKind,
    PathError,
    Terminal,
    Workspace,
    WorkspaceError,
)

pytestmark = pytest.mark.slow

BWRAP = "agentrl_tools.workspaces.bwrap:BwrapProvider"
DOCKER = "agentrl_tools.workspaces.docker:DockerProvider"
E2B = "agentrl_tools.workspaces.e2b:E2bProvider"
HARBOR = "agentrl_tools.workspaces.harbor:HarborProvider"


@pytest.fixture(params=["bwrap", "docker", "e2b", pytest.param("harbor", marks=pytest.mark.long)])
def offer(request: pytest.FixtureRequest) -> Offer:
    if request.param == "bwrap":
        request.getfixturevalue("bubblewrap")
        return Offer(BWRAP)
    if request.param == "e2b":
        request.getfixturevalue("e2b")
        return Offer(E2B)
    if request.param == "harbor":
        return request.getfixturevalue("harbor")
    running: Podman = request.getfixturevalue("podman")
    return Offer(DOCKER, {"address": running.address}, WorkspaceSpec(IMAGE))


@pytest.fixture
async def e2b(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async with e2b_service(monkeypatch) as service:
        yield service


@pytest.fixture(scope="module")
def gnu_podman() -> Iterator[Podman]:
    with podman_service(image=False) as running:
        running.run(
            "import", "--change", "USER agent", "--change", "WORKDIR /home/agent", "-", GNU_IMAGE, data=gnu_root()
        )
        (running.folder / "none.yaml").write_text("services: {main: {network_mode: none}}\n")
        yield running


@pytest.fixture
def harbor(gnu_podman: Podman, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Harbor's environment `podman`, whose containers have no network: what takes it away comes from a registry."""
    python = str(harbor_venv() / "bin/python")
    for name, value in gnu_podman.own_env.items():
        monkeypatch.setenv(name, value)
    options = {"extra_docker_compose": [f"{gnu_podman.folder}/none.yaml"]}
    args = {"python": python, "environment": "podman", "options": options, "offline": True}
    return Offer(HARBOR, args, WorkspaceSpec(GNU_IMAGE))


@pytest.fixture
async def provider(offer: Offer) -> AsyncIterator[WorkspaceProvider]:
    made = offer.make()
    await made.start("contract")
    yield made
    await made.close()


@pytest.fixture
async def workspace(provider: WorkspaceProvider, offer: Offer) -> Workspace:
    return await provider.open(offer.spec)


async def test_exec(workspace: Workspace) -> None:
    done = await workspace.exec("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr, done.ok) == (3, b"out\n", b"err\n", False)
    assert (done.truncated, done.timed_out, done.stopped) == (False, False, "")
    done = await workspace.exec(["printf", "%s|", "a b", "$HOME", "*", ""])
    assert (done.stdout, done.ok) == (b"a b|$HOME|*||", True)
    done = await workspace.exec(["cat"], stdin=b"\0\xff" + bytes(range(256)) * 1000)
    assert done.stdout == b"\0\xff" + bytes(range(256)) * 1000
    assert (await workspace.exec("exec <&-; echo unread", stdin=b"x" * 300_000)).stdout == b"unread\n"
    assert (await workspace.exec(["cat"])).stdout == b""
    assert (await workspace.exec(["/nowhere/program"])).exit_code in (126, 127)
    assert (await workspace.exec("kill -9 $$")).exit_code == 128 + 9
    both = await asyncio.gather(*(workspace.exec(f"sleep 0.3; echo {n}") for n in range(4)))
    assert [done.stdout for done in both] == [b"0\n", b"1\n", b"2\n", b"3\n"]


REFUSED: Sequence[tuple[list[str] | str, dict[str, str], str]] = (
    ([], {}, "at least one word"), (["echo", "a\0b"], {}, "no zero bytes"), ("echo \ud800", {}, "no character"),
    ("x" * 130_000, {}, "to a file"), ("true", {"A": "a\0b"}, "no zero bytes"), ("true", {"A=B": "c"}, "no name"),
    ("true", {"": "c"}, "no name"),
)  # fmt: skip


async def test_what_no_program_can_be_given_is_refused(workspace: Workspace) -> None:
    for command, env, why in REFUSED:
        with pytest.raises(PathError, match=why):
            await workspace.exec(command, env=env)


async def test_exec_folder_and_environment(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await workspace.exec("pwd")).stdout.decode() == f"{workspace.home}\n"
    await workspace.write("sub folder/file", b"")
    assert (await workspace.exec(["pwd"], cwd="sub folder")).stdout.decode() == f"{workspace.home}/sub folder\n"
    assert (await workspace.exec(["pwd"], cwd="/")).stdout == b"/\n"
    for wrong in ("nowhere", "sub folder/file"):
        with pytest.raises(PathError, match=wrong):
            await workspace.exec("true", cwd=wrong)
    done = await workspace.exec(["env"], env={"GIVEN": "a = b\nc"})
    assert b"GIVEN=a = b\nc\n" in done.stdout
    assert b"GIVEN" not in (await workspace.exec("env")).stdout


async def test_where_and_as_whom_programs_begin(provider: WorkspaceProvider, offer: Offer) -> None:
    async def begins(workspace: Workspace) -> tuple[str, str]:
        pwd, name = (await workspace.exec("pwd; id -un")).stdout.decode().split()
        assert pwd == workspace.home
        return pwd, name

    with pytest.raises(UserError, match="an absolute path, not in 'srv'"):
        provider.check(replace(offer.spec, folder="srv"))
    own_folder, own = await begins(await provider.open(offer.spec))
    spec = replace(offer.spec, folder="/srv/new")
    users = [own]
    if provider.capabilities.users:
        users.append("agent" if own == "root" else "root")
        spec = replace(spec, user=users[-1])
    workspace = await provider.open(spec)
    assert await begins(workspace) == ("/srv/new", users[-1])
    terminal = await workspace.terminal()
    await terminal.send(b"echo =$(pwd)=$(id -un)=\n")
    await said(terminal, f"=/srv/new={users[-1]}=")
    fork = await provider.open(spec, await workspace.snapshot())
    assert await begins(fork) == ("/srv/new", users[-1])
    assert await begins(await fork.fresh()) == ("/srv/new", own)
    assert await begins(await provider.open(offer.spec, await fork.snapshot())) == (own_folder, own)


async def test_nothing_of_the_hosts_environment_is_inside(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-host")
    provider = offer.make()
    await provider.start("contract")
    try:
        workspace = await provider.open(replace(offer.spec, env={"OWN": "seen"}))
        done = await workspace.exec("env; cat /proc/*/environ 2>/dev/null; exit 0")
        assert b"OWN=seen" in done.stdout
        assert b"secret-of-the-host" not in done.stdout
        assert (await workspace.exec("echo $OWN")).stdout == b"seen\n"
    finally:
        await provider.close()


async def test_a_command_that_does_not_end(workspace: Workspace) -> None:
    began = time.monotonic()
    command = "trap '' TERM INT HUP; (setsid sleep 987 &) ; sleep 986 & echo begun; while :; do sleep 985; done"
    done = await workspace.exec(command, seconds=1.0)
    assert (done.timed_out, done.exit_code, done.ok, done.stdout) == (True, 124, False, b"begun\n")
    assert time.monotonic() - began < 12

    async def gone() -> bool:
        return (
            b"sleep" not in (await workspace.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | grep -ao sle[e]p.98")).stdout
        )

    await eventually(gone)
    assert (await workspace.exec("echo lives")).stdout == b"lives\n"


@pytest.mark.parametrize("many", [64 * MIB, pytest.param(4 << 30, marks=pytest.mark.long)])
async def test_output_is_bounded(workspace: Workspace, many: int) -> None:
    done = await workspace.exec(
        f"echo first; yes | head -c {many}; echo last; yes e | head -c {MIB * 8} >&2", output=1000, seconds=600
    )
    assert done.truncated
    assert done.ok
    assert done.stdout.startswith(b"first\ny\n")
    assert done.stdout.endswith(b"y\nlast\n")
    assert max(len(done.stdout), len(done.stderr)) < 1100
    done = await workspace.exec(["head", "-c", "300000", "/dev/urandom"])
    assert (len(done.stdout), done.truncated) == (300_000, False)
    done = await workspace.exec("yes", seconds=1.0, output=1000)
    assert done.timed_out
    assert len(done.stdout) < 1100


async def test_what_is_left_in_the_background_runs_on(workspace: Workspace) -> None:
    began = time.monotonic()
    loop = "while :; do echo tick >> ticks; sleep 0.1; done"
    done = await workspace.exec(f"touch ticks; ({loop}) >/dev/null 2>&1 & sleep 60 & echo begun")
    assert (done.stdout, done.ok) == (b"begun\n", True)
    assert time.monotonic() - began < 10
    first = len(await workspace.read("ticks"))
    await eventually(lambda: _longer(workspace, "ticks", first))


async def _longer(workspace: Workspace, path: str, size: int) -> bool:
    return len(await workspace.read(path)) > size


async def test_end_processes(workspace: Workspace) -> None:
    await workspace.write("kept", b"content")
    ignoring = "trap '' TERM INT HUP QUIT; while :; do echo tick >> ticks; sleep 0.05; done"
    await workspace.exec(["sh", "-c", f'(setsid sh -c "{ignoring}" >/dev/null 2>&1 &) ; sleep 0.5'])
    terminal = await workspace.terminal()
    running = asyncio.ensure_future(workspace.exec("sleep 300", seconds=300))
    await asyncio.sleep(0.5)
    await workspace.end_processes()
    done = await running
    assert done.exit_code != 0
    assert await _end_of(terminal)
    size = len(await workspace.read("ticks"))
    await asyncio.sleep(0.5)
    assert len(await workspace.read("ticks")) == size > 0
    assert await workspace.read("kept") == b"content"
    assert (await workspace.exec("echo again")).stdout == b"again\n"


async def _end_of(terminal: Terminal) -> bool:
    for _ in range(50):
        try:
            if await terminal.read(0.2) is None:
                return True
        except WorkspaceError:
            return True
    return False


async def test_a_terminal(workspace: Workspace) -> None:
    terminal = await workspace.terminal(rows=33, columns=77, env={"GIVEN": "value"})
    await terminal.send(b"PS1='> '; stty -echo; x=41; cd /; echo rea''dy\n")
    await said(terminal, "ready")
    await terminal.send(b"echo =$((x + 1))= $PWD $GIVEN; stty size\n")
    heard = await said(terminal, r"\d+ \d+\r")
    assert "=42= / value" in heard
    assert "33 77" in heard
    await terminal.resize(20, 50)
    await terminal.send(b"stty size\n")
    await said(terminal, "20 50")
    await terminal.send(b"printf 'name? '; read name; echo hello $name\n")
    await said(terminal, r"name\? ")
    await terminal.send(b"Ada\n")
    await said(terminal, "hello Ada")
    await asyncio.sleep(0.3)
    while await terminal.read(0.1):
        pass
    assert await terminal.read(0.2) == b""
    await terminal.send(b"sleep 300 & echo back''ground\n")
    await said(terminal, "background")
    await terminal.send(b"exit\n")
    assert await _end_of(terminal)
    with pytest.raises(WorkspaceError):
        await _typed_for_long(terminal)
    await terminal.close()
    await terminal.close()


async def _typed_for_long(terminal: Terminal) -> None:
    for _ in range(50):
        await terminal.send(b"more\n")
        await asyncio.sleep(0.1)


async def test_an_interrupt(workspace: Workspace) -> None:
    terminal = await workspace.terminal()
    await terminal.send(b"kept=1; stty -echo; echo rea''dy\n")
    await said(terminal, "ready")
    await terminal.send(b"echo be''gun; sleep 300\n")
    await said(terminal, "begun")
    await asyncio.sleep(0.3)
    await terminal.interrupt()
    await terminal.send(b"echo kept=$kept.\n")
    await said(terminal, "kept=1\\.")
    await terminal.send(b"sh -c \"trap '' INT TERM; echo ignor''ing; while :; do sleep 0.2; done\"\n")
    await said(terminal, "ignoring")
    await asyncio.sleep(0.3)
    await terminal.interrupt()
    await terminal.send(b"echo still=$kept.\n")
    await said(terminal, "still=1\\.")
    await terminal.send(b"sleep 4321\n")
    await asyncio.sleep(0.3)
    await terminal.close()

    async def gone() -> bool:
        return b"4321" not in (await workspace.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | grep -ao 432[1]")).stdout

    await eventually(gone)
    with pytest.raises(WorkspaceError):
        await terminal.read(0.1)


async def test_read_and_write(workspace: Workspace) -> None:
    data = bytes(range(256)) * 5000
    await workspace.write("a/b c/ü\n.bin", data)
    assert await workspace.read("a/b c/ü\n.bin") == data
    assert await workspace.read(f"{workspace.home}/a/../a/b c/ü\n.bin", offset=255, limit=3) == b"\xff\0\1"
    assert await workspace.read("a/b c/ü\n.bin", offset=len(data) + 5) == b""
    assert len(await workspace.read("a/b c/ü\n.bin", limit=READ * 4)) == len(data)
    await workspace.write("a/b c/ü\n.bin", b"short")
    assert await workspace.read("a/b c/ü\n.bin") == b"short"
    await workspace.write("run", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await workspace.exec(["./run"])).stdout == b"ran\n"
    await workspace.write("run", b"#!/bin/sh\necho again\n")
    assert (await workspace.exec(["./run"])).stdout == b"again\n"
    await workspace.write("empty", b"")
    assert await workspace.read("empty") == b""
    [entry] = await workspace.listing("empty", depth=0)
    assert (entry.kind, entry.size, entry.mode) == (FileKind.FILE, 0, 0o644)
    long = "n" * 200
    await workspace.write(f"{long}/{long}", b"long")
    assert await workspace.read(f"{long}/{long}") == b"long"
    await workspace.exec("echo own >> empty; mkdir made; echo y > made/y")
    await workspace.write("made/y", b"ours")
    assert (await workspace.exec("cat empty made/y; echo more >> made/y")).stdout == b"own\nours"


async def test_wrong_paths(workspace: Workspace) -> None:
    await workspace.exec("mkdir folder; mkfifo fifo; ln -s nowhere dangling; ln -s round round; echo x > file")
    for wrong in ("missing", "missing/file", "folder", "fifo", "dangling", "round", "file/below", "/dev/zero", "/"):
        with pytest.raises(PathError):
            await workspace.read(wrong)
    for wrong in ("folder", "fifo", "round", "file/below", "/"):
        with pytest.raises(PathError):
            await workspace.write(wrong, b"data")
    for wrong in ("missing", "file", "fifo", "dangling"):
        with pytest.raises(PathError):
            await workspace.listing(wrong)
    with pytest.raises(PathError):
        await workspace.listing("missing", depth=0)


async def test_links(workspace: Workspace) -> None:
    await workspace.exec(
        "mkdir -p d/e; echo x > d/e/file; ln -s d/e/file one; ln -s one two; ln -s d link; ln -s ../file d/e/up"
    )
    assert await workspace.read("two") == b"x\n"
    assert await workspace.read("link/e/file") == b"x\n"
    await workspace.write("two", b"through")
    assert await workspace.read("d/e/file") == b"through"
    assert [entry.kind for entry in await workspace.listing("two", depth=0)] == [FileKind.LINK]
    await workspace.write("link/new", b"new")
    assert await workspace.read("d/new") == b"new"


async def test_listing(workspace: Workspace) -> None:
    await workspace.exec(
        "mkdir -p l/sub/deep 'l/a b'; printf 12345 > l/file; chmod 640 l/file; printf x > l/sub/one; ln -s /etc l/link;"
        "mkfifo l/fifo; printf y > l/sub/deep/two; printf z > 'l/new\nline'"
    )
    entries = {entry.path: entry for entry in await workspace.listing("l")}
    assert list(entries) == sorted(["a b", "fifo", "file", "link", "new\nline", "sub"])
    kinds = {path: entry.kind.value for path, entry in entries.items()}
    assert kinds == {
        "a b": "folder",
        "fifo": "other",
        "file": "file",
        "link": "link",
        "new\nline": "file",
        "sub": "folder",
    }
    assert (entries["file"].size, entries["file"].mode) == (5, 0o640)
    assert (entries["link"].size, entries["sub"].size) == (0, 0)
    deeper = [entry.path for entry in await workspace.listing("l", depth=2)]
    assert deeper == sorted(["a b", "fifo", "file", "link", "new\nline", "sub", "sub/deep", "sub/one"])
    assert "sub/deep/two" in [entry.path for entry in await workspace.listing("l", depth=3)]
    assert [entry.path for entry in await workspace.listing("l", depth=9, limit=3)] == ["a b", "fifo", "file"]
    [itself] = await workspace.listing("l/file", depth=0)
    assert (itself.path, itself.kind, itself.size) == (".", FileKind.FILE, 5)
    assert await workspace.listing("l/a b") == []


async def test_pack_and_unpack(workspace: Workspace, tmp_path: Path) -> None:
    await workspace.exec(
        "mkdir -p p/sub; printf 1 > p/one; chmod 755 p/one; printf 22 > p/sub/two; ln -s ../one p/sub/link; "
        "mkfifo p/fifo; ln p/one p/hard; ln -s nowhere gone; ln -s p top; printf s > single"
    )
    tar = await workspace.pack(["p", "single", "missing", "gone", "top"])
    home = workspace.home.lstrip("/")
    with tarfile.open(fileobj=io.BytesIO(tar)) as members:
        names = {member.name.removeprefix(f"{home}/"): member for member in members}
        assert names.keys() == {"p", "p/one", "p/hard", "p/sub", "p/sub/two", "p/sub/link", "single", "gone", "top"}
        assert (names["p/sub/link"].linkname, names["gone"].linkname, names["top"].linkname) == (
            "../one",
            "nowhere",
            "p",
        )
        assert all(names[name].issym() for name in ("p/sub/link", "gone", "top"))
        assert names["p/one"].mode == 0o755
        assert {members.extractfile(names[name]).read() for name in ("p/one", "p/hard")} == {b"1"}  # type: ignore[union-attr]
    await workspace.exec("rm -r p; mkdir single2; mkdir -p p/one/was/a/folder")
    await workspace.unpack(tar)
    assert (await workspace.exec("cat p/sub/link p/hard p/sub/two; [ -x p/one ] && echo x")).stdout == b"1122x\n"
    await workspace.unpack(packed({"/logs/new/file": b"new", "/../up": b"up"}))
    assert await workspace.read("/logs/new/file") == b"new"
    assert await workspace.read("/up") == b"up"
    with pytest.raises(PathError):
        await workspace.unpack(b"no tar at all" * 100)
    (tmp_path / "out/inner").mkdir(parents=True)
    (tmp_path / "out/inner/file").write_bytes(b"local")
    await workspace.upload(tmp_path / "out", "given")
    assert (await workspace.exec("cat given/inner/file")).stdout == b"local"
    await workspace.download("given", tmp_path / "back")
    assert (tmp_path / "back/inner/file").read_bytes() == b"local"
    await workspace.download("single", tmp_path / "single")
    assert (tmp_path / "single").read_bytes() == b"s"
    with pytest.raises(PathError):
        await workspace.download("missing", tmp_path / "missing")


async def test_forks_of_a_snapshot(provider: WorkspaceProvider, offer: Offer, workspace: Workspace) -> None:
    await workspace.exec(
        "mkdir -p state/sub; printf prepared > state/file; rm -f /etc/group; sleep 300 >/dev/null 2>&1 &"
    )
    snapshot = await workspace.snapshot()
    await workspace.write("state/file", b"later")
    one, two = await asyncio.gather(*(provider.open(offer.spec, snapshot) for _ in range(2)))
    await asyncio.gather(one.write("state/file", b"one"), two.write("state/other", b"two"))
    assert (await one.read("state/file"), await two.read("state/file")) == (b"one", b"prepared")
    assert [entry.path for entry in await one.listing("state")] == ["file", "sub"]
    with pytest.raises(PathError):
        await one.read("/etc/group")
    assert await one.diff() == [Change(f"{one.home}/state/file", ChangeKind.MODIFIED, FileKind.FILE, 3)]
    assert [(change.path, change.kind) for change in await two.diff()] == [
        (f"{two.home}/state/other", ChangeKind.ADDED)
    ]
    again = await one.snapshot()
    fresh = await one.fresh()
    assert await fresh.read("state/file") == b"prepared"
    await provider.forget(snapshot)
    assert await one.read("state/file") == b"one"
    third = await provider.open(offer.spec, again)
    assert await third.read("state/file") == b"one"
    await provider.forget(again)


async def test_diff(workspace: Workspace) -> None:
    assert await workspace.diff() == []
    await workspace.exec(
        "mkdir -p new/sub; printf 123 > new/sub/file; ln -s x new/link; mkfifo new/fifo; rm /etc/group"
    )
    await workspace.exec("printf more >> /etc/passwd; mkdir gone; rmdir gone; touch short; rm short")
    changes = {change.path.removeprefix(f"{workspace.home}/"): change for change in await workspace.diff()}
    assert {path: (change.kind.value, change.file.value) for path, change in changes.items()} == {
        "new": ("added", "folder"), "new/sub": ("added", "folder"), "new/sub/file": ("added", "file"),
        "new/link": ("added", "link"), "new/fifo": ("added", "other"), "/etc/group": ("deleted", "file"),
        "/etc/passwd": ("modified", "file"),
    }  # fmt: skip
    assert changes["new/sub/file"].size == 3
    assert changes["/etc/passwd"].size == len(await workspace.read("/etc/passwd"))
    assert [change.path for change in await workspace.diff(2)] == sorted(c.path for c in changes.values())[:2]


async def test_fresh(workspace: Workspace) -> None:
    await workspace.exec("echo cheat > answer; echo hacked > /etc/passwd")
    fresh = await workspace.fresh()
    assert fresh.id != workspace.id
    with pytest.raises(PathError):
        await fresh.read("answer")
    assert b"root" in await fresh.read("/etc/passwd")
    await workspace.close()
    assert (await fresh.exec("echo works")).stdout == b"works\n"


async def test_two_workspaces_do_not_see_each_other(provider: WorkspaceProvider, offer: Offer) -> None:
    one, two = await asyncio.gather(*(provider.open(offer.spec) for _ in range(2)))
    await one.exec("echo mine > file; echo mine > /tmp/file; sleep 7654 >/dev/null 2>&1 &")
    for path in ("file", "/tmp/file"):
        with pytest.raises(PathError):
            await two.read(path)
    assert b"7654" not in (await two.exec("cat /proc/[0-9]*/cmdline | grep -ao 765[4] ; ls /tmp")).stdout
    await one.close()
    assert (await two.exec("echo lives")).stdout == b"lives\n"


async def test_close(provider: WorkspaceProvider, offer: Offer) -> None:
    workspace = await provider.open(offer.spec)
    terminal = await workspace.terminal()
    running = asyncio.ensure_future(workspace.exec("sleep 300", seconds=300))
    await asyncio.sleep(0.3)
    await asyncio.gather(workspace.close(), workspace.close())
    with pytest.raises(WorkspaceError):
        await running
    for call in (workspace.exec("true"), workspace.read("x"), workspace.write("x", b""), workspace.listing(),
                 workspace.snapshot(), workspace.diff(), workspace.end_processes(), workspace.terminal()):  # fmt: skip
        with pytest.raises(WorkspaceError):
            await call
    assert await _end_of(terminal)
    await terminal.close()
    await workspace.close()
    await provider.close()
    await provider.close()


async def test_there_is_no_network(workspace: Workspace) -> None:
    listed = (await workspace.exec("cat /proc/net/dev; cat /proc/net/route")).stdout.decode()
    assert [line.split(":")[0].strip() for line in listed.splitlines() if ":" in line] in ([], ["lo"])
    assert "00000000" not in listed  # no route


async def test_listed_hosts_are_reached_and_no_others(provider: WorkspaceProvider, offer: Offer) -> None:
    if not provider.capabilities.listens:  # no proxy of ours is inside: the provider has its own firewall, or refuses
        spec = replace(offer.spec, network=Network(hosts=("pypi.org",)))
        if provider.capabilities.hosts:
            assert (await (await provider.open(spec)).exec("true")).ok
        else:
            with pytest.raises(UserError, match="hosts"):
                provider.check(spec)
        return
    with hello_server() as port:
        listed = f"127.0.0.2:{port}"
        workspace = await provider.open(replace(offer.spec, network=Network(hosts=(listed,))))
        await test_there_is_no_network(workspace)
        for again in (False, True):
            if again:
                await workspace.end_processes()  # and the proxy's socket inside with them
            done = await workspace.exec(["sh", "-c", FETCH, f"http://{listed}/"])
            assert done.stdout.strip() == listed.encode(), done.text()
            refused = await workspace.exec(["sh", "-c", FETCH, f"http://127.0.0.3:{port}/"])
            assert b"403" in refused.stderr
            direct = await workspace.exec(["sh", "-c", FETCH, f"http://{listed}/"], env={"http_proxy": ""})
            assert not direct.ok
        await test_there_is_no_network(await workspace.fresh())


async def test_a_program_reaches_this_process_where_a_workspace_listens(workspace: Workspace) -> None:
    if not workspace.listens:
        with pytest.raises(WorkspaceError, match="carries no connections"):
            await workspace.listen(5000)
        return
    listener = await workspace.listen(5000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    async with await asyncio.start_server(answer, sock=listener):
        assert (await workspace.exec(["sh", "-c", FETCH, "http://127.0.0.1:5000/"])).stdout.strip() == b"hi"
        with pytest.raises(WorkspaceError, match=r"port 5000 inside: Address already in use"):
            await workspace.listen(5000)


async def test_memory_is_bounded(provider: WorkspaceProvider, offer: Offer) -> None:
    workspace = await provider.open(replace(offer.spec, limits=WorkspaceLimits(memory=64 * MIB)))
    done = await workspace.exec("head -c 500000000 /dev/zero | tail -c 400000000 | wc -c; exit 0", seconds=30)
    assert b"400000000" not in done.stdout
    assert (await workspace.exec("echo lives")).stdout == b"lives\n"


async def test_processes_are_bounded(provider: WorkspaceProvider, offer: Offer) -> None:
    workspace = await provider.open(replace(offer.spec, limits=WorkspaceLimits(processes=40)))
    many = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); sleep 60 >/dev/null 2>&1 & set -- /proc/[0-9]*; echo $#; done"
    done = await workspace.exec(f"({many}) 2>/dev/null", seconds=3)
    assert 20 < max(map(int, done.stdout.split())) < 50
    await workspace.exec("true")  # it may fail: the workspace is full
    await workspace.end_processes()
    done = await workspace.exec("for i in $(seq 20); do sleep 1 & done; wait; echo all")
    assert (done.stdout, done.stderr) == (b"all\n", b"")


async def test_what_is_written_is_bounded(provider: WorkspaceProvider, offer: Offer) -> None:
    workspace = await provider.open(replace(offer.spec, limits=WorkspaceLimits(disk=32 * MIB)))
    done = await workspace.exec("dd if=/dev/zero of=one bs=1M count=200 2>/dev/null", seconds=20)
    assert not done.ok
    several = "for i in $(seq 60); do dd if=/dev/zero of=f$i bs=1M count=4 2>/dev/null || exit 9; sleep 0.1; done"
    done = await workspace.exec(f"rm one; {several}", seconds=30)
    assert not done.ok
    with pytest.raises(PathError):
        await workspace.write("large", bytes(33 * MIB))
    assert (await workspace.exec("rm -f f* one; echo freed; sleep 1.5; echo lives")).stdout == b"freed\nlives\n"


async def test_descriptors_are_bounded(provider: WorkspaceProvider, offer: Offer) -> None:
    workspace = await provider.open(replace(offer.spec, limits=WorkspaceLimits(descriptors=100)))
    assert (await workspace.exec("ulimit -n; ulimit -n 4096 2>/dev/null || echo refused")).stdout == b"100\nrefused\n"


async def test_its_time_is_over(provider: WorkspaceProvider, offer: Offer) -> None:
    workspace = await provider.open(replace(offer.spec, limits=WorkspaceLimits(seconds=1.0)))
    await asyncio.sleep(1.5)
    with pytest.raises(WorkspaceError, match="its time is over"):
        await workspace.exec("true")


async def test_what_a_provider_cannot_do_is_refused_by_name(provider: WorkspaceProvider, offer: Offer) -> None:
    wants = {
        "image": (replace(offer.spec, image="some/image"), provider.capabilities.images),
        "build": (replace(offer.spec, build="/folder"), provider.capabilities.build),
        "a list of hosts": (replace(offer.spec, network=Network(hosts=("a.example",))), provider.capabilities.hosts),
        "network: all": (replace(offer.spec, network=Network(everything=True)), provider.capabilities.everything),
        "users of the image": (replace(offer.spec, users=("root",)), provider.capabilities.users),
    }
    for name, (spec, able) in wants.items():
        if able:
            provider.check(spec)
        else:
            with pytest.raises(UserError, match=name):
                provider.check(spec)
    assert (await provider.open(offer.spec)).listens == provider.capabilities.listens


HOLD = """
import asyncio, sys
from agentrl.plugins.registry import make_workspace_provider
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.workspace.provider import WorkspaceSpec

async def main():
    provider = make_workspace_provider(WorkspaceSection.model_validate_json(sys.argv[1]))
    await provider.start("killed")
    workspaces = await asyncio.gather(*(provider.open(WorkspaceSpec(sys.argv[2])) for _ in range(4)))
    for workspace in workspaces:
        await workspace.exec("(trap '' TERM; setsid sleep 313131 >/dev/null 2>&1 &)")
    await workspaces[0].snapshot()
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_what_a_killed_run_leaves_is_swept(offer: Offer, request: pytest.FixtureRequest) -> None:
    living = offer.make()
    await living.start("living")
    other = await living.open(offer.spec)
    section = WorkspaceSection(provider=offer.provider, args=offer.args).model_dump_json()
    run = subprocess.Popen([sys.executable, "-c", HOLD, section, offer.spec.image], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None
        assert await asyncio.to_thread(run.stdout.readline) == b"open\n"
        assert len(_processes(b"sleep\x00313131")) == 4
        run.send_signal(signal.SIGKILL)
        run.wait()
        provider = offer.make()
        began = time.monotonic()
        await provider.start("next")
        while _processes(b"sleep\x00313131"):
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.1)
        await provider.close()
        if "docker" in offer.provider:
            running: Podman = request.getfixturevalue("podman")
            assert len(running.containers()) == 1
            assert [name for name in running.images() if "snapshot" in name] == []
        if "e2b" in offer.provider:
            service: Service = request.getfixturevalue("e2b")
            assert (len(service.boxes), service.names) == (1, {})
        assert (await other.exec("echo lives")).stdout == b"lives\n"
    finally:
        run.kill()
        run.wait()
        await living.close()


def _processes(words: bytes) -> list[int]:
    """Those of this machine whose command line holds some words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
