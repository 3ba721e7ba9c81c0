"""Whole runs that sample while they train: no task lost or played twice, staleness bounded, stopped and resumed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from train_help import metrics, records, small

import agentrl
from agentrl.recipe.schema import Recipe
from agentrl.training.run import TrainResult, resume_run

STEPS = 5


def job(output: Path, overlap: str, **changes: Any) -> Recipe:
    steps = {"steps": STEPS, "lr": 1e-3, "save_every": 0, "threads": 1}
    return small(output, **{"train": steps, "rollout__overlap": overlap, **changes})


def tasks(result: TrainResult) -> Counter[str]:
    """How often each task was trained on, in samples."""
    paths = (result.folder / "trajectories").glob("step_*")
    return Counter(t["task"] for path in paths for t in records(result.folder, path.stem))


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "oldest"), [("one_step", 1), ("async", 2)])
def test_a_run_trains_on_every_task_once_and_on_none_too_old(tmp_path: Path, overlap: str, oldest: int) -> None:
    result = agentrl.train(job(tmp_path / "run", overlap))
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert max(row["rollout/staleness_max"] for row in rows[1:]) == oldest
    assert rows[1]["rollout/staleness_max"] == 0
    assert set(tasks(result).values()) == {4}
    assert len(tasks(result)) == 2 * STEPS
    assert rows[1]["mismatch/logprob_max"] < 1e-3  # the first batch came from the weights that it trains
    assert rows[-1]["mismatch/logprob_mean"] > 1e-4  # later ones did not
    assert all(row["train/updates"] == 1 for row in rows[1:])


@pytest.mark.slow
def test_one_step_off_gives_the_same_run_twice(tmp_path: Path) -> None:
    first, second = (agentrl.train(job(tmp_path / name, "one_step", eval__every=2)) for name in "ab")
    for ours, theirs in zip(metrics(first.folder), metrics(second.folder), strict=True):
        for key in ("reward/mean", "rollout/tokens", "train/loss", "eval/test/accuracy", "rollout/staleness_max"):
            assert ours.get(key, -1) == pytest.approx(theirs.get(key, -1), rel=1e-3, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["one_step", "async"])
def test_a_stopped_run_goes_on_with_the_tasks_that_were_in_flight(tmp_path: Path, overlap: str) -> None:
    trackers = {"track__trackers": ["train_plugins:StopsAfterThree"]}
    stopped = agentrl.train(job(tmp_path / "run", overlap, **trackers))
    assert stopped.interrupted
    assert stopped.steps == 3
    result = resume_run(str(stopped.folder), overrides=["track.trackers=[]"])
    assert result.steps == STEPS
    assert [row["step"] for row in metrics(result.folder)] == list(range(STEPS + 1))
    assert set(tasks(result).values()) == {4}
    assert len(tasks(result)) == 2 * STEPS
    whole = agentrl.train(job(tmp_path / "whole", overlap))
    assert tasks(result) == tasks(whole)


@pytest.mark.slow
def test_an_engine_that_sleeps_while_the_trainer_works_gives_the_same_run(tmp_path: Path) -> None:
    asleep, awake = (
        agentrl.train(small(tmp_path / str(sleep), engine={"sleep": sleep}, eval__splits=[])) for sleep in (True, False)
    )
    for ours, theirs in zip(metrics(asleep.folder)[1:], metrics(awake.folder)[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-3)
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3, abs=1e-5)


def test_sleep_and_overlap_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"engine\.sleep stops sampling"):
        small(None, engine={"sleep": True}, rollout__overlap="async")
