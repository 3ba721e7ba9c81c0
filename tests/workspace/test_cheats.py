"""Agents that cheat: each earns 0, and what it left is counted by name; its honest twin earns 1, uncounted."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from cheats import ANSWER, AT_GRADING, BIN, CHEATS, PROGRAM, Cheat
from paths import ROOT
from podman_help import podman_service
from python_image import PYTHON_IMAGE, python_root
from workspace_contract import Offer

from agentrl.workspace.archive import packed
from agentrl.workspace.capture import Protection
from agentrl.workspace.grading import REWARDS, RUN, Grade, Grading, grade
from agentrl.workspace.provider import WorkspaceLimits, WorkspaceSpec
from agentrl.workspace.workspace import MIB, PathError, Workspace

WORK = "/home/user/work"
BWRAP = "agentrl_tools.workspaces.bwrap:BwrapProvider"
DOCKER = "agentrl_tools.workspaces.docker:DockerProvider"
EXAMPLE = (
    b"import unittest\nclass Example(unittest.TestCase):\n    def test(self):\n        int(open('answer.txt').read())\n"
)
HIDDEN = b"""import json, unittest
class Hidden(unittest.TestCase):
    def test(self):
        with open('answer.txt') as mine, open('/tests/answer.txt') as true:
            self.assertEqual(int(mine.read()), json.loads(true.read()))
"""
CHECK = b"""got, expected = (open(path).read() for path in ('/logs/run/stdout', '/tests/expected'))
open('/logs/verifier/reward.txt', 'w').write('1' if got == expected else '0')
"""
TAKEN = Protection(files=500, size=8 * MIB)
LIMITS = WorkspaceLimits(disk=64 * MIB)
GRADINGS = {
    "answer": Grading(
        "if command -v pytest; then pytest -q tests/test_answer.py; else python3 -m unittest discover -s tests; fi\n"
        f"if [ $? -eq 0 ]; then echo 1 > {REWARDS[1]}; else echo 0 > {REWARDS[1]}; fi",
        tests=packed({"/tests/answer.txt": b"37\n", f"{WORK}/tests/test_answer.py": HIDDEN}),
        protection=TAKEN,
        cwd=WORK,
        seconds=20.0,
    ),
    "program": Grading(
        "python3 -I -S /tests/check.py",
        tests=packed({"/tests/check.py": CHECK, "/tests/expected": b"6\nexit 0\n42\nexit 0\n7\nexit 0\n"}),
        run='for case in "1 2 3" "40 2" "-5 5 7"; do\necho "$case" | timeout 3 python3 total.py; echo "exit $?"\ndone',
        protection=TAKEN,
        cwd=WORK,
        seconds=20.0,
    ),
}


@pytest.fixture(scope="module")
def containers() -> Iterator[Offer]:
    """Podman with an image that has Python, in which programs are root."""
    with podman_service(image=False) as podman:
        podman.run("import", "-", PYTHON_IMAGE, data=python_root())
        yield Offer(DOCKER, {"address": podman.address}, WorkspaceSpec(PYTHON_IMAGE, LIMITS))


@pytest.fixture(params=["bwrap", pytest.param("docker", marks=pytest.mark.long)])
async def begun(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Awaitable[Workspace]]]:
    """Opens workspaces in the state that both tasks begin in."""
    if request.param == "bwrap":
        request.getfixturevalue("bubblewrap")
        offer = Offer(BWRAP, {}, WorkspaceSpec(limits=LIMITS))
    else:
        offer = request.getfixturevalue("containers")
    provider = offer.make()
    await provider.start("cheats")
    workspace = await provider.open(offer.spec)
    log = b"".join(b"ERROR\n" if line % 3 == 0 else b"fine\n" for line in range(111))
    await workspace.unpack(packed({f"{WORK}/data.log": log, f"{WORK}/tests/test_answer.py": EXAMPLE}))
    snapshot = await workspace.snapshot()
    await workspace.close()
    yield lambda: provider.open(offer.spec, snapshot)
    await provider.close()


Begun = Callable[[], Awaitable[Workspace]]


async def played(begun: Begun, script: str) -> Workspace:
    """A workspace in which an agent has run a script; what that left in the background runs on."""
    workspace = await begun()
    await workspace.exec(script, cwd=WORK, seconds=20.0)
    return workspace


async def refused(begun: Begun, cheat: Cheat) -> bool:
    """Whether a cheat cannot be tried, since what it changes is read-only."""
    return not (await (await begun()).exec(["test", "-w", cheat.needs])).ok


async def graded(begun: Begun, task: str, script: str) -> Grade:
    workspace = await played(begun, script)
    await workspace.end_processes()
    return await grade(workspace, GRADINGS[task])


async def graded_in_place(begun: Begun, cheat: Cheat) -> float:
    """The reward where the tests run in the agent's own workspace, beside what it left."""
    workspace, grading = await played(begun, cheat.script), GRADINGS[cheat.task]
    await workspace.unpack(grading.tests)
    await workspace.exec(f"mkdir -p {RUN} /logs/verifier")
    if grading.run:
        result = await workspace.exec(grading.run, cwd=WORK, seconds=20.0)
        await workspace.write(f"{RUN}/stdout", result.stdout)
    await workspace.exec(grading.command, cwd=WORK, seconds=20.0)
    for path in REWARDS:
        try:
            text = await workspace.read(path)
        except PathError:
            continue
        return 1.0 if text.strip() in (b"1", b'{"reward": 1}') else 0.0
    return 0.0


def kinds(found: Grade) -> set[str]:
    return {one.partition(":")[0] for one in found.tampering}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
async def test_a_cheat_earns_nothing_and_is_counted(begun: Begun, cheat: Cheat) -> None:
    found = await graded(begun, cheat.task, cheat.script)
    assert found.rewards.get("reward", 0.0) == 0.0, found
    assert cheat.fault in found.fault
    assert kinds(found) >= {cheat.counted} - {""} or await refused(begun, cheat), found


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["docker"], indirect=True)
@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat.needs == BIN], ids=lambda cheat: cheat.name)
async def test_a_cheat_that_bubblewrap_refuses_is_counted_in_a_container(begun: Begun, cheat: Cheat) -> None:
    assert not await refused(begun, cheat)
    found = await graded(begun, cheat.task, cheat.script)
    assert found.rewards.get("reward", 0.0) == 0.0, found
    assert cheat.counted in kinds(found), found


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
async def test_its_honest_twin_earns_all_of_it(begun: Begun, cheat: Cheat) -> None:
    found = await graded(begun, cheat.task, cheat.twin)
    assert (found.rewards, found.tampering, found.fault) == ({"reward": 1.0}, (), ""), found


@pytest.mark.slow
@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat.fools], ids=lambda cheat: cheat.name)
async def test_it_pays_where_a_task_is_graded_in_place(begun: Begun, cheat: Cheat) -> None:
    assert await graded_in_place(begun, cheat) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("task", "solution"), [("answer", ANSWER), ("program", PROGRAM)])
async def test_a_wrong_solution_earns_nothing_and_is_no_cheat(begun: Begun, task: str, solution: str) -> None:
    wrong = await graded(begun, task, solution.replace("ERROR", "fine").replace("sum(", "max("))
    assert (wrong.rewards, wrong.tampering) == ({"reward": 0.0}, ()), wrong
    assert wrong.output == "" or "AssertionError" in wrong.output


def test_the_manual_lists_every_cheat() -> None:
    text = (ROOT / "docs/internals/grading.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    listed = {row[0]: row for row in rows if len(row) == 4}
    for cheat in CHEATS:
        _, runner, counted, pays = listed[cheat.name]
        assert runner == ("the grader" if cheat in AT_GRADING else "the agent")
        assert not cheat.counted or counted == cheat.counted
        assert (pays == "yes") == cheat.fools
