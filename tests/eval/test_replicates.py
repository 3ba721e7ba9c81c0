"""Recipes of several seeds: the interval, the test and the seeds needed, by simulations whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.eval.replicates import replicated, seeds_needed
from agentrl.eval.statistics import mean_interval, t_p, t_quantile

Means = np.ndarray[tuple[int, int], np.dtype[np.float64]]


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062047), (2, 4.3026527), (3, 3.1824463), (10, 2.2281389), (30, 2.0422725)]
)
def test_students_t_agrees_with_its_table(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-6)
    assert t_p(quantile, freedom) == pytest.approx(0.05, rel=1e-6)
    assert t_p(1.0, 1) == pytest.approx(0.5)  # of Cauchy's distribution: 1 - 2 * atan(1) / pi
    assert t_p(1e-9, freedom) == pytest.approx(1.0)
    assert t_quantile(1e7) == pytest.approx(1.959964, rel=1e-5)


@pytest.mark.parametrize("others", [2, 3])
def test_the_spread_of_two_seeds_counts_for_one_degree_of_freedom(others: int) -> None:
    """Nothing varies but the seeds; Satterthwaite's formula gives 1.5 and 2.9."""
    a = np.repeat(np.array([[0.4], [0.5]]), 200, 1)
    b = np.repeat(np.linspace(0.5, 0.7, others)[:, None], 200, 1)
    found = replicated(a, b)[0]
    assert 1.0 <= float(found.test.split()[1]) <= 1.1
    assert (found.p < 0.05) == (found.low > 0)


@given(st.floats(0.001, 50), st.floats(1, 500))
def test_a_larger_t_is_less_likely(t: float, freedom: float) -> None:
    assert 0 <= t_p(1.1 * t, freedom) <= t_p(t, freedom) <= 1


def drawn(rng: np.random.Generator, seeds: int, tasks: int, spread: float, shift: float = 0.0) -> tuple[Means, Means]:
    """The means of two recipes: tasks differ by 0.3, what a recipe does on them by 0.1, a seed on a task by 0.2."""
    task = rng.normal(0.5, 0.3, tasks)

    def side(mean: float) -> Means:
        own = task + rng.normal(mean, 0.1, tasks)
        return own + rng.normal(0, spread, (seeds, 1)) + rng.normal(0, 0.2, (seeds, tasks))

    return side(0.0), side(shift)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_false_alarms_are_rare_and_intervals_hold_the_truth(seeds: int, spread: float) -> None:
    """`benchmarks/intervals.py` has more of both. 300 runs, seeded: four standard errors of 5 % are 5 points."""
    rng = np.random.default_rng(7)
    found = [replicated(*drawn(rng, seeds, 60, spread, 0.05))[0] for _ in range(300)]
    assert sum(one.low <= 0.05 <= one.high for one in found) / 300 >= 0.9
    assert sum(replicated(*drawn(rng, seeds, 60, spread))[0].p < 0.05 for _ in range(300)) / 300 <= 0.1


def test_one_seed_a_side_would_raise_an_alarm_that_several_do_not() -> None:
    rng = np.random.default_rng(1)
    a, b = drawn(rng, 3, 4000, 0.05)
    spread = np.array([-0.05, 0.0, 0.05])[:, None]
    a, b = a - a.mean(1, keepdims=True) + spread, b - b.mean(1, keepdims=True) + spread + 0.02
    found, varies = replicated(a, b)
    assert found.p > 0.5
    assert varies.spread == pytest.approx(0.05, abs=0.005)
    apart = (b[2] - a[0]).mean() / ((b[2] - a[0]).std() / math.sqrt(4000))
    assert apart > 5  # a test of two checkpoints is sure of it


def test_the_interval_holds_0_exactly_where_the_test_says_so() -> None:
    rng = np.random.default_rng(2)
    for shift in (0.0, 0.02, 0.05, 0.1, 0.3):
        found = replicated(*drawn(rng, 3, 60, 0.03, shift))[0]
        assert (found.low <= 0 <= found.high) == (found.p >= 0.05)
        assert found.low <= found.value <= found.high


def test_sides_that_agree_in_all_say_little_of_few_tasks() -> None:
    few, many = (replicated(np.ones((2, tasks)), np.ones((3, tasks)))[0] for tasks in (5, 1000))
    assert few.p == many.p == 1.0
    assert few.high - few.low > 0.2 > 0.01 > many.high - many.low > 0


@pytest.mark.parametrize(("spread", "shift"), [(0.05, 0.1), (0.03, 0.09)])
def test_as_many_seeds_as_are_said_show_the_difference(spread: float, shift: float) -> None:
    rng = np.random.default_rng(4)
    needed = seeds_needed(shift, 2 * (spread**2 + 0.04 / 200), 0.02 / 200)
    assert needed is not None
    assert 2 < needed < 12
    hits = sum(replicated(*drawn(rng, needed, 200, spread, shift))[0].p < 0.05 for _ in range(400)) / 400
    assert 0.68 <= hits <= 0.93


def test_no_number_of_seeds_shows_what_too_few_tasks_hide() -> None:
    assert seeds_needed(0.01, 0.001, tasks=0.001) is None
    assert seeds_needed(0.5, 0.0, tasks=0.0) == 2


def test_a_side_of_one_seed_is_taken_to_spread_as_the_other() -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(300):
        a, b = drawn(rng, 4, 60, 0.05)
        alarms += replicated(a[:1], b)[0].p < 0.05
    assert alarms / 300 <= 0.1


@pytest.mark.parametrize(("tasks", "samples"), [(64, 1), (64, 4), (300, 2)])
def test_the_interval_of_a_mean_reward_covers_the_truth(tasks: int, samples: int) -> None:
    rng = np.random.default_rng(5)
    runs = 400
    held = 0
    for _ in range(runs):
        chance = rng.beta(0.6, 0.6, (tasks, 1))
        low, high = mean_interval((rng.binomial(4, np.repeat(chance, samples, 1)) / 4).tolist())[1:]
        held += low <= 0.5 <= high
    assert held / runs >= 0.9


def test_the_mean_of_rewards_of_0_and_1_is_an_accuracy() -> None:
    mean, low, high = mean_interval([[1, 0], [], [1, 1], [0.0]])
    assert (mean, low > 0, high < 1) == (0.6, True, True)
    alike = mean_interval([[0.3]] * 16)
    assert alike[0] == pytest.approx(0.3)
    assert alike[2] - alike[1] > 0.1  # 16 tasks have not shown all
    assert mean_interval([]) == (0.0, 0.0, 1.0)
