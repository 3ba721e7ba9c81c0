"""Repair tasks made from a package that the test writes: solutions earn 1, nothing and answers by heart earn 0."""

import ast
import asyncio
import json
import random
import shutil
import tarfile
import textwrap
import time
import zipfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agentrl_envs.swe import environment
from agentrl_envs.swe.environment import SOURCE, TASKS, WORK, Swe, question
from agentrl_envs.swe.make import (
    COPY,
    UNSOLVED,
    UNSTEADY,
    UNTOUCHED,
    Made,
    Source,
    copied,
    graded,
    main,
    make_tasks,
    unpacked,
    varied,
)
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


def listed(word):
    """In an order that differs between processes.

    >>> [len(listed(word)) for word in ("abc", "bcd", "cdef", "defg", "efgh", "ab", "ba", "xyz", "zyx")]
    [3, 3, 4, 4, 4, 2, 2, 3, 3]
    """
    return [letter for letter in set(word) if letter > "A"]
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

    made = asyncio.run(make(BwrapProvider(), folder / "project", folder / "set"))
    assert made.tasks >= 4
    assert made.left_out == {UNSTEADY: 2}, "a die, and what hangs on hashes"
    return folder / "set"


async def make(provider: WorkspaceProvider, project: Path, top: Path) -> Made:
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


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of the image in which packages lie."""
    folder = tmp_path / "lib/dist-packages"
    folder.mkdir(parents=True)
    return folder


async def functions_with_copies(image: Path, made: Path) -> set[str]:
    provider = BwrapProvider(folders=[str(image)])
    await provider.start("swe")
    try:
        found = await copied(provider, str(made))
    finally:
        await provider.close()
    assert set(found.values()) <= {COPY}
    return {task.data["calls"][0][1] for task in Swe(str(made)).tasks("test") if task.id in found}


async def test_a_function_that_the_image_has_elsewhere_is_an_answer(made: Path, image: Path) -> None:
    """Also as it was in another version."""
    (image / "vendored").mkdir()
    (image / "vendored/numbers.py").write_text("import os\n\n\ndef spell(words):\n    return ','.join(words)\n")
    assert await functions_with_copies(image, made) == {"spell"}


@pytest.mark.parametrize("place", ["small/__init__.py", "small.py", "some.whl"])
async def test_a_package_that_the_image_has_is_an_answer(made: Path, image: Path, place: str) -> None:
    """Of any version: as a folder, a module or in a wheel."""
    path = image / place
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("some/_vendor/small/__init__.py", "")
    assert await functions_with_copies(image, made) == {"clamp", "spell", "hangs"}


async def test_a_package_of_another_name_is_none(made: Path, image: Path) -> None:
    (image / "smaller").mkdir()
    (image / "smaller/__init__.py").write_text("def clamp(): pass")
    assert await functions_with_copies(image, made) == set()


async def test_no_task_is_made_where_the_image_has_the_answer(made: Path, image: Path, tmp_path: Path) -> None:
    (image / "small.py").write_text("")
    what = await make(BwrapProvider(folders=[str(image)]), made.parent / "project", tmp_path / "set")
    assert what == Made(0, Counter({COPY: 5}))
    assert not (tmp_path / "set").exists()


async def test_each_solution_earns_1_and_nothing_earns_0(provider: WorkspaceProvider, made: Path) -> None:
    assert await graded(provider, str(made)) == {}


async def test_what_the_grader_does_not_grade_as_it_must_is_found(
    provider: WorkspaceProvider, made: Path, tmp_path: Path
) -> None:
    """A result that hangs on hashes and got through, by chance, among what is expected; a mistake that is none."""
    row = next(task.data for task in Swe(str(made)).tasks("test") if task.data["calls"][0][1] == "spell")
    facts = {name: value for name, value in row.items() if name != "folder"}
    call = ["small.numbers", "listed", repr(["abcdefghijklmnop"]), "{}"]
    by_chance = {"calls": [*row["calls"], call], "expected": [*row["expected"], repr(sorted(call[2]))]}
    rows = [facts, {**facts, **by_chance}, {**facts, "mutation": {**row["mutation"], "text": row["sound"]}}]
    folder = tmp_path / "small-1.2"
    folder.mkdir()
    (folder / SOURCE).write_bytes((made / "small-1.2" / SOURCE).read_bytes())
    lines = [json.dumps({**row, "id": f"{n}"}) for n, row in enumerate(rows)]
    (folder / TASKS).write_text("\n".join(lines))
    assert await graded(provider, str(tmp_path)) == {"1": UNSOLVED, "2": UNTOUCHED}


@pytest.mark.slow
async def test_tasks_that_are_graded_wrong_are_dropped_and_counted(made: Path, tmp_path: Path) -> None:
    """A function that counts its calls: it gives the same whenever all are replayed, and is graded by some of them."""
    project = tmp_path / "project"
    shutil.copytree(made.parent / "project", project)
    hangs, listed = CODE.index("def hangs"), CODE.index("def listed")
    code = (
        CODE[:hangs]
        + CODE[listed:]
        + textwrap.dedent('''
        calls = 0


        def counted(n):
            """Another number after each call: of calls that were left out, too.

            >>> [len([counted(n)]) for n in range(2, 9)]
            [1, 1, 1, 1, 1, 1, 1]
            """
            global calls
            calls += 1
            return {n} if n == 2 else n + calls if n > 3 else object()
    ''')
    )
    (project / "src/small/numbers.py").write_text(code)
    what = await make(BwrapProvider(), project, tmp_path / "set")
    assert what.left_out[UNSOLVED] >= 1
    assert what.left_out[UNSTEADY] == 2
    env = Swe(str(tmp_path / "set"))
    names = {task.data["calls"][0][1] for split in ("train", "test") for task in env.tasks(split)}
    assert names == {"clamp", "spell"}


async def test_an_answer_by_heart_and_broken_code_earn_nothing(
    provider: WorkspaceProvider, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "SECONDS", 3.0)  # of what never ends
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


def test_a_check_of_a_folder_without_tasks_is_one_line(
    bubblewrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["make", str(tmp_path), "--check"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: env.source: {tmp_path} holds no tasks")


@pytest.mark.parametrize(("python", "said"), [("new", "is no source distribution"), ("old", "3.11.4 is the first")])
def test_what_cannot_be_unpacked_is_one_line(
    python: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (archive := tmp_path / "x.tar.gz").write_bytes(b"no tar")
    if python == "old":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(UserError, match=said):
        unpacked(str(archive), tmp_path)


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
