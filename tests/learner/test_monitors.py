"""Warnings of a run, with the likely cause: equal samples once, a mismatch of engine and trainer once in a while."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train_help import small

import agentrl
from agentrl.learner.monitors import SILENT_STEPS, ContrastMonitor, MismatchMonitor
from agentrl.recipe.schema import Recipe
from agentrl.training.display import Display

STEP = {
    "groups/varied": 0, "groups/equal": 2, "groups/few": 0, "train/samples": 0, "rollout/trajectories": 8,
    "rollout/failed": 0, "stop/length": 0, "stop/max_turns": 0, "stop/timeout": 0, "reward/mean": 0.0,
}  # fmt: skip

Changes = dict[str, Any]


@pytest.mark.parametrize(
    ("recipe", "metrics", "words"),
    [
        (
            {},
            {},
            r"steps 1 to 3: no two .* grpo learned nothing. Likely cause: a reward that is the same",
        ),
        ({}, {"reward/mean": 1.0}, r"too easy .*mean reward 1\b"),
        ({}, {"stop/length": 5}, r"5 of 8 samples were cut off \(rollout.max_turn_tokens"),
        ({}, {"groups/few": 2, "groups/equal": 0, "rollout/failed": 7}, r"7 samples of the step failed"),
        ({"algorithm": {"kl_coef": 0.1}}, {"train/samples": 8}, r"grpo learned nothing"),  # the KL alone was trained
        ({"algorithm": {"advantage": "reinforce_plus_plus"}}, {}, r"reinforce_plus_plus learned nothing"),
        ({"algorithm": {"advantage": "reinforce_plus_plus"}}, {"train/samples": 8}, None),
        ({}, {"groups/varied": 1, "train/samples": 4}, None),
    ],
)
def test_steps_without_contrast_are_told_once(recipe: Changes, metrics: Changes, words: str | None) -> None:
    monitor = ContrastMonitor(small(**recipe))
    assert monitor.initial_warning() is None
    lines = [monitor.warning(step, STEP | metrics) for step in range(1, 9)]
    assert [i for i, line in enumerate(lines) if line] == ([] if words is None else [2])
    assert words is None or re.search(words, lines[2] or "")


def test_steps_apart_are_no_row() -> None:
    monitor = ContrastMonitor(small())
    lines = [monitor.warning(step, STEP | {"groups/varied": step % 3 == 0}) for step in range(1, 9)]
    assert not any(lines)


def test_a_critic_that_warms_up_is_not_taken_for_it() -> None:
    monitor = ContrastMonitor(small(algorithm={"advantage": "gae"}, critic={"warmup_steps": 4}))
    lines = [monitor.warning(step, STEP) for step in range(1, 9)]
    assert [i for i, line in enumerate(lines, 1) if line] == [7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__temperature": 0.0}, r"rollout.temperature is 0, so .* grpo, which compares them"),
        ({"rollout__top_k": 1}, r"rollout.top_k is 1, so"),
        ({"rollout__temperature": 0.0, "algorithm": {"advantage": "reinforce_plus_plus"}}, None),
        ({"rollout__temperature": 0.0, "train__steps": 0}, None),
    ],
)
def test_samples_that_cannot_differ_are_told_before_the_first(changes: Changes, words: str | None) -> None:
    monitor = ContrastMonitor(small(**changes))
    line = monitor.initial_warning()
    assert line is None if words is None else re.search(words, line or "")
    if words is not None:
        assert not any(monitor.warning(step, STEP) for step in range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__temperature": 0.0}, "rollout.temperature is 0"),
        ({"env__name": "train_plugins:Flat"}, "no two samples of a task differed in their reward"),
    ],
)
def test_a_run_says_it(tmp_path: Path, changes: Changes, words: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    agentrl.train(small(tmp_path / "run", **changes, eval__splits=[], train__steps=4), display=Display(4, "x", console))
    assert console.file.getvalue().count(words) == 1  # type: ignore[attr-defined]


def test_a_mismatch_is_said_once_in_a_while_with_its_likely_causes() -> None:
    monitor = MismatchMonitor(Recipe.model_validate({"engine": {"name": "sglang"}}))
    fine = {"mismatch/logprob_mean": 0.01, "mismatch/logprob_max": 0.3, "mismatch/ess": 0.99}
    bad = {**fine, "mismatch/ess": 0.4}
    assert monitor.warning(1, fine) is None
    assert "effective sample size 40%" in monitor.warning(2, bad)
    assert monitor.warning(3, bad) is None
    line = monitor.warning(2 + SILENT_STEPS, {**bad, "mismatch/logprob_mean": 0.2})
    assert "0.200 nats" in line
    assert "weights that did not reach the engine" in line
    assert "number format" in line
    assert MismatchMonitor(Recipe()).warning(1, {}) is None
