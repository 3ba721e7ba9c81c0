"""Trajectories on disk: which steps, how many tasks of each, and how many files stay."""

from pathlib import Path

import pytest
from learner_help import make_groups

from agentrl.recipe.schema import Recipe, TrackSection
from agentrl.rollout.journal import Journal, read_journal

GROUPS = make_groups([[1, 0], [0, 1], [0, 0], [1, 1], [1, 0]])


def journal(folder: Path, **policy: int) -> Journal:
    recipe = Recipe(track=TrackSection.model_validate({"trajectories": policy}))
    return Journal(recipe.track.trajectories, lambda: folder)


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name))


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ({}, range(1, 13)),
        ({"every": 0}, ()),
        ({"every": 5}, (5, 10)),
        ({"keep": 3}, (10, 11, 12)),
        ({"keep": 2, "every": 4}, (8, 12)),
        ({"keep": 0}, range(1, 13)),
    ],
)
def test_which_steps_are_kept(policy: dict[str, int], steps: list[int], tmp_path: Path) -> None:
    written = journal(tmp_path, **policy)
    for step in range(1, 13):
        written.step(step, GROUPS)
    assert names(tmp_path) == [f"step_{step}.jsonl" for step in steps]


def test_old_files_of_a_resumed_run_go_too_and_others_stay(tmp_path: Path) -> None:
    for name in ("step_1.jsonl", "step_2.jsonl.zst", "step_mine.jsonl", "notes.txt", "eval_step_1.jsonl"):
        (tmp_path / name).write_text("")
    journal(tmp_path, keep=1).step(3, GROUPS)
    assert names(tmp_path) == ["notes.txt", "step_3.jsonl", "step_mine.jsonl", "eval_step_1.jsonl"]


def test_the_first_evaluation_of_a_split_stays(tmp_path: Path) -> None:
    written = journal(tmp_path, keep=2)
    for step in (0, 20, 40, 60, 80):
        for split in ("test", "test_2", "a.[x]"):
            written.evaluation(split, step, GROUPS, lambda trajectory: True)
    kept = {
        name for split in ("test", "test_2", "a.[x]") for name in (f"eval_{split}_{step}.jsonl" for step in (0, 60, 80))
    }
    assert set(names(tmp_path)) == kept


@pytest.mark.parametrize(("sample", "tasks"), [(0, 5), (2, 2), (5, 5), (9, 5)])
def test_how_many_tasks_of_a_step_are_written(sample: int, tasks: int, tmp_path: Path) -> None:
    written = journal(tmp_path, sample=sample)
    written.step(1, GROUPS)
    written.step(2, [])
    assert len(read_journal(tmp_path / "step_1.jsonl")) == 2 * tasks
    assert read_journal(tmp_path / "step_2.jsonl") == []
    written.evaluation("test", 0, GROUPS, lambda trajectory: True)
    assert len(read_journal(tmp_path / "eval_test_0.jsonl")) == 10


def test_a_switch_is_short_for_every_step_or_none() -> None:
    off, on = (TrackSection.model_validate({"trajectories": switch}).trajectories for switch in (False, True))
    assert (off.every, on.every) == (0, 1)
