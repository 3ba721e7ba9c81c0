"""What befalls the workers of a real run, in a process of its own: one line, or it goes on; and nothing is left."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_plugins import FATES
from train_help import metrics, small
from warm import Python

from agentrl.cli import main
from agentrl.recipe.load import dump_recipe

pytestmark = pytest.mark.ray
PATIENCE = 240.0  # seconds until a test gives up; no test asserts a time


class Run:
    """`agentrl train` on two workers, in `folder`/run; what happens to them is in `folder`."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.path = folder, folder / "run"
        common = {"cluster__workers": 2, "train__steps": 500, "eval__splits": [], "train__save_every": 1}
        recipe = small(self.path, algorithm__loss="cluster_plugins:fateful", **{**common, **changes})
        (folder / "job.yaml").write_text(dump_recipe(recipe))
        words = ["-m", "agentrl.cli.main", "train", str(folder / "job.yaml")]
        self.process = Python(words, apart=True, env={**os.environ, FATES: str(folder), "TMPDIR": "/tmp"})

    def wait_for(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not what():
            if self.process.poll() is not None:
                raise AssertionError(f"it ended by itself: {self.process.communicate()}")
            assert time.monotonic() < until, "nothing happened"
            time.sleep(0.05)

    def steps(self) -> list[int]:
        return [row["step"] for row in metrics(self.path)] if (self.path / "metrics.jsonl").exists() else []

    def reach(self, step: int) -> None:
        self.wait_for(lambda: step in self.steps())

    def meet(self, fate: str) -> None:
        """Let something happen to a worker within an update, and wait until it does."""
        (self.folder / fate).touch()
        self.wait_for((self.folder / f"{fate.partition('_')[0]}_met").exists)

    def end(self) -> tuple[int, str, list[str]]:
        """Its exit code, what it said, and the lines of its standard error."""
        said, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said, errors.splitlines()


@contextmanager
def started(folder: Path, **changes: Any) -> Iterator[Run]:
    run = Run(folder, **changes)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def family(pid: int) -> set[tuple[int, str]]:
    """All processes below `pid` and it: number and start, so that no other with its number is taken for it."""
    found, waiting = set(), [pid]
    while waiting:
        one = waiting.pop()
        if (born := start_of(one)) is not None:
            found.add((one, born))
        for tasks in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                waiting += map(int, tasks.read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def start_of(pid: int) -> str | None:
    """When a process began; None of one that is gone, or a zombie whose parent has not looked."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def folders_of(processes: set[tuple[int, str]]) -> set[Path]:
    """Those of Ray, as its command lines name them."""
    found = set()
    for pid, _ in processes:
        try:
            said = Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= set(map(Path, re.findall(r"/tmp/agentrl-ray-[a-z0-9_]+", said)))
    return found


def gone(processes: set[tuple[int, str]], folders: set[Path]) -> None:
    """Fails unless nothing of it is left, or goes in a moment."""
    assert len(processes) > 4  # Ray's and two workers were there
    assert folders
    until = time.monotonic() + PATIENCE
    while left := [pid for pid, born in processes if start_of(pid) == born] + [f for f in folders if f.exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    shared = [p.name for p in Path("/dev/shm").iterdir()]
    assert not [name for name in shared for pid, _ in processes if f"_{pid}_" in name]


def test_a_killed_worker_costs_a_restart_and_a_hung_one_ends_the_run_with_a_line(tmp_path: Path) -> None:
    with started(tmp_path, cluster__restarts=1, cluster__timeout=12) as run:
        run.reach(2)
        first = family(run.process.pid)
        folders = folders_of(first)
        run.meet("kill_1")
        done = run.steps()[-1]
        run.reach(done + 2)
        processes = family(run.process.pid)
        gone(first - processes, folders)
        folders = folders_of(processes)
        run.meet("stop_1")
        code, said, errors = run.end()
    assert code == 2, (said, errors)
    line = errors[-1]
    assert len(errors) == 1, errors
    assert re.search(r"no answer to 'update' from rank 1 of 'trainer' within 12 seconds", line) or "rank 0, 1" in line
    assert f"--resume {run.path}" in line
    assert "Traceback" not in said
    said = " ".join(said.split())
    assert re.search(r"worker 1 of 'trainer' \(pid \d+, node [^)]*\) died in 'update': it was killed", said)
    assert "about to be killed" in said  # the end of its log
    assert "restarting the run" in said
    assert run.steps() == list(range(len(run.steps())))
    gone(processes, folders)


@pytest.mark.long
def test_ctrl_c_within_an_update_saves_that_step_and_another_number_of_workers_goes_on(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        run.reach(1)
        processes = family(run.process.pid)
        folders = folders_of(processes)
        run.meet("wait_1")
        run.process.send_signal(signal.SIGINT)
        code, said, errors = run.end()
    assert code == 130, (said, errors)
    assert not errors
    done = run.steps()[-1]
    assert f"The checkpoint of step {done} is saved in" in " ".join(said.split())
    gone(processes, folders)
    os.environ[FATES] = str(tmp_path)
    assert main.run(["train", "--resume", str(run.path), f"train.steps={done + 1}", "cluster.workers=1"]) == 0
    assert run.steps() == list(range(done + 2))


@pytest.mark.long
def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        run.reach(2)
        processes = family(run.process.pid)
        folders = folders_of(processes)
        run.meet("wait_0")
        run.process.kill()
        run.end()
    gone(processes, folders)
    assert list(run.path.glob("checkpoints/step_*/config.json"))
