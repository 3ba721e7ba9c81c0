"""A trajectory that must not be trained on is refused, and the error says what disagrees."""

from dataclasses import replace

import numpy as np
import pytest

from agentrl.plugins.types import Task
from agentrl.trajectory import FinishReason, InvariantError, Trajectory, Turn, check_invariants

GOOD = Trajectory(
    request_id="r",
    task=Task("t", {}),
    sample=0,
    ids=np.arange(7, dtype=np.int32),
    loss_mask=np.array([0, 0, 1, 1, 0, 1, 0], np.uint8),
    logprobs=np.array([0, 0, -1, -2, 0, -0.5, 0], np.float32),
    weight_version=np.array([-1, -1, 3, 3, -1, 4, -1], np.int32),
    prompt_length=2,
    turns=(Turn(2, 4), Turn(5, 6)),
    messages=(),
    rewards={},
    finish=FinishReason.STOP,
)


def changed(name: str, at: int, value: float) -> Trajectory:
    array = getattr(GOOD, name).copy()
    array[at] = value
    return replace(GOOD, **{name: array})


def test_a_good_one_passes() -> None:
    check_invariants(GOOD)
    assert (GOOD.sampled_tokens, GOOD.valid) == (3, True)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (replace(GOOD, logprobs=GOOD.logprobs[:-1]), "lengths"),
        (replace(GOOD, ids=GOOD.ids[:-1]), "lengths"),
        (changed("loss_mask", 2, 0), "loss mask"),
        (changed("loss_mask", 6, 1), "loss mask"),
        (changed("loss_mask", 0, 1), "loss mask"),
        (changed("logprobs", 4, -1), "not sampled has a logprob"),
        (changed("logprobs", 2, float("nan")), "no valid logprob"),
        (changed("logprobs", 2, float("-inf")), "no valid logprob"),
        (changed("logprobs", 2, 0.5), "no valid logprob"),
        (changed("weight_version", 2, -1), "weight versions"),
        (changed("weight_version", 4, 3), "weight versions"),
        (replace(GOOD, turns=(Turn(1, 4), Turn(5, 6))), "out of order or range"),
        (replace(GOOD, turns=(Turn(5, 6), Turn(2, 4))), "out of order or range"),
        (replace(GOOD, turns=(Turn(2, 4), Turn(5, 9))), "out of order or range"),
        (replace(GOOD, turns=(Turn(2, 4),)), "loss mask"),
    ],
)
def test_a_bad_one_is_refused(bad: Trajectory, says: str) -> None:
    with pytest.raises(InvariantError, match=f"r: .*{says}"):
        check_invariants(bad)
