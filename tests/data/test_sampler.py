import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.sampler import TaskSampler


@given(st.integers(1, 60), st.lists(st.integers(1, 25), min_size=1, max_size=8), st.integers(0, 9))
def test_an_epoch_draws_every_task_once(size: int, draws: list[int], seed: int) -> None:
    sampler = TaskSampler(size, seed)
    drawn = [i for count in draws for i in sampler.draw(count)]
    assert len(drawn) == sum(draws)
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(1, 60), st.integers(0, 200), st.integers(1, 90))
def test_a_restored_sampler_goes_on_where_it_stood(size: int, before: int, after: int) -> None:
    sampler = TaskSampler(size, 3)
    sampler.draw(before)
    state = sampler.state()
    again = TaskSampler(size, 3)
    again.restore(state)
    assert again.draw(after) == sampler.draw(after)


def test_excluded_tasks_are_passed_over_and_the_order_of_the_others_stays() -> None:
    odd = frozenset(range(1, 100, 2))
    drawn = TaskSampler(100, 0, excluded=odd).draw(100)
    assert sorted(drawn[:50]) == sorted(drawn[50:]) == list(range(0, 100, 2))
    assert drawn == [i for i in TaskSampler(100, 0).draw(200) if i not in odd]


def test_a_sampler_with_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TaskSampler(2, 0, excluded=frozenset({0, 1}))
