"""What the page says of metrics."""

from pathlib import Path

import pytest

from agentrl.learner.monitors import CONDITIONS, WATCHED
from agentrl.view.meanings import conditions, meanings, told_of

ROOT = Path(__file__).parents[2]


def test_every_metric_has_a_meaning_and_a_place_that_exists() -> None:
    found = meanings()
    assert len(found) > 150
    for key, one in found.items():
        assert one["meaning"], key
        path, _, line = one["where"].partition(":")
        text = (ROOT / path).read_text().splitlines()
        assert not line or int(line) <= len(text), key


@pytest.mark.parametrize(
    ("key", "place", "line"),
    [
        ("reward/mean", "agentrl/rollout/metrics.py", '"reward'),
        ("tool/<name>/errors", "agentrl/rollout/metrics.py", "tool/"),
        ("train/entropy", "agentrl/learner/actor.py", "entropy"),
        ("time/step_s", "agentrl/training/loop.py", "time/step_s"),
        ("mismatch/kl", "agentrl/learner/metrics.py", "kl"),
    ],
)
def test_a_metric_is_computed_where_it_is_said(key: str, place: str, line: str) -> None:
    path, _, number = meanings()[key]["where"].partition(":")
    assert path == place
    assert line in (ROOT / path).read_text().splitlines()[int(number) - 1]


def test_what_is_said_as_above_is_said_whole() -> None:
    assert meanings()["time/sample_hooks_s"]["meaning"].startswith("mean seconds of a valid sample")
    assert "assistant turns" in meanings()["rollout/turns_max"]["meaning"]


def test_conditions_are_told_with_the_metrics_that_they_watch() -> None:
    assert conditions().keys() >= CONDITIONS.keys()
    found = told_of({}, WATCHED, ["train/entropy", "tool/calculator/calls", "nothing"])
    assert found["metrics"].keys() == {"train/entropy", "tool/<name>/calls", "tool/<name>/<key>", "train/<metric>"}
    assert "entropy_collapse" in found["watched"]["train/entropy"]
    assert found["conditions"]["entropy_collapse"].startswith("entropy below a tenth")
