"""Runs in which the samples of a task do not differ are told so, with the likely cause, once."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train_help import small

import agentrl
from agentrl.learner.contrast import ContrastWatch
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
    watch = ContrastWatch(small(**recipe))
    assert watch.beforehand() is None
    lines = [watch.warning(step, STEP | metrics) for step in range(1, 9)]
    assert [i for i, line in enumerate(lines) if line] == ([] if words is None else [2])
    assert words is None or re.search(words, lines[2] or "")


def test_steps_apart_are_no_row() -> None:
    watch = ContrastWatch(small())
    lines = [watch.warning(step, STEP | {"groups/varied": step % 3 == 0}) for step in range(1, 9)]
    assert not any(lines)


def test_a_critic_that_warms_up_is_not_taken_for_it() -> None:
    watch = ContrastWatch(small(algorithm={"advantage": "gae"}, critic={"warmup_steps": 4}))
    lines = [watch.warning(step, STEP) for step in range(1, 9)]
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
    watch = ContrastWatch(small(**changes))
    line = watch.beforehand()
    assert line is None if words is None else re.search(words, line or "")
    if words is not None:
        assert not any(watch.warning(step, STEP) for step in range(1, 9))


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
