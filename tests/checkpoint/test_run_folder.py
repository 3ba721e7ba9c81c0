import fcntl
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import __version__
from agentrl.checkpoint.run_folder import FolderLock, RunFolder
from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.training.run import changes


def test_every_run_gets_the_next_number(tmp_path: Path) -> None:
    names = [RunFolder.create(None, "job", tmp_path / "runs").path.name for _ in range(3)]
    assert names == ["job-001", "job-002", "job-003"]
    (tmp_path / "runs" / "job-041").mkdir()
    (tmp_path / "runs" / "job-other").mkdir()
    assert RunFolder.create(None, "job", tmp_path / "runs").path.name == "job-042"


def test_a_named_folder_is_used_as_it_is_and_refused_when_it_holds_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path / "mine"), "job")
    assert folder.path == tmp_path / "mine"
    folder.write_recipe("{}")
    with pytest.raises(UserError, match=r"already holds a run.*--resume"):
        RunFolder.create(str(tmp_path / "mine"), "job")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        RunFolder.create(str(tmp_path / "file"), "job")


def test_resuming_where_no_run_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run there"):
        RunFolder.existing(str(tmp_path))


def test_the_recipe_says_the_format_of_the_folder_and_a_later_one_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_recipe("{}\n")
    head, _, rest = folder.recipe().read_text().partition("\n")
    assert head == f"# run folder of format 2, written by agentrl {__version__}"
    assert rest == "{}\n"
    (tmp_path / "recipe.yaml").write_text("{}\n")  # as 0.1.0 wrote it
    assert folder.recipe() == tmp_path / "recipe.yaml"
    (tmp_path / "recipe.yaml").write_text("# run folder of format 3, written by agentrl 9.9\n{}\n")
    with pytest.raises(UserError, match=r"a later agentrl wrote this run \(format 3; .* reads up to 2\)"):
        folder.recipe()


def test_one_process_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    with pytest.raises(UserError, match=rf"process {os.getpid()} on .* trains in this folder"):
        FolderLock(tmp_path)
    held.release()
    assert not list(tmp_path.iterdir())
    killed = "import os; from pathlib import Path; from agentrl.checkpoint.run_folder import FolderLock as L\n"
    killed += f"lock = L(Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]
    FolderLock(tmp_path).release()


def test_a_lock_whose_file_went_away_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder releases between another's opening and locking of the same file: a third must still be refused."""
    taken, lock = [], fcntl.flock

    def late(handle: int, how: int) -> None:
        lock(handle, how)
        if not taken:
            (tmp_path / ".lock").unlink()
        taken.append(handle)

    monkeypatch.setattr(fcntl, "flock", late)
    held = FolderLock(tmp_path)
    assert len(taken) == 2
    with pytest.raises(UserError, match="trains in this folder"):
        FolderLock(tmp_path)
    held.release()


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"output: .* cannot be written to"):
        RunFolder.check_free(str(tmp_path / "new"))


def test_what_a_resumed_run_does_otherwise_is_said(tmp_path: Path) -> None:
    began = Recipe.model_validate({"train": {"steps": 3}, "rewards": {"weights": {"answer": 2.0}}, "output": "there"})
    former = tmp_path / "recipe.yaml"
    former.write_text(dump_recipe(began))
    assert changes(former, began) is None
    now = Recipe.model_validate({"train": {"steps": 5}, "env": {"name": "code"}, "output": "here"})
    assert changes(former, now) == (
        "changed since the run began: env.name gsm8k -> code, rewards.weights.answer 2.0 -> none, train.steps 3 -> 5"
    )
    former.write_text("nothing: known")
    assert str(changes(former, now)).startswith(f"what changed since the run began is not known: {former}:1: nothing:")


def test_rewind_keeps_the_steps_up_to_the_checkpoint_and_drops_a_cut_line(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path / "mine"), "job")
    for step in range(5):
        folder.append_metrics({"step": step})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    kept = {
        "step_1.jsonl",
        "step_3.parquet",
        "eval_a_b_0.jsonl.zst",
        "eval_test_3.parquet",
        "notes_9.txt",
        "step_x.jsonl",
    }
    gone = {"step_4.parquet", "step_12.jsonl.zst", "eval_a_b_4.parquet", "in_flight.jsonl", ".step_3.parquet.new"}
    for name in kept | gone:
        (folder.trajectories / name).write_text("")
    (folder.trajectories / "step_5.parquet").mkdir()  # nothing of ours
    folder.rewind(3)
    assert {path.name for path in folder.trajectories.iterdir()} == kept | {"step_5.parquet"}
    folder.append_metrics({"step": 4})
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2, 3, 4]


def test_what_is_not_finite_is_named_in_the_line_and_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    bad = folder.append_metrics({"step": 1, "train/loss": math.nan, "a": 1.5, "b": -math.inf, "c": "NaN"})
    assert bad == ["train/loss", "b"]
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "a": 1.5, "c": "NaN", "not_finite": ["train/loss", "b"]}\n'
    )
    assert folder.append_metrics({"step": 2}) == []
    folder.rewind(1)
    assert [row["step"] for row in folder.metrics()] == [1]
