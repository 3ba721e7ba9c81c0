"""Harbor's tasks in podman: images of their Dockerfiles, and Harbor's own program beside ours on its own template."""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from agentrl_envs.harbor.environment import Harbor
from agentrl_tools.workspaces.docker import DockerProvider
from podman_help import Podman, podman_service, root_folder
from python_image import python_root
from venvs import harbor_venv

from agentrl.errors import UserError
from agentrl.plugins.types import Session
from agentrl.workspace.provider import Network, WorkspaceProvider, WorkspaceSpec

pytestmark = pytest.mark.slow

BASE = "docker.io/library/ubuntu:24.04"
"""What Harbor's template is built from; here a folder of this machine has its name."""
TEST = """#!/bin/sh
cd /app && python3 -I /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
PARTS = """#!/bin/sh
lines=$(cat /app/greeting.txt 2>/dev/null | grep -c .)
echo "{\\"reward\\": 0.$lines, \\"lines\\": $lines}" > /logs/verifier/reward.json
"""
FILLED = {
    "instruction.md": "Write the word hello to /app/greeting.txt.\n",
    "solution/solve.sh": "#!/bin/sh\necho hello > /app/greeting.txt\n",
    "tests/test_outputs.py": 'assert open("/app/greeting.txt").read() == "hello\\n"\n',
}


def fill(task: Path, **files: str) -> None:
    for name, text in {**FILLED, **files}.items():
        path = task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
async def busybox(podman: Podman) -> AsyncIterator[DockerProvider]:
    podman.run("import", "-", BASE, data=root_folder())
    provider = DockerProvider(podman.address)
    await provider.start("harbor")
    yield provider
    await provider.close()


async def reward(provider: WorkspaceProvider, env: Harbor, name: str, solved: bool) -> float:
    """Of a rollout that runs the solution that comes with a task, or nothing."""
    task = next(task for task in env.tasks("test") if task.id == name)
    spec = env.workspace_spec(task, WorkspaceSpec(network=Network(everything=True)))
    workspace = await provider.open(spec)
    await env.prepare(task, workspace)
    session = Session("0", task, random.Random(0), time.monotonic() + 600, workspace=workspace)
    await env.create(session)
    if solved:
        assert (await env.solve(task, workspace)).ok
    found = await env.calc_reward(session)
    await workspace.close()
    return found["reward"]


async def test_a_task_runs_in_the_image_of_its_dockerfile(busybox: DockerProvider, tmp_path: Path) -> None:
    task, grades = (
        tmp_path / "hello",
        "#!/bin/sh\ncmp /app/greeting.txt /srv/wanted && echo 1 > /logs/verifier/reward.txt\n",
    )
    docker = "FROM ubuntu:24.04\nRUN mkdir -p /srv && echo hello > /srv/wanted\nWORKDIR /app\n"
    fill(task, **{"environment/Dockerfile": docker, "tests/test.sh": grades, "task.toml": 'schema_version = "1.4"\n'})
    env = Harbor(str(tmp_path), held_out=1.0)
    assert await reward(busybox, env, "hello", solved=True) == 1.0
    assert await reward(busybox, env, "hello", solved=False) == 0.0


async def test_an_agent_is_the_user_of_its_task_and_its_tests_are_not(busybox: DockerProvider, tmp_path: Path) -> None:
    toml = '[agent]\nuser = "agent"\n[environment]\nworkdir = "/home/agent"\n'
    solve = "#!/bin/sh\nid -un > who; pwd >> who; touch /etc/mine || echo no >> who; touch /logs/artifacts/mine\n"
    grades = (
        "#!/bin/sh\n[ \"$(cat /home/agent/who | xargs) $(id -un) $(pwd)\" = 'agent /home/agent no root /home/agent' ]"
    )
    grades += " && [ -e /logs/artifacts/mine ] && echo 1 > /logs/verifier/reward.txt\n"
    fill(tmp_path / "who", **{"environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n", "tests/test.sh": grades,
                              "solution/solve.sh": solve, "task.toml": toml})  # fmt: skip
    assert await reward(busybox, Harbor(str(tmp_path), held_out=1.0), "who", solved=True) == 1.0


async def test_a_missing_base_image_is_named_in_one_line(busybox: DockerProvider, tmp_path: Path) -> None:
    task = tmp_path / "hello"
    docker = "FROM registry.invalid/nobody/has:1\n"
    fill(task, **{"environment/Dockerfile": docker, "tests/test.sh": TEST, "task.toml": 'schema_version = "1.4"\n'})
    env = Harbor(str(tmp_path), held_out=1.0)
    with pytest.raises(UserError) as caught:
        await reward(busybox, env, "hello", solved=True)
    said = str(caught.value)
    assert str(task / "environment/Dockerfile") in said
    assert "registry.invalid/nobody/has:1" in said
    assert "\n" not in said


@pytest.fixture(scope="module")
def bash_podman() -> Iterator[Podman]:
    """A podman whose `ubuntu:24.04` has Bash and Python; programs that are started with `env` use it by themselves."""
    bash = shutil.which("bash")
    assert bash is not None
    with podman_service(image=False) as running:
        running.run("import", "-", BASE, data=python_root(bash))
        yield running


def by_program(harbor: Path, podman: Podman, folder: Path, agent: str) -> dict[str, float]:
    """The reward of each task of a folder, as `harbor run` has it."""
    env = {**os.environ, **podman.own_env, "PATH": f"{harbor}/bin:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    jobs = folder.parent / f"jobs-{agent}"
    words = ["harbor", "run", "--path", folder, "--agent", agent, "--env", "podman", "--n-concurrent", "2", "--yes"]
    words += ["--jobs-dir", jobs]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rewards = {}
    for path in jobs.glob("*/*/result.json"):
        result = json.loads(path.read_text())
        assert result["verifier_result"], result["exception_info"]
        rewards[Path(result["config"]["task"]["path"]).name] = result["verifier_result"]["rewards"]["reward"]
    return rewards


@pytest.mark.long
async def test_harbors_program_and_ours_agree_on_its_own_template(bash_podman: Podman, tmp_path: Path) -> None:
    harbor, tasks = harbor_venv(), tmp_path / "tasks"
    tasks.mkdir()
    for name, tests in {"whole": TEST, "parts": PARTS}.items():
        made = ["task", "init", f"agentrl/{name}", "--description", name, "--tasks-dir", str(tasks)]
        subprocess.run([harbor / "bin/harbor", *made], check=True, capture_output=True)
        fill(tasks / name, **{"tests/test.sh": tests})
    provider = DockerProvider(bash_podman.address)
    await provider.start("harbor")
    env = Harbor(str(tasks), held_out=1.0)
    for agent, solved in (("oracle", True), ("nop", False)):
        theirs = by_program(harbor, bash_podman, tasks, agent)
        ours = {name: await reward(provider, env, name, solved) for name in theirs}
        assert ours == theirs == ({"whole": 1.0, "parts": 0.1} if solved else {"whole": 0.0, "parts": 0.0})
    await provider.close()
