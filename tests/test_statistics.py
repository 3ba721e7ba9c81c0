from itertools import combinations

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
