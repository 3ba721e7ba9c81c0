"""The quick tier covers every package: `pytest` alone tests something of each. Tests of servers await their install."""

import ast
import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT
from tiers import FIXTURES, TIERS
from venvs import INSTALLING, wait_for_install

TESTS = ROOT / "tests"
NOT_QUICK = TIERS.keys() | FIXTURES.keys() | {"sglang_url", "vllm_url"}
ROOMS = sorted(
    {path.parent.name for path in (ROOT / "agentrl").glob("*/__init__.py")} - {"scaffold"} | {"envs", "tools", "system"}
)
"""The templates of `scaffold` are tested by `tests/cli/test_new.py`."""


def names_in(node: ast.AST) -> set[str]:
    """The attributes, arguments and strings below a node."""
    found: set[str] = set()
    for inner in ast.walk(node):
        found |= {value for value in vars(inner).values() if isinstance(value, str)}
    return found


def quick_tests(path: Path) -> Iterator[str]:
    """Yield the names of a file's quick tests. Fixtures of fixtures are not followed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in names_in(node)]
    if any(names_in(node) & NOT_QUICK for node in marks):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            around = [names_in(part) for part in (*node.decorator_list, node.args)]
            if not NOT_QUICK & set().union(*around):
                yield node.name


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_quick_tests(room: str) -> None:
    assert any(name for path in sorted((TESTS / room).rglob("test_*.py")) for name in quick_tests(path))


def test_a_marker_is_seen_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    marked = "@pytest.mark.slow\ndef test_a(): ...\ndef test_b(sglang_url): ...\ndef test_c(): ...\n"
    file.write_text(marked)
    assert list(quick_tests(file)) == ["test_c"]
    file.write_text(f"pytestmark = [pytest.mark.ray]\n{marked}")
    assert list(quick_tests(file)) == []


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment whose installation was broken off."""
    monkeypatch.delenv(INSTALLING, raising=False)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    (tmp_path / "venv/.agentrl-vllm-cpu").write_text("incomplete\n")
    (tmp_path / "venv.lock").touch()
    return tmp_path / "venv"


def test_tests_wait_for_the_end_of_an_installation(venv: Path) -> None:
    waiting = threading.Thread(target=wait_for_install, args=(venv,))
    with Path(f"{venv}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        (venv / ".agentrl-vllm-cpu").write_text("97ed3b\n")
    waiting.join(30.0)
    wait_for_install(venv)


def test_tests_wait_for_an_installation_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, venv: Path
) -> None:
    installing = tmp_path / "installing"
    monkeypatch.setenv(INSTALLING, str(installing))
    installing.touch()
    with pytest.raises(RuntimeError, match="still being installed after 0 seconds"):
        wait_for_install(tmp_path / "later", 0.0)
    with pytest.raises(RuntimeError, match="still being installed after 0 seconds"):
        wait_for_install(venv, 0.0)
    (venv / ".agentrl-vllm-cpu").write_text("97ed3b\n")
    wait_for_install(venv)  # others may go on
    installing.unlink()
    with pytest.raises(RuntimeError, match="later is no virtual environment"):
        wait_for_install(tmp_path / "later")


def test_a_failed_installation_is_told(venv: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the installation of .*venv failed: see its output"):
        wait_for_install(venv)
    with Path(f"{venv}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="still being installed after 0 seconds"):
            wait_for_install(venv, 0.0)
    (venv / "bin/python").unlink()
    with pytest.raises(RuntimeError, match="is no virtual environment"):
        wait_for_install(venv)
