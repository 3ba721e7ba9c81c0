"""A command and what it leaves behind end with it, with their parent, and not before. With servers: engine/sglang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import alive, until

from agentrl.process_tree import ENDED, ProcessTree

ORPHAN = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()  # no signal to the group reaches it, and its parent ends
    if os.fork() == 0:
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[2]))
"""
STARTER = """
import os, pathlib, sys, time
from agentrl.process_tree import ProcessTree
with open(os.devnull, "wb") as output:
    tree = ProcessTree(sys.argv[2:], output, os.environ, folder=pathlib.Path(sys.argv[1]))
time.sleep(1000)
"""


def orphan(ids: Path) -> int:
    """The process ID of the command's orphan."""
    until(lambda: ids.exists() and ids.read_text() != "")
    return int(ids.read_text())


@pytest.mark.parametrize("how", ["end", "by itself", "parent killed"])
def test_an_orphan_in_a_session_of_its_own_ends_too(tmp_path: Path, how: str) -> None:
    folder, ids = tmp_path / "folder", tmp_path / "ids"
    folder.mkdir()
    command = [sys.executable, "-c", ORPHAN, str(ids), "0" if how == "by itself" else "1000"]
    if how == "parent killed":
        with subprocess.Popen([sys.executable, "-c", STARTER, str(folder), *command]) as parent:
            found = orphan(ids)
            parent.kill()
        until(lambda: not alive(found))
        until(lambda: not folder.exists())
        return
    with (tmp_path / "log").open("wb") as output:
        tree = ProcessTree(command, output, os.environ, folder=folder)
    found = orphan(ids)
    if how == "by itself":
        until(lambda: not tree.running)
        assert not alive(found)
        assert (folder / ENDED).read_text() == "the command ended with exit code 0"  # until the parent has read why
        assert not tree.gone
    tree.end()
    assert not alive(found)
    assert not folder.exists()


@pytest.mark.parametrize(("grace", "at_once", "asked"), [(30.0, False, True), (30.0, True, False), (0.0, False, False)])
def test_a_command_is_asked_before_it_is_killed(tmp_path: Path, grace: float, at_once: bool, asked: bool) -> None:
    mark = tmp_path / "asked"
    handle = "signal.signal(signal.SIGTERM, lambda *a: (open(sys.argv[1], 'w'), sys.exit()))"
    program = f"import signal, sys, time; {handle}; open(sys.argv[1] + '.up', 'w'); time.sleep(1000)"
    with (tmp_path / "log").open("wb") as output:
        tree = ProcessTree([sys.executable, "-c", program, str(mark)], output, os.environ, grace=grace)
    until(Path(f"{mark}.up").exists)
    tree.end(at_once)
    assert mark.exists() is asked
    assert "the command ended with exit code" in (tmp_path / "log").read_text()
