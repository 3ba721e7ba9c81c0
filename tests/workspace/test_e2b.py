"""The provider `e2b` against a service of the test's own that speaks its wire: faults, snapshots, network, labels."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl_tools.workspaces import owner
from agentrl_tools.workspaces.e2b import E2bProvider
from agentrl_tools.workspaces.e2b_workspace import E2bWorkspace
from e2b_service import Service, e2b_service
from workspace_contract import CALLS

from agentrl.errors import PathError, UserError, WorkspaceError
from agentrl.workspace.provider import Network, WorkspaceSpec
from agentrl.workspace.workspace import Terminal

pytestmark = pytest.mark.slow


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async with e2b_service(monkeypatch) as made:
        yield made


@pytest.fixture
async def provider(service: Service) -> AsyncIterator[E2bProvider]:
    made = E2bProvider(deadline=2.0)
    await made.start("run-of-a-test")
    yield made
    service.faults.clear()
    await made.close()
    assert service.boxes == {}
    assert service.names == {}


@pytest.fixture
async def workspace(provider: E2bProvider) -> E2bWorkspace:
    return await provider.open(WorkspaceSpec(labels={"rollout": "7"}))


async def ends(workspace: E2bWorkspace) -> dict[str, Any]:
    """What each call comes to, within a minute in all."""
    calls = asyncio.gather(*(call(workspace) for call in CALLS.values()), return_exceptions=True)
    return dict(zip(CALLS, await asyncio.wait_for(calls, 60), strict=True))


@pytest.mark.parametrize("faults", [["hang"], ["cut", "nonsense", "500", "502"]], ids=["hangs", "answers nonsense"])
async def test_a_service_that_fails_is_not_the_programs_fault(
    service: Service, workspace: E2bWorkspace, faults: list[str]
) -> None:
    for fault in faults:
        service.faults["*"] = [fault]
        for name, end in (await ends(workspace)).items():
            assert isinstance(end, WorkspaceError), f"{fault}: {name}: {end!r}"
            assert 10 < len(str(end)) < 600
            assert "\n" not in str(end)
        service.faults.clear()
        assert (await workspace.exec("echo lives")).stdout == b"lives\n"


async def test_a_sandbox_that_vanishes(service: Service, workspace: E2bWorkspace) -> None:
    terminal = await workspace.terminal()
    running = asyncio.ensure_future(workspace.exec("echo begun; sleep 60", seconds=60))
    await asyncio.sleep(0.5)
    [box] = service.boxes.values()
    service.boxes.clear()
    await asyncio.to_thread(box.kill)
    with pytest.raises(WorkspaceError):
        await running
    with pytest.raises(WorkspaceError):
        await read_to_the_end(terminal)
    for name, end in (await ends(workspace)).items():
        if name != "fresh":
            assert isinstance(end, WorkspaceError), f"{name}: {end!r}"


async def read_to_the_end(terminal: Terminal) -> None:
    while await terminal.read(0.5) is not None:
        pass


async def test_a_service_that_hangs_under_a_program_with_a_deadline(service: Service, workspace: E2bWorkspace) -> None:
    running = asyncio.ensure_future(workspace.exec("sleep 60", seconds=1.0))
    await asyncio.sleep(0.5)
    service.faults["*"] = ["hang"]
    with pytest.raises(WorkspaceError, match="no answer"):
        await asyncio.wait_for(running, 20)


async def test_what_a_sandbox_is_asked_for(service: Service, provider: E2bProvider, workspace: E2bWorkspace) -> None:
    asked = service.created[-1]
    assert (asked["templateID"], asked["allow_internet_access"], asked["timeout"]) == ("base", False, 900)
    assert asked["metadata"]["rollout"] == "7"
    assert asked["metadata"][owner.LABEL_RUN] == "run-of-a-test"
    assert owner.is_dead(asked["metadata"][owner.LABEL_OWNER]) is False
    await provider.open(WorkspaceSpec(network=Network(hosts=("pypi.org", "*.pythonhosted.org"))))
    network = {"allowOut": ["pypi.org", "*.pythonhosted.org"], "denyOut": ["0.0.0.0/0"]}
    assert service.created[-1]["network"] == network
    await provider.open(WorkspaceSpec(network=Network(everything=True)))
    assert (service.created[-1].get("network"), service.created[-1]["allow_internet_access"]) == (None, True)
    with pytest.raises(UserError, match=r"network \(a port of a host, 'pypi.org:443'\)"):
        await provider.open(WorkspaceSpec(network=Network(hosts=("pypi.org:443",))))
    with pytest.raises(UserError, match="has no template 'none-such'"):
        await provider.open(WorkspaceSpec("none-such"))


async def test_names_that_are_no_text(workspace: E2bWorkspace) -> None:
    await workspace.exec("printf x > $(printf 'a\\377b')")
    [entry] = await workspace.listing()
    assert (entry.path, entry.size) == ("a\ufffdb", 1)
    assert len(await workspace.diff()) == 1
    assert len(await workspace.pack(["."])) > 0
    with pytest.raises(PathError, match="UTF-8"):
        await workspace.read("a\udcffb")


async def test_programs_of_another_user(workspace: E2bWorkspace) -> None:
    assert (await workspace.exec("id -un; id -u", user="root")).stdout == b"root\n0\n"
    with pytest.raises(PathError, match="nobody-here"):
        await workspace.exec("true", user="nobody-here")


async def test_snapshots_with_processes_where_there_are_no_others(
    service: Service, provider: E2bProvider, workspace: E2bWorkspace
) -> None:
    service.full_only = True
    await workspace.write("state", b"kept")
    snapshot = await workspace.snapshot()
    assert service.snapshot_modes == [False, None]
    fork = await provider.open(WorkspaceSpec(), snapshot)
    assert await fork.read("state") == b"kept"
    assert await fork.diff() == []
    await provider.forget(snapshot)
    with pytest.raises(WorkspaceError, match="no snapshot"):
        await provider.open(WorkspaceSpec(), snapshot)


async def test_sandboxes_that_are_open_are_renewed(service: Service) -> None:
    provider = E2bProvider(lifetime=60.0)
    await provider.start("run")
    workspace = await provider.open(WorkspaceSpec())
    [box] = service.boxes.values()
    before = box.end
    await asyncio.sleep(0.1)
    await workspace.renew(60)
    assert box.end > before
    await provider.close()


async def test_without_a_key_or_with_a_wrong_one(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
    with pytest.raises(UserError, match="E2B_API_KEY is refused"):
        await E2bProvider().start("run")
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(UserError, match="set E2B_API_KEY"):
        await E2bProvider().start("run")
    with pytest.raises(UserError, match="lifetime at least 60"):
        E2bProvider(lifetime=1.0)


async def test_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("E2B_API_KEY", "e2b_0")
    monkeypatch.delenv("E2B_DEBUG", raising=False)
    with pytest.raises(UserError, match="the service e2b failed to list sandboxes"):
        await E2bProvider(deadline=5.0).start("run")
