import numpy as np
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


def test_only_allowed_tasks_are_drawn_and_epochs_differ() -> None:
    sampler = TaskSampler(100, 0, allowed=np.arange(0, 100, 2))
    first, second = sampler.draw(50), sampler.draw(50)
    assert sorted(first) == sorted(second) == list(range(0, 100, 2))
    assert first != second
