"""Harbor's task folders: what of them is read, and that their tests decide."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from agentrl_envs.harbor.environment import Harbor
from agentrl_tools.workspaces.bwrap import BwrapProvider

from agentrl.errors import PathError, UserError
from agentrl.plugins.mixture import not_asked
from agentrl.plugins.types import Message, Session, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.rollout.workspaces import workspaces_of
from agentrl.testing.play import Stage, holder_of
from agentrl.workspace.provider import Network, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import MIB, Workspace

TEST = '#!/bin/sh\nif [ "$(cat /app/out.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def made(folder: Path, toml: str = 'schema_version = "1.4"\n', **files: str) -> Path:
    """A task as Harbor's template has it."""
    return write(folder, {
        "task.toml": toml, "instruction.md": "<!-- canary 1 -->\n\nWrite hello to /app/out.txt.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n", "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/sh\nprintf hello > /app/out.txt\n", **files,
    })  # fmt: skip


@pytest.fixture
async def provider(bubblewrap: None) -> AsyncIterator[WorkspaceProvider]:
    provider = BwrapProvider()
    await provider.start("harbor")
    yield provider
    await provider.close()


async def opened(provider: WorkspaceProvider, env: Harbor) -> tuple[Session, Workspace]:
    """A rollout of the one task, begun as the driver begins it."""
    task = env.tasks("test")[0]
    spec = env.workspace_spec(task, WorkspaceSpec())
    base = await provider.open(spec)
    await env.prepare(task, base)
    workspace = await provider.open(spec, await base.snapshot())
    return Session("0", task, random.Random(0), time.monotonic() + 600, workspace=workspace), workspace


def environment(folder: Path) -> Harbor:
    return Harbor(str(folder), held_out=1.0, own_image=False)


async def test_the_solution_earns_1_and_nothing_earns_0(provider: WorkspaceProvider, tmp_path: Path) -> None:
    env = environment(made(tmp_path))
    session, workspace = await opened(provider, env)
    assert [m["content"] for m in await env.create(session)] == ["Write hello to /app/out.txt.\n"]
    await workspace.exec("mkdir -p /app")
    assert await env.calc_reward(session) == {"reward": 0.0}
    await env.create(session)
    assert (await env.solve(session.task, workspace)).ok
    assert await env.calc_reward(session) == {"reward": 1.0}
    assert session.tampering == ("protected: /solution", "protected: /solution/solve.sh")


async def test_numbers_of_a_json_file_are_parts_unless_one_is_the_reward(
    provider: WorkspaceProvider, tmp_path: Path
) -> None:
    script = "#!/bin/sh\necho '{}' > /logs/verifier/reward.json\n"
    for text, parts in (('{"a": 0.5, "b": 1}', {"a": 0.5, "b": 1.0}), ('{"reward": 0.5, "b": 1}', {"reward": 0.5}),
                        ("NaN", {"reward": 0.0}), ("no number", {"reward": 0.0})):  # fmt: skip
        env = environment(made(tmp_path, **{"tests/test.sh": script.format(text) if "{" in text else
                                            script.replace("{}", text)}))  # fmt: skip
        session, _ = await opened(provider, env)
        await env.create(session)
        assert await env.calc_reward(session) == parts


async def test_a_separate_verifier_sees_artifacts_alone(provider: WorkspaceProvider, tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/out.txt"]\n[verifier]\nenvironment_mode = "separate"\nenv = {KIND = "${KIND:-plain}"}\n'
    test = TEST.replace("if [", '[ ! -e /app/other ] && [ "$KIND" = plain ] || exit 1\nif [')
    env = environment(made(tmp_path, toml, **{"tests/test.sh": test}))
    session, workspace = await opened(provider, env)
    await env.create(session)
    await workspace.exec("mkdir -p /app; printf hello > /app/out.txt; touch /app/other")
    assert await env.calc_reward(session) == {"reward": 1.0}


async def test_a_separate_verifier_has_the_variables_and_the_folder_of_its_environment(
    provider: WorkspaceProvider, tmp_path: Path
) -> None:
    toml = '[environment]\nworkdir = "/tmp"\n[verifier]\nenv = {B = "own"}\n'
    toml += '[verifier.environment]\nworkdir = "/srv"\nenv = {A = "its", B = "its"}\n'
    test = '#!/bin/sh\n[ "$A $B $(pwd)" = "its own /srv" ] && echo 1 > /logs/verifier/reward.txt\n'
    env = environment(made(tmp_path, toml, **{"tests/test.sh": test}))
    session, _ = await opened(provider, env)
    await env.create(session)
    assert await env.calc_reward(session) == {"reward": 1.0}


async def test_an_image_that_a_provider_does_not_make_is_one_line(provider: WorkspaceProvider, tmp_path: Path) -> None:
    toml = '[verifier]\nenvironment_mode = "separate"\n'
    env = environment(made(tmp_path, toml, **{"tests/Dockerfile": "FROM ubuntu:24.04\nCOPY . /tests\n"}))
    session, _ = await opened(provider, env)
    await env.create(session)
    with pytest.raises(UserError, match="'bwrap' cannot do: build"):
        await env.calc_reward(session)
    spec = Harbor(str(tmp_path), held_out=1.0).workspace_spec(session.task, WorkspaceSpec())
    with pytest.raises(UserError, match="'bwrap' cannot do: build"):
        await provider.open(spec)


async def test_steps_follow_each_other_while_their_rewards_suffice(provider: WorkspaceProvider, tmp_path: Path) -> None:
    toml = '[[steps]]\nname = "one"\nmin_reward = 1\n[[steps]]\nname = "two"\n'
    second = TEST.replace("/app/out.txt", "/app/two.txt")
    files = {
        "steps/one/instruction.md": "First.", "steps/two/instruction.md": "Second.", "steps/two/tests/test.sh": second,
        "steps/two/workdir/setup.sh": "printf here > /home/user/set", "steps/one/solution/solve.sh": "",
    }  # fmt: skip
    env = environment(made(tmp_path, toml, **files))
    session, workspace = await opened(provider, env)
    assert (await env.create(session))[0]["content"] == "First."
    await workspace.exec("mkdir -p /app; printf hello > /app/out.txt")
    reply = await env.execute(session, {"role": "assistant", "content": "done"})
    assert not reply.done
    assert reply.messages[0]["content"] == "Second."
    assert await workspace.read("/home/user/set") == b"here"
    assert (await env.execute(session, {"role": "assistant", "content": "done"})).done
    assert await env.calc_reward(session) == {"reward": 0.5}
    session, workspace = await opened(provider, env)
    await env.create(session)
    assert (await env.execute(session, {"role": "assistant", "content": "done"})).done
    assert await env.calc_reward(session) == {"reward": 0.0}


_PROGRAM = """
import json, os, subprocess, urllib.request
given = json.load(open(os.environ["AGENTRL_TASK"]))
asked = json.dumps({"model": os.environ["AGENTRL_MODEL"], "messages": given["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, headers)
subprocess.run(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], shell=True)
"""


@pytest.mark.slow
async def test_a_program_plays_every_step(bubblewrap: None, tmp_path: Path) -> None:
    second = TEST.replace("/app/out.txt", "/app/two.txt")
    files = {"steps/one/instruction.md": "First.", "steps/two/instruction.md": "Second.",
             "steps/two/tests/test.sh": second}  # fmt: skip
    env = environment(made(tmp_path, '[[steps]]\nname = "one"\nmin_reward = 1\n[[steps]]\nname = "two"\n', **files))
    does = {"First.": "mkdir -p /app; printf hello > /app/out.txt", "Second.": "printf hello > /app/two.txt"}
    recipe = Recipe(agent=AgentSection(command=("python3", "-c", _PROGRAM)), workspace=WorkspaceSection())
    assert not_asked(env, recipe.agent) == []
    async with AsyncExitStack() as stack:
        workspaces = await workspaces_of(recipe.workspace, env, (), recipe.agent)
        assert workspaces is not None
        stack.push_async_callback(workspaces.close)
        stage = Stage(env, holder=await holder_of(recipe, stack), workspaces=workspaces)
        for wrong, reward in (("", 1.0), ("Second.", 0.5), ("First.", 0.0)):

            def play(task: Task, messages: Sequence[Message], wrong: str = wrong) -> str:
                told = str(messages[-1]["content"]).strip()
                return "true" if told == wrong else does[told]

            found = await stage.play(env.tasks("test")[0], play)
            assert found.failure is None, found.failure
            assert found.rewards == {"reward": reward}
            assert [turn.trained for turn in found.turns] == [True] * (1 if wrong == "First." else 2)


async def test_what_the_agent_left_running_does_not_grade_a_step(provider: WorkspaceProvider, tmp_path: Path) -> None:
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    files = {"steps/one/instruction.md": "First.", "steps/two/instruction.md": "Second."}
    env = environment(made(tmp_path, toml, **files))
    session, workspace = await opened(provider, env)
    await env.create(session)
    await workspace.exec("mkdir -p /app; (while :; do printf hello > /app/out.txt; sleep 0.01; done) >/dev/null 2>&1 &")
    await workspace.exec("until [ -e /app/out.txt ]; do sleep 0.01; done")
    await env.execute(session, {"role": "assistant", "content": "done"})
    await workspace.exec("rm -f /app/out.txt; sleep 0.1")
    with pytest.raises(PathError):
        await workspace.read("/app/out.txt")


def test_what_a_task_asks_for_is_what_is_opened(tmp_path: Path) -> None:
    toml = '[environment]\nmemory_mb = 300\nstorage = "2G"\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n'
    env = Harbor(
        str(made(tmp_path, toml + 'env = {A = "${B}"}\n[verifier]\nuser = "root"\n')),
        held_out=1.0,
        variables={"B": "c"},
    )
    task = env.tasks("test")[0]
    spec = env.workspace_spec(task, WorkspaceSpec(network=Network(hosts=("a.org", "b.org"))))
    assert (spec.limits.memory, spec.limits.disk) == (300 * MIB, 2048 * MIB)
    assert (spec.network.hosts, spec.env) == (("a.org",), {"A": "c"})
    assert (spec.image, spec.build) == ("", str(tmp_path / "environment"))
    assert spec.users == ("root",)
    with pytest.raises(UserError, match=r"workspace\.network"):
        env.workspace_spec(task, WorkspaceSpec())
    for toml, hosts in (
        ('[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"\n', ()),
        ('[agent]\nnetwork_mode = "no-network"\n[[steps]]\nname = "a"\n[steps.agent]\n'
         'network_mode = "allowlist"\nallowed_hosts = ["a.org"]\n', ("a.org",)),
    ):  # fmt: skip
        env = Harbor(str(made(tmp_path, toml, **{"steps/a/instruction.md": "First."})), held_out=1.0)
        assert env.workspace_spec(task, WorkspaceSpec(network=Network(everything=True))).network == Network(hosts=hosts)
    image = Harbor(str(made(tmp_path, '[environment]\ndocker_image = "a:1"\n')), held_out=1.0)
    assert image.workspace_spec(task, WorkspaceSpec()).image == "a:1"


def test_folders_of_tasks_are_found_at_any_depth_and_held_out_by_name(tmp_path: Path) -> None:
    for index in range(40):
        made(tmp_path / "packages" / f"org{index % 4}" / str(index))
    env = Harbor(str(tmp_path), held_out=0.5)
    names = {split: {task.id for task in env.tasks(split)} for split in ("train", "test")}
    assert len(names["train"] | names["test"]) == 40
    assert not names["train"] & names["test"]
    assert 10 < len(names["test"]) < 30
    assert "packages/org1/1" in names["train"] | names["test"]


BAD = {
    'schema_version = "2.0"': "schema_version: 2.0 is not known",
    "[environment]\ngpus = 1": "environment.gpus: GPUs are not provided",
    '[environment]\nos = "windows"': "environment.os: only linux",
    "[environment]\nhealthcheck = {command = 'a'}": "environment.healthcheck: services",
    "[environment]\nmemory = 'x'": "environment.memory: expected a size",
    "[environment]\nenv = {A = '${B}'}": "environment.env.A: ${B} is not known: give it as env.args.variables.B",
    "[verifier]\ntimeout_sec = 0": "verifier.timeout_sec: expected seconds above 0",
    "[verifier]\ntimeout_sec = 'a'": "verifier.timeout_sec: expected int or float, got 'a'",
    "[verifier]\nnetwork_mode = 'public'": "verifier.network_mode: tests have no network",
    "[verifier]\ncollect = [{command = 'a'}]": "verifier.collect: commands between",
    "[verifier.environment]\nnetwork_mode = 'public'": "verifier.environment.network_mode: tests have no network",
    "[verifier.environment]\ngpus = 1": "verifier.environment.gpus: GPUs are not provided",
    "[[steps]]\nname = 'a'\n[steps.verifier]\ncollect = [{command = 'a'}]": "steps[0].verifier.collect: commands",
    "[[steps]]\nname='a'\n[[steps]]\nname='b'\n[steps.agent]\nnetwork_mode='public'": "agent.network_mode: the",
    "[[steps]]\nname='a'\n[[steps]]\nname='b'\n[steps.agent]\nuser='b'": "agent.user: the steps of a task have one",
    "[agent]\ntimeout_sec = 0": "agent.timeout_sec: expected seconds above 0",
    "artifacts = ['../a']": "artifacts: expected paths without '..'",
    "[[steps]]\nname = '../a'": "steps[0].name: expected the name of a folder",
    "steps = 3": "steps: expected list",
    "a = [": "cannot be read",
}


@pytest.mark.parametrize("toml", BAD)
def test_a_bad_folder_is_one_line_with_file_and_field(tmp_path: Path, toml: str) -> None:
    with pytest.raises(UserError) as raised:
        Harbor(str(made(tmp_path, toml + "\n")))
    assert str(raised.value).startswith(str(tmp_path / "task.toml"))
    assert BAD[toml] in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("missing", "said"), [("tests/test.sh", "is missing"), ("instruction.md", "cannot be read"),
                                               ("environment/Dockerfile", "there is no Dockerfile")])  # fmt: skip
def test_a_missing_file_is_named(tmp_path: Path, missing: str, said: str) -> None:
    made(tmp_path).joinpath(missing).unlink()
    with pytest.raises(UserError, match=said):
        Harbor(str(tmp_path))


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    (made(tmp_path) / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="leads out of the task"):
        Harbor(str(tmp_path))


def test_fields_without_effect_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, "[environment]\ncpus = 2\n[verifier.environment]\nmemory_mb = 9\n")
    Harbor(str(tmp_path))
    for name in ("environment.cpus", "verifier.environment.memory_mb"):
        assert f" {name} (" in caplog.text


def test_an_agent_has_the_time_the_user_and_the_folder_of_its_task(tmp_path: Path) -> None:
    toml = '[agent]\ntimeout_sec = 9\nuser = "a"\n[environment]\nworkdir = "/app"\n'
    steps = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n[steps.agent]\ntimeout_sec = 5\n'
    files = {"steps/one/instruction.md": "First.", "steps/two/instruction.md": "Second."}
    for text, seconds in ((toml, 9.0), (toml + steps, 14.0)):
        env = environment(made(tmp_path, text, **files))
        [task] = env.tasks("test")
        spec = env.workspace_spec(task, WorkspaceSpec())
        assert (task.seconds, spec.user, spec.folder) == (seconds, "a", "/app")
    [task] = environment(made(tmp_path, steps, **files)).tasks("test")
    assert task.seconds is None
