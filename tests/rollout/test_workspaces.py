"""Workspaces of rollouts: prepared once a task, opened ahead, ended before rewards, and what their faults come to."""

import asyncio
import re
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest
from agentrl_tools.workspaces.bwrap import BwrapProvider, BwrapWorkspace
from fakes import Env, ScriptedEngine, make_driver
from podman_help import IMAGE

from agentrl.errors import UserError, WorkspaceError
from agentrl.gateway.server import CONNECTIONS, Gateway
from agentrl.plugins.agent import make_agent
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.rollout.groups import roll_out
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.workspaces import CHANGES, WAIT, Workspaces, provider_of, workspaces_of
from agentrl.testing.environment import check_environment
from agentrl.testing.play import Holder, Stage
from agentrl.training.preflight import check_names
from agentrl.trajectory import Boundary, FinishReason
from agentrl.workspace.grading import Grading, grade
from agentrl.workspace.provider import Capabilities, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import Snapshot, Workspace

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

TASKS = [Task(f"t{i}", {"i": i}) for i in range(3)]


class Counted(WorkspaceProvider):
    """The provider bwrap, whose calls are counted, and whose `open` fails as it is told to."""

    name = "counted"
    capabilities = Capabilities()

    def __init__(self) -> None:
        self.bwrap = BwrapProvider()
        self.counts: Counter[str] = Counter()
        self.open_now: set[Workspace] = set()
        self.failures = 0

    async def start(self, run: str) -> None:
        await self.bwrap.start(run)

    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> Workspace:
        self.counts["from a snapshot" if snapshot is not None else "from the image"] += 1
        if self.failures:
            self.failures -= 1
            raise WorkspaceError("no room")
        return await self.bwrap.open(spec, snapshot)

    async def forget(self, snapshot: Snapshot) -> None:
        self.counts["forgotten"] += 1
        await self.bwrap.forget(snapshot)

    async def close(self) -> None:
        await self.bwrap.close()


class Telling(Counted):
    """Tells of each workspace that is open."""

    def __init__(self, opened: asyncio.Queue[None]) -> None:
        super().__init__()
        self.opened = opened

    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> Workspace:
        workspace = await super().open(spec, snapshot)
        self.opened.put_nowait(None)
        return workspace


class Prepared(Env):
    """Writes the task's number into a file, once."""

    uses_workspace = True

    def __init__(self, **actions: Any) -> None:
        super().__init__(**actions)
        self.prepared: Counter[str] = Counter()

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        self.prepared[task.id] += 1
        await workspace.write("n.txt", str(task.data["i"]).encode())


async def _changed(session: Any) -> Any:
    await session.workspace.write("mine.txt", b"mine")
    return [{"role": "user", "content": "?"}]


async def _number(session: Any) -> float:
    await session.workspace.write("mine.txt", b"mine")
    return float(await session.workspace.read("n.txt"))


@pytest.fixture
async def provider() -> AsyncIterator[Counted]:
    made = Counted()
    yield made
    await made.close()


async def played(provider: Counted, env: Env, n: int = 4, ready: int = 8, **limits: Any) -> tuple[Any, Workspaces]:
    workspaces = Workspaces(provider, WorkspaceSection(ready=ready), env)
    await workspaces.start("test")
    driver = make_driver(ScriptedEngine(lambda *_: "4"), env, workspaces=workspaces, **limits)
    return await roll_out(driver, TASKS, n), workspaces


@pytest.mark.slow
@pytest.mark.parametrize("ready", [0, 8])
async def test_a_task_is_prepared_once_and_its_samples_start_from_that(provider: Counted, ready: int) -> None:
    env = Prepared(calc_reward=_number)
    groups, workspaces = await played(provider, env, ready=ready)
    assert [[t.reward for t in group.trajectories] for group in groups] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert env.prepared == {"t0": 1, "t1": 1, "t2": 1}
    assert provider.counts["from a snapshot"] >= 12
    await workspaces.close()
    assert provider.bwrap.state is None


@pytest.mark.slow
async def test_what_a_rollout_changed_is_kept_and_others_do_not_see_it(provider: Counted) -> None:
    async def change(session: Any) -> Any:
        assert [one.path for one in await session.workspace.listing()] == ["n.txt"]
        await session.workspace.write("n.txt", b"changed\n")
        return [{"role": "user", "content": "?"}]

    groups, _ = await played(provider, Prepared(create=change))
    for group in groups:
        for trajectory in group.trajectories:
            kept = trajectory.extra[CHANGES]
            assert kept["changes"] == [["modified", "/home/user/n.txt", 8]]
            assert re.search(r"^-\d\n\+changed$", kept["diff"], re.M)


@pytest.mark.slow
async def test_processes_are_gone_before_the_reward(provider: Counted) -> None:
    async def begin(session: Any) -> Any:
        await session.workspace.exec("(trap '' TERM; while true; do echo cheat > n.txt; sleep 0.01; done) &")
        return [{"role": "user", "content": "?"}]

    async def judge(session: Any) -> float:
        await session.workspace.write("n.txt", b"7")
        await asyncio.sleep(0.05)
        return float(await session.workspace.read("n.txt"))

    groups, _ = await played(provider, Prepared(create=begin, calc_reward=judge), n=2)
    assert {t.reward for group in groups for t in group.trajectories} == {7.0}


async def test_a_workspace_that_does_not_open_is_tried_again_and_failed_with_its_boundary(provider: Counted) -> None:
    provider.failures = 1
    groups, _ = await played(provider, Env(), n=1)
    assert [len(group.trajectories) for group in groups] == [1, 1, 1]
    provider.failures = 10_000
    groups, _ = await played(provider, Env(), n=1, retries=1)
    failed = [t for group in groups for t in group.failed]
    assert [t.failure.boundary for t in failed] == [Boundary.WORKSPACE] * 3
    assert "no room" in failed[0].failure.message


async def test_a_task_whose_snapshot_is_lost_is_prepared_again(provider: Counted) -> None:
    env = Prepared(calc_reward=_number)
    workspaces = Workspaces(provider, WorkspaceSection(ready=0), env)
    await workspaces.start("test")
    await (await workspaces.open(TASKS[0])).close()
    provider.failures = 2  # both attempts from the snapshot
    with pytest.raises(WorkspaceError, match="no room"):
        await workspaces.open(TASKS[0])
    workspace = await workspaces.open(TASKS[0])
    assert await workspace.read("n.txt") == b"0"
    assert env.prepared == {"t0": 2}
    await workspaces.close()


async def test_a_workspace_that_vanishes_fails_the_rollout_which_is_tried_again(provider: Counted) -> None:
    lost: Counter[str] = Counter()

    async def lose(session: Any) -> Any:
        lost[session.task.id] += 1
        if lost[session.task.id] == 1:
            await session.workspace.close()
        await session.workspace.exec("true")
        return [{"role": "user", "content": "?"}]

    groups, _ = await played(provider, Env(create=lose), n=1)
    for group in groups:
        [trajectory] = group.trajectories
        assert trajectory.finish is FinishReason.STOP
        assert trajectory.extra["retried"][0].startswith("workspace: env.create: workspace ")


@pytest.mark.slow
async def test_a_grader_whose_workspace_fails_makes_the_rollout_failed(
    provider: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def judge(session: Any) -> float:
        found = await grade(session.workspace, Grading("echo 1 > /logs/verifier/reward.txt"))
        return found.rewards.get("reward", 0.0)

    env = Prepared(create=_changed, calc_reward=judge)
    groups, _ = await played(provider, env, n=1)
    assert [t.reward for group in groups for t in group.trajectories] == [1.0] * 3

    async def unpack(workspace: BwrapWorkspace, tar: bytes) -> None:
        raise WorkspaceError("its disk is full")

    monkeypatch.setattr(BwrapWorkspace, "unpack", unpack)
    groups, _ = await played(provider, env, n=1, retries=0)
    failed = [t for group in groups for t in group.failed]
    assert [t.failure.boundary for t in failed] == [Boundary.WORKSPACE] * 3
    assert "its disk is full" in failed[0].failure.message


async def test_a_preparation_that_fails_is_the_environment_s_fault_and_is_tried_again(provider: Counted) -> None:
    class Flaky(Prepared):
        async def prepare(self, task: Task, workspace: Workspace) -> None:
            await super().prepare(task, workspace)
            if self.prepared[task.id] == 1:
                raise RuntimeError("not yet")

    env = Flaky()
    groups, _ = await played(provider, env, n=1)
    assert all(group.trajectories[0].extra["retried"] for group in groups)
    assert "environment: env.prepare: RuntimeError: not yet" in groups[0].trajectories[0].extra["retried"][0]
    assert env.prepared == {"t0": 2, "t1": 2, "t2": 2}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("no")])
@pytest.mark.parametrize("hook", ["prepare", "workspace_spec"])
async def test_what_a_hook_raises_fails_its_rollouts_alone(provider: Counted, hook: str, error: BaseException) -> None:
    class Broken(Prepared):
        async def prepare(self, task: Task, workspace: Workspace) -> None:
            if hook == "prepare" and task.id == "t1":
                raise error

        def workspace_spec(self, task: Task, spec: WorkspaceSpec) -> WorkspaceSpec:
            if hook == "workspace_spec" and task.id == "t1":
                raise error
            return spec

    groups, _ = await played(provider, Broken(), n=2, retries=0)
    assert [len(group.trajectories) for group in groups] == [2, 0, 2]
    assert {t.failure.boundary for t in groups[1].failed} == {Boundary.ENVIRONMENT}
    assert type(error).__name__ in groups[1].failed[0].failure.message


async def test_tasks_of_two_splits_with_one_id_are_prepared_each(provider: Counted) -> None:
    env = Prepared(calc_reward=_number)
    workspaces = Workspaces(provider, WorkspaceSection(), env)
    driver = make_driver(ScriptedEngine(lambda *_: "4"), env, workspaces=workspaces)
    for number in (3, 5):
        [group] = await roll_out(driver, [Task("0", {"i": number})], 2)
        assert [t.reward for t in group.trajectories] == [number, number]


async def test_every_workspace_is_closed_whatever_ends_the_rollouts(provider: Counted) -> None:
    env = Prepared(create=RuntimeError("boom"))
    _, workspaces = await played(provider, env, n=3, retries=0)
    await asyncio.sleep(0.1)
    assert provider.bwrap.opened == 0
    await workspaces.close()


async def test_something_that_needs_a_workspace_is_refused_without_one() -> None:
    with pytest.raises(UserError, match="environment 'env' works in a workspace, and the recipe has none"):
        await workspaces_of(None, Prepared(), ())
    assert await workspaces_of(None, Env(), ()) is None


def test_the_provider_alone_is_short_for_the_section() -> None:
    recipe = Recipe.load(None, ["workspace=bwrap"])
    assert recipe.workspace == WorkspaceSection(provider="bwrap")
    hosts = Recipe.load(None, ["workspace.network=[pypi.org]"]).workspace
    assert hosts is not None
    assert hosts.spec().network.hosts == ("pypi.org",)
    with pytest.raises(UserError, match=r"workspace.env: 'A=B' is no name of a variable"):
        Recipe.load(None, ["workspace.env={A=B: c}"])


@pytest.mark.parametrize(
    ("keys", "script", "said"),
    [
        (
            {"files": 60},
            "for i in $(seq 99); do touch f$i 2> /dev/null || break; done; [ $i -lt 70 ] && echo few",
            "few",
        ),
        ({"descriptors": 32}, "ulimit -n", "32"),
        ({"env": {"A": "b = c"}}, "echo $A", "b = c"),
    ],
)
async def test_what_the_recipe_says_is_opened(keys: dict[str, Any], script: str, said: str) -> None:
    section = Recipe.model_validate({"workspace": keys}).workspace
    workspaces = await workspaces_of(section, Env(), ())
    assert workspaces is not None
    try:
        assert (await (await workspaces.open(TASKS[0])).exec(script)).text() == f"{said}\n"
    finally:
        await workspaces.close()


async def test_what_a_provider_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"workspace.provider 'counted' cannot do: image"):
        await Workspaces(Counted(), WorkspaceSection(image="x"), Env()).start("test")


_PROGRAM = """
import json, os, urllib.request
given = json.load(open(os.environ["AGENTRL_TASK"]))
asked = json.dumps({"model": os.environ["AGENTRL_MODEL"], "messages": given["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("n.txt", "a").write(answer)
"""


_SCRIPT = r"""
body='{"model": "'$AGENTRL_MODEL'", "messages": [{"role": "user", "content": "A number?"}]}'
wget -qO answer --header "Authorization: Bearer $OPENAI_API_KEY" --header 'Content-Type: application/json' \
    --post-data "$body" "$OPENAI_BASE_URL/chat/completions" || exit 1
printf %s "$(sed 's/.*"content": *"\([^"]*\)".*/\1/' answer)" >>n.txt
"""
"""The same as _PROGRAM, of what busybox has."""


@pytest.mark.parametrize(
    ("provider", "network"),
    [
        ("bwrap", "none"),
        ("bwrap", "all"),
        pytest.param("docker", "none", marks=pytest.mark.slow),
        pytest.param("docker", "all", marks=pytest.mark.long),
    ],
)
async def test_an_agent_s_program_runs_inside_and_reaches_the_model(
    provider: str, network: Literal["none", "all"], request: pytest.FixtureRequest
) -> None:
    async def judge(session: Any) -> float:
        assert session.outcome.exit_code == 0, session.outcome.output
        return float(await session.workspace.read("n.txt"))

    env = Prepared(calc_reward=judge)
    section, made = AgentSection(command=("python3", "-c", _PROGRAM)), WorkspaceSection(network=network)
    if provider == "docker":
        address = request.getfixturevalue("podman").address
        section = AgentSection(command=("sh", "-c", _SCRIPT))
        made = WorkspaceSection(provider="docker", image=IMAGE, network=network, args={"address": address})
    gateway = Gateway(host="127.0.0.1", port=0, model="m")
    await gateway.start()
    workspaces = await workspaces_of(made, env, (), section)
    try:
        holder = Holder(make_agent(section, inside=True), section, gateway)
        trajectory = await Stage(env, holder=holder, workspaces=workspaces).play(TASKS[2], lambda task: "7")
    finally:
        assert workspaces is not None
        await workspaces.close()
        await gateway.close()
    assert trajectory.failure is None
    assert trajectory.rewards == {"env": 27.0}
    assert [turn.trained for turn in trajectory.turns] == [True]
    assert trajectory.sampled_tokens == trajectory.turns[0].end - trajectory.turns[0].start > 0
    assert ["modified", "/home/user/n.txt", 2] in trajectory.extra[CHANGES]["changes"]


async def test_a_program_that_opens_too_many_connections_costs_itself_alone() -> None:
    gateway = Gateway(host="127.0.0.1", port=0, model="m")
    await gateway.start()
    listener = socket.create_server(("127.0.0.1", 0))
    end = await gateway.serve_at(listener)
    address = listener.getsockname()[:2]
    opened = [await asyncio.open_connection(*address) for _ in range(CONNECTIONS)]
    reader, writer = await asyncio.open_connection(*address)
    assert await reader.read() == b""
    writer.close()
    for _, writer in opened[:2]:
        writer.close()
        await writer.wait_closed()
    await asyncio.sleep(0.05)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 ")
    await end()
    assert await opened[-1][0].read() == b""
    await gateway.close()


_AGENT = f"#!/usr/bin/env python3\n{_PROGRAM}"


class Equipped(Prepared):
    """Brings the agent's program, and asks for a user."""

    user = ""

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        await workspace.write("n.txt", b"")
        await workspace.write("agent", _AGENT.encode(), mode=0o755)

    def workspace_spec(self, task: Task, spec: WorkspaceSpec) -> WorkspaceSpec:
        return replace(spec, users=(self.user,)) if self.user else spec


@pytest.mark.slow
def test_an_agent_s_program_may_be_in_the_image_alone() -> None:
    section = AgentSection(command=("./agent",))
    check_names(Recipe(agent=section, workspace=WorkspaceSection()))
    with pytest.raises(UserError, match="no program"):
        check_names(Recipe(agent=section))
    check_environment(
        Equipped(), None, lambda task: "7", tasks=1, sessions=1, disjoint=False, workspace="bwrap", agent=section
    )


PUBLIC = {"host": "0.0.0.0"}
REACH: list[tuple[str, dict[str, Any], Any, str]] = [
    ("bwrap", {}, "none", ""), ("docker", PUBLIC, "none", "the recipe asks for no network"),
    ("docker", {}, "all", "the loopback of this machine"), ("docker", PUBLIC, "all", ""),
    ("docker", {"public_url": "http://10.0.0.5:{port}"}, "all", ""),
]  # fmt: skip


@pytest.mark.parametrize(("provider", "agent", "network", "why"), REACH)
def test_a_program_that_could_not_reach_the_model_is_refused(provider: str, agent: Any, network: Any, why: str) -> None:
    args = {"address": "tcp://10.0.0.7:2375"} if provider == "docker" else {}  # another machine's
    section = WorkspaceSection(provider=provider, network=network, args=args)
    program = AgentSection(command=("agent",), **agent)
    with pytest.raises(UserError, match=why) if why else nullcontext():
        provider_of(section, Env(), (), program)
    provider_of(section, Env(), (), AgentSection(name="solve"))


def test_the_provider_is_asked_about_the_first_tasks() -> None:
    env = Equipped()
    provider_of(WorkspaceSection(), env, (), tasks=TASKS)
    env.user = "root"
    with pytest.raises(UserError, match=r"^task t0: .* 'bwrap' cannot do: users of the image \(root\)$"):
        provider_of(WorkspaceSection(), env, (), tasks=TASKS)
    provider_of(WorkspaceSection(provider="docker"), env, (), tasks=TASKS)
    env.workspace_spec = lambda task, spec: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"^environment 'env': workspace_spec of task t0: ZeroDivisionError"):
        provider_of(WorkspaceSection(), env, (), tasks=TASKS)


def test_a_sandbox_beside_a_workspace_is_refused() -> None:
    with pytest.raises(UserError, match=r"agent.sandbox: the program runs in a workspace already"):
        make_agent(AgentSection(command=("true",), sandbox=()), inside=True)


def at_once(coroutine: Coroutine[Any, Any, Workspace]) -> Workspace | None:
    """What a coroutine comes to where it waits for nothing, else None."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: Workspace = done.value
        return found
    coroutine.close()
    return None


async def test_a_sample_whose_workspace_is_ready_waits_for_nothing() -> None:
    opened: asyncio.Queue[None] = asyncio.Queue()
    workspaces = Workspaces(Telling(opened), WorkspaceSection(ready=2), Env())
    await workspaces.start("test")
    try:
        workspaces.expect(TASKS[0], 5)
        assert at_once(workspaces.open(TASKS[1])) is None
        async with asyncio.timeout(60):
            for _ in range(4):  # two to prepare the tasks in, two that are ready
                await opened.get()
        for left in range(4, -1, -1):
            workspace = at_once(workspaces.open(TASKS[0]))
            assert workspace is not None, f"the sample before the last {left} waited"
            await workspace.close()
            if left >= 2:
                await opened.get()
        assert at_once(workspaces.open(TASKS[0])) is None
    finally:
        await workspaces.close()


async def test_what_others_announced_at_the_same_time_stays_ready() -> None:
    opened: asyncio.Queue[None] = asyncio.Queue()
    workspaces = Workspaces(Telling(opened), WorkspaceSection(ready=2), Env())
    await workspaces.start("test")
    try:
        with workspaces.announced():
            with workspaces.announced():
                workspaces.expect(TASKS[0], 2)
            async with asyncio.timeout(60):
                for _ in range(3):  # one to prepare the task in
                    await opened.get()
            await asyncio.sleep(0)
            ready = at_once(workspaces.open(TASKS[0]))
            assert ready is not None
            await ready.close()
        assert at_once(workspaces.open(TASKS[0])) is None
    finally:
        await workspaces.close()


async def test_the_wait_for_a_workspace_is_a_span_and_a_metric(provider: Counted) -> None:
    groups, workspaces = await played(provider, Prepared(), n=2)
    waits = [span for group in groups for t in group.trajectories for span in t.spans if span.part == WAIT]
    assert len(waits) == 6
    found = rollout_metrics(groups)
    assert found["time/sample_workspace_s"] == pytest.approx(sum(span.end - span.start for span in waits) / 6)
    assert 0 < found["time/sample_workspace_s"] < found["time/sample_hooks_s"]
    await workspaces.close()
    [group] = await roll_out(make_driver(ScriptedEngine(lambda *_: "4"), Env()), TASKS[:1], 1)
    assert "time/sample_workspace_s" not in rollout_metrics([group])
