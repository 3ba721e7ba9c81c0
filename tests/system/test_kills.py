"""A run that is killed at random moments and resumed each time is the run that nobody disturbed."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_help import metrics, small, steady

from agentrl.recipe.load import dump_recipe

KILLS = 20
STEPS = 16


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.main", "train", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finished(process: "subprocess.Popen[bytes]") -> None:
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said.decode()


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "checkpoints" / f"step_{STEPS}" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long
def test_a_run_killed_twenty_times_is_the_undisturbed_run(tmp_path: Path) -> None:
    # Without tools every sample is in the engine's batches together, so that they do not depend on the clock.
    keys = {"train__steps": STEPS, "train__save_every": 1, "eval__splits": [], "tools": [], "rollout__max_turns": 1}
    folders = [tmp_path / "undisturbed", tmp_path / "killed"]
    for folder in folders:
        folder.with_suffix(".yaml").write_text(dump_recipe(small(folder, **keys)))
    began = time.monotonic()
    finished(start(str(folders[0].with_suffix(".yaml"))))
    whole = time.monotonic() - began

    rng, kills = random.Random(0), 0
    while kills < KILLS:
        if (folders[1] / "checkpoints" / f"step_{STEPS}").is_dir():  # done, or killed after its last checkpoint
            compare(*folders)
            subprocess.run(["rm", "-rf", str(folders[1])], check=True)
        process = start(*going_on(folders[1]))
        try:
            process.wait(timeout=rng.uniform(0.1, whole))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
        else:  # it was done before it could be killed: compare, begin anew, and go on counting
            assert process.returncode == 0, process.communicate()[0].decode()
    if not (folders[1] / "checkpoints" / f"step_{STEPS}").is_dir():
        finished(start(*going_on(folders[1])))
    compare(*folders)


def going_on(folder: Path) -> list[str]:
    """The arguments that resume the run; one that was killed before its first checkpoint is begun anew."""
    if any((folder / "checkpoints").glob("step_*")):
        return ["--resume", str(folder)]
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    return [str(folder.with_suffix(".yaml"))]


def compare(undisturbed: Path, killed: Path) -> None:
    assert [steady(row) for row in metrics(killed)] == [steady(row) for row in metrics(undisturbed)]
    assert weights(killed) == weights(undisturbed)
