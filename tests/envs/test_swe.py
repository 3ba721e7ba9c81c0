"""Repair tasks made from a package that the test writes: solutions earn 1, nothing and answers by heart earn 0."""

import ast
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agentrl_envs.swe.environment import SOURCE, TASKS, WORK, Swe, question
from agentrl_envs.swe.make import Source, check_tasks, make_tasks, varied
from agentrl_envs.swe.mutations import functions, mutations
from agentrl_tools.workspaces.bwrap import BwrapProvider

from agentrl.errors import UserError
from agentrl.plugins.types import Session, Task
from agentrl.workspace.provider import WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import Workspace

CODE = '''
"""Numbers."""
import random


def clamp(value, low=0, high=10):
    """Keep a number in bounds.

    >>> [clamp(n) for n in range(-3, 14)]
    [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]
    """
    if value < low:
        return low
    if value > high:
        return high
    return value


def spell(words, sep=", "):
    """Join words."""
    text = ""
    for i, word in enumerate(words):
        text += (sep if i > 0 else "") + word.upper()
    return text


def dice(sides):
    """Never the same.

    >>> [dice(n) and None for n in range(10, 20)]
    [None, None, None, None, None, None, None, None, None, None]
    """
    return random.random() * sides


def hangs(n):
    """
    >>> [hangs(n) for n in range(6)]
    [0, 1, 2, 3, 4, 5]
    """
    count = 0
    while count < n:
        count = count + 1
    return count
'''
TESTS = """
import unittest
from small.numbers import spell
class Tests(unittest.TestCase):
    def test_spell(self):
        for words in ([], ["a"], ["a", "b"], ["c", "d", "e"], ["one", "two"]):
            spell(words)
        self.assertEqual(spell(["a", "b"], "-"), "A-B")
"""


@pytest.fixture(scope="module")
def made(bubblewrap: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks."""
    folder = tmp_path_factory.mktemp("swe")
    files = {
        "src/small/__init__.py": "", "src/small/numbers.py": CODE, "tests/test_numbers.py": TESTS, "LICENSE": "Free.",
        "PKG-INFO": "Name: Small\nVersion: 1.2\nLicense-Expression: MIT\n", "src/small/tests/test_x.py": "pass",
    }  # fmt: skip
    for name, text in files.items():
        path = folder / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert asyncio.run(make(BwrapProvider(), folder / "project", folder / "set")) >= 4
    return folder / "set"


async def make(provider: WorkspaceProvider, project: Path, top: Path) -> int:
    await provider.start("swe")
    try:
        return await make_tasks(provider, Source(project), top)
    finally:
        await provider.close()


@pytest.fixture
async def provider(bubblewrap: None) -> AsyncIterator[WorkspaceProvider]:
    provider = BwrapProvider()
    await provider.start("swe")
    yield provider
    await provider.close()


async def begun(provider: WorkspaceProvider, env: Swe, task: Task) -> tuple[Session, Workspace]:
    base = await provider.open(WorkspaceSpec())
    await env.prepare(task, base)
    workspace = await provider.open(WorkspaceSpec(), await base.snapshot())
    return Session(task.id, task, random.Random(0), time.monotonic() + 600, workspace=workspace), workspace


async def test_a_function_that_the_image_has_elsewhere_is_no_task(made: Path, tmp_path: Path) -> None:
    """A package of the distribution would be the answer."""
    (tmp_path / "image").mkdir()
    spell = CODE[CODE.index("def spell") : CODE.index("def dice")]
    (tmp_path / "image/numbers.py").write_text(f"import os\n\n\n{spell}")
    provider = BwrapProvider(folders=[str(tmp_path / "image")])
    await make(provider, made.parent / "project", tmp_path / "set")
    with_copy = {task.data["calls"][0][1] for task in Swe(str(tmp_path / "set")).tasks("test")}
    assert "spell" in {task.data["calls"][0][1] for task in Swe(str(made)).tasks("test")}
    assert "spell" not in with_copy
    assert with_copy


async def test_each_solution_earns_1_and_nothing_earns_0(provider: WorkspaceProvider, made: Path) -> None:
    env = Swe(str(made))
    assert await check_tasks(provider, env, env.tasks("test")) == []


async def test_an_answer_by_heart_and_broken_code_earn_nothing(provider: WorkspaceProvider, made: Path) -> None:
    env = Swe(str(made))
    task = next(task for task in env.tasks("test") if task.data["calls"][0][1] == "spell")
    expected = task.data["expected"][task.data["shown"]]
    for code in (f"def spell(*given):\n    return {expected}\n", "raise SystemExit(0)\n", "import os\nos._exit(0)\n",
                 "def spell(", "while True:\n    pass\n"):  # fmt: skip
        session, workspace = await begun(provider, env, task)
        await workspace.write(f"{WORK}/{task.data['file']}", code.encode())
        assert await env.calc_reward(session) == {"passed": 0.0}
        await workspace.close()


async def test_the_tests_are_not_in_the_workspace(provider: WorkspaceProvider, made: Path) -> None:
    env = Swe(str(made))
    _, workspace = await begun(provider, env, env.tasks("test")[0])
    found = {entry.path for entry in await workspace.listing(WORK, depth=9)}
    assert found == {"small", "small/__init__.py", "small/numbers.py"}


def test_a_task_says_what_is_wrong_and_keeps_the_rest(made: Path) -> None:
    tasks = Swe(str(made)).tasks("test")
    assert {task.data["calls"][0][1] for task in tasks} == {"clamp", "spell", "hangs"}  # a die has no expected result
    assert {(task.data["package"], task.data["version"], task.data["license"]) for task in tasks} == {
        ("small", "1.2", "MIT")
    }
    for task in tasks:
        function, wanted = task.data["calls"][0][1], task.data["expected"][task.data["shown"]]
        assert f"`{function}(" in question(task)
        assert wanted in question(task)
        assert task.data["broken"] != wanted
    assert (made / "small-1.2" / "LICENSE").read_text() == "MIT\n\nFree."


def test_two_thirds_of_the_packages_are_held_out(made: Path, tmp_path: Path) -> None:
    row = json.loads((made / "small-1.2" / TASKS).read_text().splitlines()[0])
    for index in range(9):
        folder = tmp_path / f"package{index}-1.0"
        folder.mkdir()
        (folder / SOURCE).write_bytes(b"")
        (folder / TASKS).write_text(json.dumps({**row, "id": f"package{index}-1.0/0"}) + "\n")
    env = Swe(str(tmp_path))
    assert (len(env.tasks("train")), len(env.tasks("test"))) == (3, 6)
    assert not {task.id for task in env.tasks("train")} & {task.id for task in env.tasks("test")}


def test_a_folder_without_tasks_or_with_bad_ones_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m agentrl_envs\.swe\.make"):
        Swe(str(tmp_path))
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / TASKS).write_text('{"id": "a"}\n{\n')
    with pytest.raises(UserError, match=r"tasks\.jsonl:2: is no task"):
        Swe(str(tmp_path))


def test_mutations_change_one_place_and_stay_python() -> None:
    tree = functions(CODE)
    found = {name: mutations(CODE, node) for name, node in tree.items()}
    assert {one.kind for one in found["clamp"]} >= {"comparison", "branch", "return", "default"}
    assert {one.kind for one in found["spell"]} >= {"comparison", "operator", "off_by_one", "default"}
    for name, mutated in found.items():
        for one in mutated:
            changed = one.applied(CODE)
            before, after = CODE.splitlines(), changed.splitlines()
            assert [a for a, b in zip(before, after, strict=True) if a != b] == [before[one.line - 1]]
            assert ast.dump(functions(changed)[name]) != ast.dump(tree[name])


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        ("a == b", "comparison", "a != b"), ("a and b", "boolean", "(a or b)"), ("not a", "boolean", "(a)"),
        ("a + b * 2", "operator", "(a - b * 2)"), ("f(a, b, 1)", "arguments", "f(b, a, 1)"), 
        ("a[1:]", "off_by_one", "2"),
        ("'ä-'", "constant", "'ä'"), ("True", "boolean", "False"),
    ],
)  # fmt: skip
def test_each_mistake_is_made_where_it_can_be(before: str, kind: str, after: str) -> None:
    source = f"def f(a, b):\n    ü = 'ü'; return {before}\n"
    assert (kind, after) in [(one.kind, one.text) for one in mutations(source, functions(source)["f"])]


def test_variations_differ_and_are_literals() -> None:
    rng, given = random.Random(0), "[1, 'abc', [1, 2], None, True]"
    seen = {varied(given, "{}", rng)[0] for _ in range(100)}
    assert len(seen) > 10
    for text in seen:
        assert [type(value) for value in ast.literal_eval(text)] == [int, str, list, type(None), bool]
    assert varied("[None, True]", "{}", rng) == ("[None, True]", "{}")
