"""Sweeps: what is tried, what is dropped and why, and real small runs that are killed and gone on with."""

import csv
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cli_help import refused
from evaluation_help import stored
from rich.console import Console
from train_help import small

from agentrl.cli import main
from agentrl.cli.sweep import _table
from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.training.axes import Range, split_keys
from agentrl.training.proposals import Proposals
from agentrl.training.sweep import Plan, Sweep, deadline, plan
from agentrl.training.trials import Processes, Trial


def test_values_and_ranges_are_told_apart() -> None:
    values = ["train.lr=1e-4, 3e-4", "train.steps=50", "eval.rollout={temperature: 0, top_k: 1},{}", "a.b=[1,2]"]
    fixed, axes = split_keys([*values, "c='x,y'", "d=1e-5..1e-3", "e=1..8", "f=-1..1.5"])
    assert fixed == ["train.steps=50", "a.b=[1,2]", "c='x,y'"]
    assert axes == {
        "train.lr": ("1e-4", "3e-4"),
        "eval.rollout": ("{temperature: 0, top_k: 1}", "{}"),
        "d": Range(1e-5, 1e-3, False),
        "e": Range(1, 8, True),
        "f": Range(-1, 1.5, False),
    }
    rng = random.Random(1)
    drawn = [float(Range(1e-5, 1e-3, False).drawn(rng)) for _ in range(400)]
    assert 1e-5 <= min(drawn) <= max(drawn) <= 1e-3
    assert 0.4 < sum(value < 1e-4 for value in drawn) / 400 < 0.6  # by the logarithm
    assert {Range(1, 3, True).drawn(rng) for _ in range(100)} == {"1", "2", "3"}


@pytest.mark.parametrize("text", ["train.lr", "=1,2", "a=1,,2", "a=1,1", "a=3..1", "a=1..x"])
def test_what_is_no_axis_is_refused_or_a_value(text: str) -> None:
    if text == "a=1..x":
        assert split_keys([text]) == ([text], {})
        return
    with pytest.raises(UserError):
        split_keys([text])


def test_a_grid_crosses_seeds_and_random_draws_are_the_same_again(tmp_path: Path) -> None:
    axes = split_keys(["train.lr=1e-4,3e-4", "rollout.n=4,8", "train.seed=0,1,2"])[1]
    made = plan(small(), axes, 0, 0, ())
    assert made.configurations == [["1e-4", "4"], ["1e-4", "8"], ["3e-4", "4"], ["3e-4", "8"]]
    trials = made.trials(tmp_path, 1)
    assert [trial.keys for trial in trials] == [
        ("train.lr=1e-4", "rollout.n=8", f"train.seed={seed}") for seed in range(3)
    ]
    assert trials[2].folder == tmp_path / "trials/002-lr=1e-4-n=8-seed=2"
    drawn = plan(small(), split_keys(["train.lr=1e-5..1e-2", "rollout.n=4,8"])[1], 5, 0, ())
    assert drawn == plan(small(), split_keys(["train.lr=1e-5..1e-2", "rollout.n=4,8"])[1], 5, 0, ())
    assert len(drawn.configurations) == 5
    assert len(plan(small(), split_keys(["rollout.n=4,8"])[1], 5, 0, ()).configurations) == 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "sweep needs a recipe"),
        (["base.yaml"], "a sweep needs a key with several values"),
        (["base.yaml", "train.lr=1e-5..1e-3"], "train.lr: a range has no end of values"),
        (["base.yaml", "train.seed=0..5"], "train.seed: name seeds one by one"),
        (["base.yaml", "train.lr=1e-5,abc"], "train.lr: expected a number"),
        (["base.yaml", "train.lr=1,2", "eval.splits=[]"], "eval.splits=[]: a sweep compares what runs come to"),
        (["base.yaml", "train.lr=1,2", "--halve", "3"], "--halve: expected steps from 1 to 2"),
        (["base.yaml", "train.lr=1,2", "--halve", "x"], "--halve x: expected steps"),
        (["base.yaml", "train.lr=1,2", "train.schedule=cosine", "--halve", "1"], "set train.schedule=constant"),
        (["base.yaml", "train.lr=1,2", "--budget", "1d"], "--budget 1d: expected a time"),
        (["base.yaml", "train.lr=1,2", "--output", "full"], "--output full: is not empty"),
        (["--resume", "full"], "--resume full: no sweep there"),
        (["--resume", "full", "train.lr=1,2"], "--resume goes on with the sweep as it was begun"),
    ],
)
def test_what_is_no_sweep_is_one_line_and_leaves_nothing(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(dump_recipe(small()))
    Path("full").mkdir()
    Path("full/x").touch()
    assert words in refused(capsys, "sweep", *arguments)
    assert [path for path in Path().rglob("*") if path.name == "sweep.json"] == []
    assert not list(Path("sweeps").glob("*"))


def test_a_budget_is_a_time_or_steps() -> None:
    assert deadline("20steps")[1] == 20
    assert deadline(None) == (float("inf"), None)
    assert deadline("2h")[0] - time.monotonic() == pytest.approx(7200, abs=60)


BOUNDS = ("low", -0.1), ("high", 0.1)


def played(trial: Trial, solved: Sequence[Sequence[float]], step: int) -> None:
    """Leave what a run leaves that was trained up to a step."""
    stored(trial.folder, solved, step=step)
    (trial.folder / "recipe.yaml").write_text(dump_recipe(load_recipe(None, trial.keys)))
    (trial.folder / f"checkpoints/step_{step}").mkdir(parents=True)
    accuracy = float(np.mean(solved))
    row = {"step": step, "eval/test/accuracy": accuracy, "eval/test/reward/mean": accuracy}
    row |= {f"eval/test/{name}_{end}": accuracy + by for name in ("accuracy", "reward") for end, by in BOUNDS}
    (trial.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def swept(folder: Path, shares: Sequence[float], tasks: int = 80) -> tuple[Sweep, list[str]]:
    """A sweep whose configurations, of two seeds each, solve these shares of the tasks after step 10 of 20."""
    said: list[str] = []
    rates = [f"{1 + index}e-4" for index in range(len(shares))]
    made = Plan(["train.lr"], ["0", "1"], 20, [[rate] for rate in rates], halve=[10])
    folder.mkdir()
    (folder / "base.yaml").write_text(dump_recipe(load_recipe(None)))
    sweep = Sweep(folder, made, said.append)
    for index, share in enumerate(shares):
        for seed, trial in enumerate(made.trials(folder, index)):
            right = round(share * tasks) + seed
            played(trial, [[float(task < right)] for task in range(tasks)], 10)
    return sweep, said


def test_halving_drops_of_the_lower_half_what_is_told_apart(tmp_path: Path) -> None:
    sweep, said = swept(tmp_path / "sweep", [0.1, 0.7, 0.72, 0.69])
    machinery = Processes(tmp_path / "sweep/base.yaml", 1, (), said.append)
    assert not sweep.run(machinery, most_steps=80)  # nothing is left for the last steps
    assert sweep.plan.dropped.keys() == {"0"}
    assert "below train.lr=3e-4 on test after step 10 (one-sided p = " in sweep.plan.dropped["0"]
    assert any(line.startswith("kept: train.lr=4e-4") and "not told apart" in line for line in said)
    assert any("dropped in at most 5.0% of sweeps; this is about recipes" in line for line in said)
    again = Sweep.existing(tmp_path / "sweep", said.append)
    assert again.plan == sweep.plan
    assert not again.run(machinery, most_steps=80)  # a round is done once
    assert again.plan.alive == [1, 2, 3]
    with (tmp_path / "sweep/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["dropped"] * 2 + ["begun"] * 6
    assert [rows[2][f"test {name}"] for name in ("accuracy", "reward_low")] == ["0.7", str(0.7 - 0.1)]
    console = Console(width=300, file=io.StringIO())
    console.print(_table(again))
    said = console.file.getvalue()
    assert "70.0% (60.0% to 80.0%)" in said
    assert "0.700 (0.600 to 0.800)" in said
    assert "reward_low" not in said


def test_of_more_configurations_than_letters_the_best_are_compared_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, said = swept(tmp_path / "sweep", [0.1, 0.5, 0.2, 0.7, 0.4], tasks=10)
    sweep.plan.steps = 10
    monkeypatch.setattr("agentrl.training.sweep.LETTERS", "ABC")
    found = sweep.comparison()
    assert found is not None
    rates = [Path(side.members[0].folder).name.split("-seed")[0] for side in found.sides]
    assert rates == ["001-lr=1e-4", "002-lr=2e-4", "004-lr=4e-4"]
    assert said == ["5 configurations are done; the first is compared with the best 2 others"]


def test_what_was_trained_is_gone_on_with_and_never_removed(tmp_path: Path) -> None:
    trial = Trial(0, ("train.lr=1e-4",), tmp_path / "trials/001")
    played(trial, [[1.0]], 20)
    (trial.folder / "metrics.jsonl").write_text('{"step": 20, "reward/mean": 0.5}\n')  # stopped in its last evaluation
    assert not trial.done(20)
    resumed = ["train", "--resume", str(trial.folder), "train.steps=20"]
    assert trial.command(tmp_path / "base.yaml", 20, ()) == resumed
    saved = (trial.folder / "checkpoints/step_20").rename(trial.folder / "checkpoints/.step_20.old")
    assert trial.command(tmp_path / "base.yaml", 20, ()) == resumed  # killed as it was replaced
    saved.rename(trial.folder / "checkpoints/.step_20.part")
    assert "--resume" not in trial.command(tmp_path / "base.yaml", 20, ())
    assert not trial.folder.exists()


@pytest.mark.parametrize(
    ("shown", "count", "dealt"),
    [
        (None, 3, ["0,2", "1"]),
        (None, 1, ["0", "0"]),
        (None, 0, [None, None]),
        ("GPU-a,GPU-b", 4, ["GPU-a", "GPU-b"]),
        ("", 4, ["", ""]),
    ],
)
def test_runs_at_once_share_the_gpus(
    shown: str | None, count: int, dealt: list[str | None], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    def train(self: Processes, trials: Sequence[Trial], step: int) -> bool:
        found.extend(self._environment(slot).get("CUDA_VISIBLE_DEVICES") for slot in range(self.parallel))
        return True

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr(Processes, "train", train)
    Path("base.yaml").write_text(dump_recipe(small()))
    assert main.run(["sweep", "base.yaml", "train.lr=1e-4,3e-4", "--parallel", "2"]) == 1  # no run is done
    assert found == dealt
    assert main.run(["sweep", "base.yaml", "train.lr=1e-4,3e-4"]) == 1
    assert found[2:] == [shown]
    Path("base.yaml").write_text(dump_recipe(small(cluster__address="auto")))
    assert main.run(["sweep", "base.yaml", "train.lr=1e-4,3e-4", "--parallel", "2"]) == 1
    assert found[3:] == [shown, shown]


@pytest.mark.slow
def test_halving_drops_nothing_where_all_are_alike(tmp_path: Path) -> None:
    sweep, said = swept(tmp_path / "sweep", [0.5, 0.55, 0.52, 0.5])
    assert not sweep.run(Processes(tmp_path / "sweep/base.yaml", 1, (), said.append), most_steps=0)
    assert sweep.plan.dropped == {}
    assert sweep.comparison() is None  # none is done


class Played(Processes):
    """Runs that solve the more tasks the nearer train.lr is to 1e-3; none in a configuration of `failing`."""

    failing: tuple[int, ...] = ()

    def train(self, trials: Sequence[Trial], step: int) -> bool:
        for trial in trials:
            rate = float(dict(key.split("=") for key in trial.keys)["train.lr"])
            right = round(80 - 20 * abs(np.log10(rate) + 3))
            if trial.configuration not in self.failing:
                played(trial, [[float(task < right)] for task in range(80)], step)
        return True


@pytest.mark.slow
def test_optuna_is_told_what_its_proposals_come_to_and_repeats_none_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = split_keys(["train.lr=1e-6..1e-1", "rollout.n=4,8", "train.seed=0,1"])[1]
    made = plan(small(train__steps=20), axes, 0, 24, ())
    sweep = Sweep.new(tmp_path / "sweep", small(train__steps=20), made, lambda line: None)
    machinery = Played(tmp_path / "sweep/base.yaml", 3, (), lambda line: None)
    monkeypatch.setattr(Played, "failing", (1,))
    assert not sweep.run(machinery, most_steps=5 * 2 * 20 - 1)  # six configurations, one failed, but for one run
    assert len(sweep.plan.configurations) == 6
    again = Sweep.existing(tmp_path / "sweep", lambda line: None)
    assert again.plan == sweep.plan
    assert again.run(machinery)
    found = [float(rate) for rate, _ in again.plan.configurations]
    assert again.plan.configurations[:6] == sweep.plan.configurations
    assert len(found) == len(set(found)) == 24
    study = Proposals(again.folder, again.plan.axes)._study
    scores = [trial.value for trial in study.trials]
    assert scores[1] is None
    assert scores[2:] == [again.score(index, 20) for index in range(2, 24)]
    study.ask().suggest_float("train.lr", 1e-6, 1e-1, log=True)  # a kill in the midst
    with pytest.raises(UserError, match=r"proposal 25 is incomplete; start a new sweep"):
        Proposals(again.folder, again.plan.axes).known()


def whole(arguments: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "agentrl.cli.main", "sweep", *arguments]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=paths)
    )


@pytest.mark.slow
def test_runs_are_trained_at_once_and_compared(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(dump_recipe(small(train__steps=1)))
    said = whole(["base.yaml", "train.lr=1e-4,1e-3", "--parallel", "2", "--output", "sweep"], tmp_path).communicate()[0]
    assert "001-lr=1e-4: test " in said
    assert "test, B against A: The data cannot tell B from A" in said
    assert "agentrl compare sweep/trials --by train.lr" in said
    rows = list(csv.DictReader((tmp_path / "sweep/table.csv").open()))
    assert [(row["train.lr"], row["steps"], row["state"]) for row in rows] == [
        ("1e-4", "1", "done"),
        ("1e-3", "1", "done"),
    ]


@pytest.mark.ray
@pytest.mark.long
def test_runs_share_a_cluster(ray_address: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(dump_recipe(small(train__steps=1)))
    cluster = [f"cluster.address={ray_address}", "cluster.workers=1"]
    whole(["base.yaml", "train.lr=1e-4,1e-3", *cluster, "--parallel", "2", "--output", "sweep"], tmp_path).communicate()
    rows = list(csv.DictReader((tmp_path / "sweep/table.csv").open()))
    assert [row["state"] for row in rows] == ["done", "done"]
    for row in rows:
        assert "cluster: 1 workers" in (tmp_path / f"sweep/trials/{row['run']}.log").read_text()


@pytest.mark.long
def test_a_killed_sweep_goes_on_and_a_failed_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(dump_recipe(small(train__steps=40)))
    killed = whole(["base.yaml", "train.lr=1e-4,1e-3", "--parallel", "2", "--output", "sweep"], tmp_path)
    until = time.monotonic() + 300
    while sum(len(path.read_text().splitlines()) for path in tmp_path.glob("sweep/trials/*/metrics.jsonl")) < 6:
        assert time.monotonic() < until
        time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    while len(list(tmp_path.glob("sweep/trials/*/checkpoints/step_*"))) < 2:  # its runs save what they did
        assert time.monotonic() < until
        time.sleep(0.2)
    left = json.loads((tmp_path / "sweep/sweep.json").read_text())
    (tmp_path / "sweep/sweep.json").write_text(json.dumps(left | {"steps": 5 + max(steps(tmp_path))}))
    again = whole(["--resume", "sweep"], tmp_path)
    said = again.communicate()[0]
    assert again.returncode == 0
    assert said.count("goes on, up to step") == 2
    assert "test, B against A" in said


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in folder.glob("sweep/trials/*/checkpoints/step_*")]


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    said: list[str] = []
    trial = Trial(0, ("train.lr=-1",), tmp_path / "trials/001")
    (tmp_path / "base.yaml").write_text(dump_recipe(small()))
    assert Processes(tmp_path / "base.yaml", 1, (), said.append).train([trial], 3)
    assert "001: failed (exit code 2): error: " in said[-1]
    assert "train.lr" in said[-1]
