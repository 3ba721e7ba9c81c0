"""A command and what it leaves behind end with it, with their parent, and not before. With servers: engine/sglang."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import alive, until

from agentrl.containment.process_tree import ProcessTree, remove_tree

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
from agentrl.containment.process_tree import ProcessTree
with open(os.devnull, "wb") as output:
    tree = ProcessTree(sys.argv[2:], output, os.environ, folder=pathlib.Path(sys.argv[1]))
time.sleep(1000)
"""


def orphan(ids: Path) -> int:
    """The process ID of the command's orphan."""
    until(lambda: ids.exists() and ids.read_text() != "")
    return int(ids.read_text())


@pytest.mark.quick_cases(1)
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
        assert tree.exit_code == 0
        assert folder.exists()  # until the parent has read what is in it
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


KILLS = """
import os, pathlib, signal, subprocess, sys, time
above = [os.getppid()]
above.append(int(pathlib.Path(f"/proc/{above[0]}/stat").read_text().rpartition(")")[2].split()[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=sys.argv[3] == "1")
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
for pid in above[: int(sys.argv[3])]: os.kill(pid, getattr(signal, sys.argv[2]))
time.sleep(1000)
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("number", "above"), [("SIGKILL", 1), ("SIGSTOP", 1), ("SIGKILL", 2)])
def test_a_command_that_kills_its_supervisor_ends_with_what_it_started(tmp_path: Path, number: str, above: int) -> None:
    folder, ids = tmp_path / "folder", tmp_path / "ids"
    folder.mkdir()
    with (tmp_path / "log").open("wb") as output:
        command = [sys.executable, "-c", KILLS, str(ids), number, str(above)]
        tree = ProcessTree(command, output, os.environ, folder=folder)
    found = orphan(ids)
    until(lambda: not tree.running)
    assert tree.exit_code is None
    tree.end()
    until(lambda: not alive(found))  # nobody is left whom its end could be waited for with
    assert not folder.exists()


def test_a_deep_folder_is_removed_whatever_its_rights_and_links(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # where 3,000 folders take no disk's time
    deep = """
import os, sys
os.chdir(sys.argv[1])
for n in range(3000):
    open("file", "w").close()
    os.symlink(sys.argv[2], "link")
    os.mkfifo("pipe")
    os.mkdir("d" * 200)
    if n % 100 == 1: os.chmod("d" * 200, 0o700), os.chmod(".", 0o100)
    os.chdir("d" * 200)
"""
    subprocess.run([sys.executable, "-c", deep, str(folder), str(kept)], check=True)
    remove_tree(folder)
    assert not folder.exists()
    assert (kept / "file").exists()
