"""`terminal_tasks` in real workspaces: demonstrations tell what the shell prints, and rewards what came of it."""

from random import Random

import pytest
from agentrl_envs.terminal_tasks import grade
from agentrl_envs.terminal_tasks.demonstrations import DONE
from agentrl_envs.terminal_tasks.environment import TerminalTasks
from agentrl_envs.terminal_tasks.generate import job_of
from agentrl_envs.terminal_tasks.kinds import KINDS
from agentrl_envs.terminal_tasks.unseen import GIT, UNSEEN
from agentrl_tools.terminal import Terminal
from agentrl_tools.workspaces.bwrap import BwrapProvider
from agentrl_tools.workspaces.docker import DockerProvider
from python_image import GNU_IMAGE, gnu_root
from workspaces import session_in, used

from agentrl.errors import UserError
from agentrl.testing import call, check_environment
from agentrl.workspace.provider import WorkspaceSpec

ENV = TerminalTasks(git=True)
needs_bubblewrap = pytest.mark.usefixtures("bubblewrap")


def of_kind(kind, count, split="train"):
    tasks = ENV.tasks("unseen" if kind in UNSEEN else split)
    return [task for task in tasks[:200] if task.data["kind"] == kind][:count]


async def played(provider, task, commands, then="true"):
    """What the tool tells of some commands, and the rewards after them. then: run beside them, at the end."""
    workspace = await provider.open(WorkspaceSpec())
    try:
        await ENV.prepare(task, workspace)
        snapshot = await workspace.snapshot()
    finally:
        await workspace.close()
    workspace = await provider.open(WorkspaceSpec(), snapshot)
    try:
        async with used(TOOL, workspace) as session:
            told = [(await TOOL.execute(session, command=command)).text for command in commands]
        await workspace.exec(then)
        await workspace.end_processes()
        session = session_in(workspace)
        session.task = task
        return told, await ENV.calc_reward(session)
    finally:
        await workspace.close()
        await provider.forget(snapshot)


TOOL = Terminal()


@pytest.fixture
async def provider():
    made = BwrapProvider()
    yield made
    await made.close()


@needs_bubblewrap
@pytest.mark.parametrize("kind", [*KINDS, *UNSEEN, *GIT])
async def test_a_demonstration_tells_what_the_shell_prints_and_is_solved(kind, provider):
    for task in [*of_kind(kind, 2), *(() if kind in UNSEEN else of_kind(kind, 1, "large"))]:
        job = job_of(task.data)
        told, rewards = await played(provider, task, [step.command for step in job.steps])
        assert told == [step.told for step in job.steps]
        assert rewards == {"passed": 1.0, "fraction": 1.0}, job.instruction
        for wrong in job.wrong:
            steps = [*job.steps[:-1], wrong]
            told, rewards = await played(provider, task, [step.command for step in steps])
            if kind in KINDS:  # what demonstrations of others tell is theirs
                assert told == [step.told for step in steps], wrong
            assert rewards["passed"] == 0.0, wrong


@pytest.fixture
async def containers(podman):
    podman.run("import", "-", GNU_IMAGE, data=gnu_root("git"))
    made = DockerProvider(podman.address, GNU_IMAGE)
    await made.start("tasks")
    yield made
    await made.close()


@needs_bubblewrap
@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, *UNSEEN, *GIT])
async def test_rewards_in_podman_are_those_of_bubblewrap(kind, provider, containers):
    [task] = of_kind(kind, 1)
    job = job_of(task.data)
    right, wrong = [step.command for step in job.steps], [step.command for step in job.steps[:-1]]
    for commands, passed in ((right, 1.0), ([*wrong, job.wrong[0].command], 0.0), ([], 0.0)):
        told, rewards = await played(provider, task, commands)
        assert await played(containers, task, commands) == (told, rewards), (job.instruction, commands)
        assert rewards["passed"] == passed


CHEATS = {
    "a link to the answer": ("find", "rm -f found; ln -s {folder}/{holder} found"),
    "a folder in its place": ("find", "mkdir found"),
    "a FIFO in its place": ("count", "mkfifo count"),
    "all answers at once": ("count", "seq 1 20 >count"),
    "a file of zeros without end": ("count", "head -c 100000000 /dev/zero >count"),
    "a script that knows nothing but exits well": ("repair", "echo exit 0 >{name}.sh"),
    "a script that prints everything": ("repair", "echo 'echo 7; echo x; seq 1 9' >{name}.sh"),
    "a script that never ends": ("repair", "echo 'while :; do :; done' >{name}.sh"),
    "another sh": ("repair", "mkdir -p bin; printf '#!/bin/sh\\necho 7' >bin/sh; chmod +x bin/sh; PATH=$PWD/bin"),
    "a hook that speaks for git": ("commit", "cd {folder}; git config alias.log '!echo x'; git config core.pager echo"),
    "an empty commit": ("commit", "cd {folder}; git commit -q --allow-empty -m {message}"),
    "a daemon that writes later": ("count", "(sleep 1; echo 1 >count) &"),
}


@needs_bubblewrap
@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_earns_nothing_and_its_honest_twin_does(name, provider, monkeypatch):
    if name == "a script that never ends":
        monkeypatch.setattr(grade, "SECONDS", 4.0)
    kind, command = CHEATS[name]
    [task] = of_kind(kind, 1)
    job = job_of(task.data)
    words = {
        "folder": task.data["instruction"].split(" of ")[-1].split(" ")[0] if kind == "commit" else "",
        "message": task.data["instruction"].split(" ")[-1].rstrip("."),
        "name": next(iter(job.files), "").removesuffix(".sh"),
    }
    if kind == "find":
        words["folder"], words["holder"] = job.goal["found"][1].split("/")
    filled = command
    for key, value in words.items():
        filled = filled.replace(f"{{{key}}}", value)
    _, rewards = await played(provider, task, [filled])
    assert rewards["passed"] == 0.0
    _, rewards = await played(provider, task, [step.command for step in job.steps])
    assert rewards["passed"] == 1.0


@needs_bubblewrap
async def test_what_was_there_must_stay_as_it_was(provider):
    [task] = of_kind("sort", 1)
    job = job_of(task.data)
    [source] = job.files
    commands = [step.command for step in job.steps]
    _, rewards = await played(provider, task, commands, then=f"echo more >>{source}")
    assert rewards == {"passed": 0.0, "fraction": 1.0}


@pytest.mark.slow
def test_no_instruction_of_a_held_out_split_is_trained_on_and_large_is_larger():
    seen = {task.data["instruction"] for task in ENV.tasks("train")[:2000]}
    for split in ("test", "large", "validation", "unseen"):
        assert not seen & {task.data["instruction"] for task in ENV.tasks(split)[:300]}
    sizes = {
        split: [
            sum(map(len, job_of(t.data).files.values())) for t in ENV.tasks(split)[:70] if t.data["kind"] == "filter"
        ]
        for split in ("train", "large")
    }
    assert min(sizes["large"]) > 2 * max(sizes["train"])
    assert {task.data["kind"] for task in TerminalTasks().tasks("train")[:50]} == set(KINDS)
    assert TerminalTasks(seed=1).tasks("train")[0] != ENV.tasks("train")[0]


def test_careless_demonstrations_do_it_all_and_the_same_for_a_seed():
    shown = [ENV.demonstrate(task, Random(i), "careless") for i, task in enumerate(ENV.tasks("train")[:200])]
    assert all(messages[-1] == {"role": "assistant", "content": DONE} for messages in shown)
    jobs = [job_of(task.data) for task in ENV.tasks("train")[:200]]
    right = sum(
        [m["tool_calls"][0]["function"]["arguments"]["command"] for m in messages if m.get("tool_calls")]
        == [step.command for step in job.steps]
        for messages, job in zip(shown, jobs, strict=True)
    )
    assert 40 < right < 100
    assert 20 < sum(len(messages) == 1 for messages in shown) < 60
    assert shown[0] == ENV.demonstrate(ENV.tasks("train")[0], Random(0), "careless")
    with pytest.raises(UserError, match="careless"):
        ENV.demonstrate(ENV.tasks("train")[0], Random(0), "careles")


@needs_bubblewrap
@pytest.mark.slow
def test_it_keeps_the_contract_of_environments():
    def gold(task):
        return [*(call("terminal", command=step.command) for step in job_of(task.data).steps), DONE]

    check_environment(
        ENV, gold, lambda task: [DONE], tools=["terminal"], tasks=9, sessions=18, workspace="bwrap",
        limits={"max_turns": 8, "max_tool_calls": 8},
    )  # fmt: skip
