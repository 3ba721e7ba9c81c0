"""The examples of the repository run as they are."""

import re

import pytest
from paths import ROOT
from warm import Python

LOOP = ROOT / "examples" / "minimal_loop.py"


@pytest.mark.slow
def test_the_minimal_loop_is_a_page_that_trains_and_evaluates() -> None:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 150
    small = ["train.steps=2", "train.threads=1", "rollout.tasks=2", "rollout.n=4", "eval.tasks=4"]
    process = Python([str(LOOP), *small])
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert re.findall(r"^step (\d)  reward \d\.\d{3}  loss ", said, re.M) == ["1", "2"]
    assert re.findall(r"^step (\d)  held-out accuracy: test \d", said, re.M) == ["0", "2"]
