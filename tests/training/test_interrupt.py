"""Ctrl-C in a process of its own: once ends the run in good order, twice ends it at once."""

import io
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from train_help import metrics, records, small
from warm import Python

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe
from agentrl.training.display import Display

pytestmark = pytest.mark.slow

PATIENCE = 120.0  # seconds until a test gives up; no test asserts a time


def start(folder: Path, first: str = "", apart: bool = False, **changes: object) -> Python:
    """`agentrl train` on a run of 500 steps in `folder`/run, in a process that does `first` before it."""
    recipe = folder / "job.yaml"
    recipe.write_text(dump_recipe(small(folder / "run", **{"train__steps": 500, "eval__splits": [], **changes})))
    code = f"{first}\nimport sys\nfrom agentrl.cli.main import main\nsys.argv[1:] = ['train', {str(recipe)!r}]\nmain()"
    return Python(["-c", code], env={**os.environ, "AGENTRL_TEST_MARK": str(folder / "mark")}, apart=apart)


def wait_for(process: Python, what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        if process.poll() is not None:
            raise AssertionError(f"it ended by itself: {process.communicate()[0]}")
        assert time.monotonic() < until
        time.sleep(0.05)


def pending(pid: int, number: int) -> bool:
    """Whether a signal waits to be delivered to a process."""
    masks = re.findall(r"^S[ih][gd]Pnd:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_ctrl_c_in_mid_run_saves_the_last_whole_step_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(tmp_path)
    try:
        wait_for(process, lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) > 2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, said
    done = metrics(folder)[-1]["step"]
    line = f"Interrupted. The checkpoint of step {done} is saved in {folder}/checkpoints/step_{done}; go on with: "
    assert said.rstrip().splitlines()[-1] == f"{line}agentrl train --resume {folder}"
    assert "Traceback" not in said

    assert main.run(["train", "--resume", str(folder), f"train.steps={done + 1}"]) == 0
    assert [row["step"] for row in metrics(folder)] == list(range(done + 2))


def test_ctrl_c_twice_ends_at_once_even_when_a_tool_holds_the_event_loop(tmp_path: Path) -> None:
    process = start(tmp_path, tools=["train_plugins:Blocking"])
    try:
        wait_for(process, (tmp_path / "mark").exists)
        process.send_signal(signal.SIGINT)
        wait_for(process, lambda: not pending(process.pid, signal.SIGINT))  # two that wait would count as one
        until = time.monotonic() + PATIENCE  # the tool sleeps for much longer
        while process.poll() is None and time.monotonic() < until:
            process.send_signal(signal.SIGINT)  # one that comes before Python has seen the first counts as that one
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
    finally:
        process.kill()
    assert process.returncode == 130


def test_a_reader_that_goes_away_ends_the_run_in_one_line_with_the_last_whole_step_saved(tmp_path: Path) -> None:
    """As `agentrl train ... | head` does."""
    folder, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    opens = f"import os\nos.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1)"
    process = start(tmp_path, opens, apart=True)
    try:
        with pipe.open() as progress:
            assert any(line.startswith("step ") for line in progress)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 2, said
    done = metrics(folder)[-1]["step"]
    told = f"step {done} is saved, go on with: agentrl train --resume {folder}"
    assert said == f"error: stdout was closed, so nobody sees the progress of the run; {told}\n"
    assert (folder / "checkpoints" / f"step_{done}" / "model.safetensors").exists()
    kept = [bool(records(folder, f"step_{step}")) for step in range(1, done + 1)]
    assert all(kept), "the step whose line nobody read has its row, and its trajectories"


def test_a_stdout_that_a_plugin_closed_is_told_as_one_without_a_reader() -> None:
    file = io.StringIO()
    display = Display(3, "run", Console(file=file))
    display.note("seen")
    file.close()
    display.note("unseen")
    with pytest.raises(UserError, match=r"^stdout was closed, so nobody sees the progress of the run$"):
        display.check()
    display.note("nobody is told again")
    display.check()


@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_terminal_that_closes_leaves_the_last_whole_step_saved(tmp_path: Path, ignored: bool) -> None:
    """Under `nohup`, which ignores the signal, the run goes on."""
    folder = tmp_path / "run"
    ignoring = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = start(tmp_path, ignoring, train__steps=6) if ignored else start(tmp_path)
    try:
        wait_for(process, lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) > 2)
        process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == (0 if ignored else 130), said
    done = metrics(folder)[-1]["step"]
    assert (done == 6) is ignored
    assert (folder / "checkpoints" / f"step_{done}" / "model.safetensors").exists()


def test_a_run_that_is_done_ends_although_a_plugin_left_threads_and_tasks_that_hang(tmp_path: Path) -> None:
    hasty = "from agentrl.containment import event_loop\nevent_loop.GRACE = 0.2"
    process = start(tmp_path, hasty, env__name="train_plugins:LeavesThreads", train__steps=1)
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "agentrl: exited while a plugin's thread was still running (forever)" in said
    assert (tmp_path / "run" / "checkpoints" / "step_1" / "config.json").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


STUCK = [("compute", 2), ("sleep", 2), ("deaf", 2), ("hold", -9)]


@pytest.mark.parametrize(
    ("how", "code"),
    [pytest.param(how, code, id=how, marks=[pytest.mark.long] * (how != "hold")) for how, code in STUCK],
)
def test_a_plugin_that_holds_up_every_request_ends_the_run_saved(
    how: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_TEST_STUCK", how)
    folder, hasty = tmp_path / "run", "from agentrl.containment import watchdog\nwatchdog.LET_GO = 0.5"
    keys = {"tools": ["train_plugins:Stuck"], "rollout__stuck_timeout": 1.0, "train__save_every": int(how == "hold")}
    process = start(tmp_path, hasty, **keys)
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, said
    done = metrics(folder)[-1]["step"]
    if how == "hold":  # it also holds the thread that writes a checkpoint
        done = max(int(path.name.partition("_")[2]) for path in (folder / "checkpoints").glob("step_*"))
    line = r"no request has gone on for 1 s \(rollout.stuck_timeout\), held up by \w+ \(train_plugins.py:\d+\).*; "
    saved = f"step {done} is saved, go on with: agentrl train --resume {folder}"
    assert re.fullmatch(f"error: {line}{re.escape(saved)}", said.rstrip().splitlines()[-1])
    assert "Traceback" not in said
    assert (folder / "trajectories" / f"step_{done}.parquet").is_file()
    if how == "deaf":  # saved by another thread
        assert main.run(["train", "--resume", str(folder), f"train.steps={done + 1}"]) == 0
        assert [row["step"] for row in metrics(folder)] == list(range(done + 2))


class Hasty(Display):
    """Presses Ctrl-C while the model is being loaded."""

    def phase(self, name: str) -> None:
        super().phase(name)
        if name == "loading":
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_before_the_first_step_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        agentrl.train(small(tmp_path / "run"), display=Hasty(3, "job"))
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_the_main_thread_a_run_needs_no_signals(tmp_path: Path) -> None:
    """A notebook's server and a test runner's worker have no main thread to give."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(agentrl.train, small(tmp_path / "run", train__steps=1, eval__splits=[])).result()
    assert result.steps == 1


@pytest.mark.parametrize("presses", ["StopsAfterThree", "StopsItsThread"])
async def test_ctrl_c_reaches_a_run_that_a_notebook_started(tmp_path: Path, presses: str) -> None:
    """There the run has a thread of its own, and the one that waits for it handles the signal, whichever gets it."""
    recipe = small(tmp_path / "run", train__steps=9, eval__splits=[], track__trackers=[f"train_plugins:{presses}"])
    result = agentrl.train(recipe)
    assert result.interrupted
    assert 3 <= result.steps < 9
    assert result.checkpoint.name == f"step_{result.steps}"
