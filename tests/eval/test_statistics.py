from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.eval.statistics import accuracy_interval, pass_at_k, wilson


def test_wilson_agrees_with_the_published_example() -> None:
    low, high = wilson(15, 148)  # Newcombe 1998, table I: 15/148 by method 3
    assert low == pytest.approx(0.0624, abs=1e-4)
    assert high == pytest.approx(0.1605, abs=1e-4)


@given(st.integers(1, 500), st.data())
def test_wilson_holds_the_proportion_and_stays_in_range(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials + 1e-12
    assert successes / trials - 1e-12 <= high <= 1


def test_identical_samples_of_a_task_add_no_certainty() -> None:
    once = accuracy_interval([1, 0] * 20, [1] * 40)
    copied = accuracy_interval([8, 0] * 20, [8] * 40)
    assert copied == pytest.approx(once, abs=0.005)


def test_independent_samples_narrow_the_interval() -> None:
    few = accuracy_interval([1, 0] * 20, [1] * 40)
    many = accuracy_interval([4] * 40, [8] * 40)
    assert many[2] - many[1] < (few[2] - few[1]) / 2


@pytest.mark.parametrize("right", [0, 3])
def test_samples_that_all_end_alike_tell_no_more_than_their_tasks(right: int) -> None:
    """0 of 16 tasks, three times each, is 0 of 16: up to 19.4 %, not to 7.4 %."""
    assert accuracy_interval([right] * 16, [3] * 16) == accuracy_interval([right > 0] * 16, [1] * 16)
    assert accuracy_interval([0] * 16, [3] * 16)[2] == pytest.approx(0.194, abs=5e-4)


def test_the_interval_widens_as_fewer_outcomes_differ() -> None:
    """One right sample of 48 is nearly nothing seen, so its interval is nearly that of none."""
    highs = [accuracy_interval([1] * k + [0] * (16 - k), [3] * 16)[2] - k / 48 for k in range(4)]
    assert highs == sorted(highs, reverse=True)
    assert highs[1] > 0.75 * highs[0]


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("tasks", "samples"), [(128, 1), (16, 3), (64, 3), (16, 8), (64, 8)])
@pytest.mark.parametrize("accuracy", [0.1, 0.5, 0.95])
def test_the_interval_covers_the_truth(accuracy: float, tasks: int, samples: int, correlation: float) -> None:
    """Tasks of a beta distribution, whose samples correlate: 95 % intervals hold the truth about as often as said."""
    rng = np.random.default_rng(5)
    runs = 600
    if correlation in (0.0, 1.0):
        chances = np.full((runs, tasks), accuracy) if correlation == 0 else rng.random((runs, tasks)) < accuracy
    else:
        spread = 1 / correlation - 1
        chances = rng.beta(accuracy * spread, (1 - accuracy) * spread, (runs, tasks))
    drawn = rng.binomial(samples, chances)
    bounds = [accuracy_interval(row.tolist(), [samples] * tasks) for row in drawn]
    covered = sum(low <= accuracy <= high for _, low, high in bounds) / runs
    assert covered >= 0.9


def test_no_valid_sample_says_nothing() -> None:
    assert accuracy_interval([0], [0]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(("samples", "correct"), [(5, 2), (6, 1), (4, 0), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, correct: int) -> None:
    right = [i < correct for i in range(samples)]
    for k in range(1, samples + 1):
        subsets = list(combinations(right, k))
        assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_more_than_was_sampled() -> None:
    with pytest.raises(ValueError, match="pass@9"):
        pass_at_k(1, 8, 9)
