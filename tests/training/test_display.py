"""What a run says: its first lines, the line of a step, the time left."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train_help import small

import agentrl
from agentrl.eval.result import Accuracy, MeanReward
from agentrl.training import display as displays
from agentrl.training.display import Display

STEP = {"reward/mean": 0.5, "rollout/tokens_per_s": 1000.0, "time/step_s": 2.0}
GROUPS = {"groups/varied": 3, "groups/equal": 4, "groups/few": 1}
CALLS = {"tool/a/calls": 6, "tool/a/errors": 1, "tool/unknown/calls": 2, "tool/unknown/errors": 2, "tool/a/calls/x": 9}
KEPT = {"groups/kept": 2, "groups/left_out": 6, "groups/abandoned": 1}


def shown(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("metrics", "compares", "words"),
    [
        ({}, True, "reward 0.500  1,000 sampled"),
        (GROUPS, True, "reward 0.500  3 of 8 groups teach  1,000 sampled"),
        (GROUPS, False, "reward 0.500  1,000 sampled"),
        (GROUPS | CALLS, True, "3 of 8 groups teach  tool errors 38%  1,000"),
        (GROUPS | KEPT, True, "3 of 8 groups teach, 2 of 8 groups kept, 1 abandoned  1,000"),
        ({"tool/a/calls": 0, "tool/a/errors": 0}, True, "reward 0.500  1,000 sampled"),
    ],
)
def test_the_line_of_a_step(metrics: dict[str, Any], compares: bool, words: str) -> None:
    display = Display(3, "run", Console(file=io.StringIO(), width=200))
    display.compares = compares
    display.step(1, STEP | metrics)
    assert words in shown(display.console)


def test_mean_rewards_stand_in_the_last_table_where_they_are_not_the_accuracies() -> None:
    display = Display(3, "run", Console(file=io.StringIO(), width=200))
    before, after = Accuracy(0.1, 0.05, 0.2), Accuracy(0.5, 0.4, 0.6)
    means = [MeanReward(0.02, 0.01, 0.03), MeanReward(0.25, 0.2, 0.3), MeanReward(0.55, 0.5, 0.65)]
    rewards = {"test": means, "other": [None, MeanReward(*before), MeanReward(*after)]}
    rows = [("test", before, after), ("other", before, after)]
    display.final(rows, "runs/x", 1.0, rewards=rewards)
    display.final(rows[:1], "runs/x", 1.0, {"test": Accuracy(0.0, 0.0, 0.1)}, rewards)
    said = [line.split("│")[1:-1] for line in shown(display.console).splitlines() if "mean reward" in line]
    assert [[cell.strip() for cell in line[1:]] for line in said] == [list(map(str, means[1:])), list(map(str, means))]


def test_the_time_left_counts_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(displays, "monotonic", lambda: now[0])
    display = Display(10, "run", Console(file=io.StringIO()))
    display.evaluations_left = lambda step: 6 - step
    display.evaluated(30.0, 3)  # before the first step
    now[0] = 30.0
    display.begin()
    assert display.time_left(0) is None
    now[0] = 34.0
    assert display.time_left(2) == 8 * 2 + 4 * 10
    display.evaluated(20.0, 1)
    now[0] = 54.0
    assert display.time_left(2) == 8 * 2 + 4 * 12.5


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [False, True])
def test_a_run_begins_with_what_it_does(verbose: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("agentrl"), "level", logging.INFO if verbose else logging.WARNING)
    logging.getLogger("agentrl").manager._clear_cache()  # type: ignore[attr-defined]
    console = Console(file=io.StringIO(), width=200)
    recipe = small(tmp_path / "run", train__steps=1, eval__every=0, eval__before=False)
    agentrl.train(recipe, display=Display(1, "x", console))
    lines = shown(console).splitlines()
    assert [line.partition(":")[0] for line in lines[:5]] == ["trained", "tasks", "steps", "sampled", "tools"]
    assert "environment" in lines[1]
    assert f"run folder: {tmp_path / 'run'}" in lines
    assert any(line.startswith("chat: ") for line in lines) == verbose
    assert any(line.startswith("training forward: ") for line in lines) == verbose


def test_what_is_said_is_kept_in_a_log(tmp_path: Path) -> None:
    display = Display(2, "run", Console(file=io.StringIO(), force_terminal=True))
    display.note("before there is a folder")
    display.keep(tmp_path / "run.log")
    display.step(1, {"reward/mean": 0.5, "rollout/tokens_per_s": 10.0, "time/step_s": 1.0})
    display.log("\ud800 an error")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line[21:32] for line in lines] == ["before ther", "step    1/2", "? an error"]
    display.keep(tmp_path / "gone" / "run.log")
    display.note("a disk that refuses it ends no run")
    assert not (tmp_path / "gone").exists()
