"""What a run keeps on its machine outside of its folder is gone once it is, also where it was killed."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from processes import until
from warm import Python

from agentrl.weights.scratch import LOGS, WEIGHTS, Scratch, sweep

LEFT = """
import sys, time
from agentrl.weights.scratch import Scratch
made = Scratch(sys.argv[1])
print(made.path(), flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def age(folder: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(folder, (then, then))


@pytest.mark.slow
def test_what_a_killed_process_left_goes_when_the_next_one_begins(folder: Path) -> None:
    other = Python(["-c", f"{LEFT}\ntime.sleep(1000)", WEIGHTS])
    try:
        until(lambda: other.said().endswith("\n"))
        left = Path(other.said().strip())
        (left / "weights_1").mkdir()
        age(left, 1)
        mine = Scratch(WEIGHTS)
        age(mine.path(), 1)
        sweep(WEIGHTS)
        assert left.is_dir()  # it is in use
    finally:
        other.kill()
    other.wait()
    sweep(WEIGHTS)
    assert list(folder.iterdir()) == [mine.path()]
    mine.close()
    assert list(folder.iterdir()) == []


def test_one_that_is_just_being_made_stays(folder: Path) -> None:
    (folder / f"{WEIGHTS}new").mkdir()
    (folder / "others").mkdir()
    age(folder / "others", 100)
    sweep(WEIGHTS)
    assert len(list(folder.iterdir())) == 2


def test_logs_stay_to_be_read(folder: Path) -> None:
    kept, empty = Scratch(LOGS), Scratch(LOGS)
    empty.path()
    (kept.path() / "sglang_0.log").write_text("it said")
    kept.close()
    empty.close()
    (left,) = folder.iterdir()
    age(left, 2)
    sweep(LOGS)
    assert left.is_dir()
    age(left, 25)
    sweep(LOGS)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_ends_by_itself_leaves_nothing(folder: Path) -> None:
    other = Python(["-c", LEFT, WEIGHTS])
    assert other.wait() == 0
    assert Path(other.said().strip()).parent == folder
    assert list(folder.iterdir()) == []
