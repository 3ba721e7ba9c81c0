"""Whole runs that sample while they train: no task lost or played twice, staleness bounded, stopped and resumed."""

import functools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_help import NOISY, metrics, numbers, records, small

import agentrl
from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.offline.rescore import rescore
from agentrl.recipe.schema import Recipe
from agentrl.training.run import TrainResult, resume_run

STEPS = 5


def job(output: Path, overlap: str, **changes: Any) -> Recipe:
    steps = {"steps": STEPS, "lr": 1e-3, "save_every": 0, "threads": 1}
    return small(output, **{"train": steps, "rollout__overlap": overlap, **changes})


def tasks(result: TrainResult) -> Counter[str]:
    """How often each task was part of a step, in samples."""
    paths = (result.folder / "trajectories").glob("step_*")
    return Counter(
        t["task"]
        for path in paths
        for t in records(result.folder, path.stem)
        if t["left_out"] not in ("filtered", "surplus")
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainResult]:
    """The run of an overlap that nothing stops; each is trained once."""
    return functools.cache(lambda overlap: agentrl.train(job(tmp_path_factory.mktemp(overlap) / "run", overlap)))


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "oldest"), [("one_step", 1), ("async", 2)])
def test_a_run_trains_on_every_task_once_and_on_none_too_old(
    whole: Callable[[str], TrainResult], overlap: str, oldest: int
) -> None:
    result = whole(overlap)
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
    changes = {"train": {"steps": 3, "lr": 1e-3, "save_every": 0, "threads": 1}, "eval__every": 2}
    first, second = (agentrl.train(job(tmp_path / name, "one_step", **changes)) for name in "ab")
    for ours, theirs in zip(metrics(first.folder), metrics(second.folder), strict=True):
        for key in ("reward/mean", "rollout/tokens", "train/loss", "eval/test/accuracy", "rollout/staleness_max"):
            assert ours.get(key, -1) == pytest.approx(theirs.get(key, -1), rel=1e-3, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [pytest.param("one_step", marks=pytest.mark.long), "async"])
def test_a_stopped_run_goes_on_with_the_tasks_that_were_in_flight(
    tmp_path: Path, whole: Callable[[str], TrainResult], overlap: str
) -> None:
    trackers = {"track__trackers": ["train_plugins:StopsAfterThree"]}
    stopped = agentrl.train(job(tmp_path / "run", overlap, **trackers))
    assert stopped.interrupted
    assert stopped.steps == 3
    result = resume_run(str(stopped.folder), overrides=["track.trackers=[]"])
    assert result.steps == STEPS
    assert [row["step"] for row in metrics(result.folder)] == list(range(STEPS + 1))
    assert set(tasks(result).values()) == {4}
    assert len(tasks(result)) == 2 * STEPS
    assert tasks(result) == tasks(whole(overlap))


DYNAMIC: dict[str, Any] = {
    "env": {"name": "train_plugins:Half"}, "tools": [], "algorithm": {"dynamic_sampling": {"budget": 4}},
    "rollout__max_turns": 1, "rollout__max_turn_tokens": 16,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.long), "one_step"])
def test_dynamic_sampling_trains_on_groups_that_differ_and_is_resumed(
    tmp_path: Path, overlap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"steps": 4, "lr": 1e-5, "save_every": 1, "keep": 9, "threads": 1}
    whole = agentrl.train(job(tmp_path / "whole", overlap, **DYNAMIC, train=steps, eval__splits=[]))
    rows = metrics(whole.folder)[1:]
    for row in rows:
        assert row["groups/kept"] == row["groups/varied"] == 2
        assert row["groups/left_out"] == row["groups/equal"]
        assert (0 < row["rollout/left_out_tokens"] < row["rollout/tokens"]) is (row["groups/left_out"] > 0)
        assert row["train/samples"] == 8
    assert 9 <= sum(row["groups/left_out"] for row in rows) <= 12  # four epochs of five tasks, of which two differ
    assert f"2 of {2 + rows[0]['groups/left_out']} groups kept" in capsys.readouterr().out
    assert set(tasks(whole)) == {"train-1", "train-3"}
    assert not list((whole.folder / "trajectories").glob("in_flight*"))
    for step, row in enumerate(rows, 1):
        reasons = [one["left_out"] for one in records(whole.folder, f"step_{step}")]
        assert reasons == [None] * 8 + ["filtered"] * 4 * row["groups/left_out"]
    if overlap == "none":
        same = rescore(whole.folder, output=str(tmp_path / "same")).folder  # what the filter left out stays out
        again = agentrl.train(
            job(tmp_path / "again", overlap, **DYNAMIC, train=steps, eval__splits=[]), stored=[str(same)]
        )
        for ours, theirs in zip(metrics(again.folder)[1:], rows, strict=True):
            assert (ours["train/loss"], ours["train/samples"]) == (theirs["train/loss"], 8)
    for later in (3, 4):
        shutil.rmtree(whole.folder / "checkpoints" / f"step_{later}")
    resumed = resume_run(str(whole.folder))
    for ours, theirs in zip(metrics(resumed.folder)[1:], rows, strict=True):
        wanted, found = numbers(theirs), numbers(ours)
        keys = wanted if overlap == "none" else {"groups/kept", "groups/left_out", "reward/mean", "reward/std"}
        wanted = {key: wanted[key] for key in keys}
        assert {key: found[key] for key in keys} == pytest.approx(wanted, rel=1e-3, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "async"])
def test_a_step_without_a_group_that_differs_updates_nothing_and_says_so(
    tmp_path: Path, overlap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**DYNAMIC, "env": {"name": "train_plugins:Flat"}, "algorithm": {"dynamic_sampling": {"budget": 1.5}}}
    result = agentrl.train(job(tmp_path / "run", overlap, **changes, train__steps=2, eval__splits=[]))
    said = capsys.readouterr().out
    assert "step 1: dynamic sampling found 0 groups of 2 among" in said
    rows = metrics(result.folder)[1:]
    assert [(row["groups/kept"], row["train/samples"], row["train/updates"]) for row in rows] == [(0, 0, 0)] * 2


@pytest.mark.slow
def test_a_curriculum_over_filtered_tasks_for_some_epochs_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"order": {"name": "curriculum", "args": {"rest": 0.3}}, "filter": "train_plugins:first_eight", "epochs": 1}
    steps = {"steps": 50, "lr": 1e-5, "save_every": 1, "keep": 9, "threads": 1}
    few = {"env": {"name": "train_plugins:Few"}, "algorithm": {}}
    changes = {**DYNAMIC, **few, "data": data, "train": steps, "eval__splits": []}
    whole = agentrl.train(job(tmp_path / "whole", "none", **changes))
    said = capsys.readouterr().out
    assert "data.filter 'train_plugins:first_eight' keeps 8 of 12" in said
    assert "data.epochs 1: 4 steps of 2 of 8 tasks" in said
    rows = metrics(whole.folder)[1:]
    assert len(rows) == 4
    assert {int(name.removeprefix("train-")) for name in tasks(whole)} <= set(range(8))
    saved = Checkpoints(whole.folder / "checkpoints", 9).latest()
    assert saved is not None
    assert set(saved.extra["sampler"]["order"]["rates"].values()) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    drawn = tasks(whole)
    for later in (3, 4):
        shutil.rmtree(whole.folder / "checkpoints" / f"step_{later}")
    resumed = resume_run(str(whole.folder))
    assert tasks(resumed) == drawn
    for ours, theirs in zip(metrics(resumed.folder)[1:], rows, strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-3, abs=2e-5)


@pytest.mark.slow
def test_tasks_that_were_abandoned_come_with_the_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        **DYNAMIC, "env": {"name": NOISY}, "algorithm": {}, "rollout__oversample": 2.0, "rollout__max_tokens": 5000,
        "eval__before": False, "eval__tasks": 1,
    }  # fmt: skip
    result = agentrl.train(job(tmp_path / "run", "none", **changes))
    assert (result.before, set(result.after)) == ({}, {"test"})
    said = capsys.readouterr().out
    assert "rollout.max_tokens 5000 is more than the model's context: conversations end at 1024 tokens" in said
    first, *rows = metrics(result.folder)
    assert "eval/test/accuracy" not in first
    assert all(row["groups/kept"] == 2 and row["groups/abandoned"] in (0, 1, 2) for row in rows)
    played = tasks(result)
    assert set(played.values()) == {4}
    saved = Checkpoints(result.folder / "checkpoints", 2).latest()
    assert saved is not None
    drawn = saved.extra["sampler"]["position"]
    assert drawn == len(played) + len(saved.extra["sampler"].get("outstanding", []))


@pytest.mark.slow
def test_an_engine_that_sleeps_while_the_trainer_works_gives_the_same_run(tmp_path: Path) -> None:
    asleep, awake = (
        agentrl.train(small(tmp_path / str(sleep), engine={"sleep": sleep}, train__steps=2, eval__splits=[]))
        for sleep in (True, False)
    )
    for ours, theirs in zip(metrics(asleep.folder)[1:], metrics(awake.folder)[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-3)
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3, abs=1e-5)


def test_sleep_and_overlap_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"engine\.sleep stops sampling"):
        small(None, engine={"sleep": True}, rollout__overlap="async")
