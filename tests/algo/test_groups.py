"""Estimators that compare the samples of a task: against numbers worked out by hand, and what must always hold."""

import math
from collections import defaultdict
from dataclasses import replace
from statistics import stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo import advantages
from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.recipe.sections.algorithm import AdvantageSection, AlgorithmSection

CONFIG = AlgorithmSection()


def samples(rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> Samples:
    return Samples(
        torch.tensor(rewards), torch.tensor(groups), torch.tensor(lengths or [1] * len(rewards), dtype=torch.long)
    )


def per_sample(name: str, given_: Samples) -> list[float]:
    """One number a sample, whichever form the estimator chose (lengths are at least 1)."""
    found = advantages.bound(AdvantageSection(name=name))(given_, CONFIG)
    if isinstance(found, TokenAdvantages):
        found = found.advantages[torch.cumsum(given_.lengths, 0) - 1]
    return [float(value) for value in found]


def test_rloo_compares_with_the_others() -> None:
    found = per_sample("rloo", samples([1, 0, 0, 5, 7, 9], [3, 3, 3, 9, 9, 4]))
    assert found == pytest.approx([1, -0.5, -0.5, -2, 2, 0])


def test_opo_weighs_rewards_by_length() -> None:
    found = per_sample("opo", samples([1, 0, 4, 9], [0, 0, 1, 2], [30, 10, 5, 5]))
    assert found == pytest.approx([0.25, -0.75, 0, 0])


def test_passk_pays_the_best_by_its_lead() -> None:
    deviation = math.sqrt(((1 - 5 / 12) ** 2 + (0.25 - 5 / 12) ** 2 + (5 / 12) ** 2) / 2)
    found = per_sample("grpo_passk", samples([1, 0.25, 0, 1, 1, 0, 3], [0, 0, 0, 1, 1, 1, 2]))
    assert found == pytest.approx([0.75 / deviation, 0, 0, 0, 0, 0, 0], rel=1e-4)


def test_passk_is_what_the_maximum_loses_without_a_sample() -> None:
    rewards = [0.3, 0.9, 0.1, 0.7]
    found = per_sample("grpo_passk", samples(rewards, [0] * 4))
    lost = [max(rewards) - max(rewards[:i] + rewards[i + 1 :]) for i in range(4)]
    assert found == pytest.approx([one / stdev(rewards) for one in lost], rel=1e-4)


def test_reinforce_plus_plus_baseline_whitens_the_whole_step() -> None:
    # centred within tasks: 1/2, -1/2 | 2, -2; over tokens 1, 3 | 1, 1: mean -1/6 of six tokens
    given_ = samples([1, 0, 6, 2], [0, 0, 1, 1], [1, 3, 1, 1])
    tokens = torch.tensor([0.5, -0.5, -0.5, -0.5, 2, -2])
    wanted = (tokens - tokens.mean()) / tokens.std()
    found = advantages.bound(AdvantageSection(name="reinforce_plus_plus_baseline"))(given_, CONFIG)
    assert isinstance(found, TokenAdvantages)
    torch.testing.assert_close(found.advantages, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("pf_ppo_best_worst", [2, 0, 0, 2, 0.75, 0.75, 1.5, 1, 1, 1]),
        ("pf_ppo_best_random", [2, 2 / 3, 2 / 3, 2 / 3, 0.75, 0.75, 1.5, 1, 1, 1]),
    ],
)
def test_policy_filtration_weighs_the_advantages_of_gae_by_rank(name: str, weights: list[float]) -> None:
    """Four that differ; two of three that are tied; two that are equal; one alone. A task keeps its weight."""
    rewards, lengths = [5, 3, 2, 1, 1, 1, 0, 4, 4, 7], [1, 2, 3, 1, 1, 2, 1, 2, 1, 2]
    given_ = samples([float(r) for r in rewards], [0, 0, 0, 0, 1, 1, 1, 2, 2, 3], lengths)
    given_ = replace(given_, values=torch.linspace(-1, 1, sum(lengths)))
    plain, found = (advantages.bound(AdvantageSection(name=one))(given_, CONFIG) for one in ("gae", name))
    each = torch.repeat_interleave(torch.tensor(weights), given_.lengths)
    torch.testing.assert_close(found.advantages, plain.advantages * each, atol=1e-6, rtol=1e-6)
    assert torch.equal(found.returns, plain.returns)
    assert advantages.get(name).needs_values


GROUPED = ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk"]
CENTRED = ["grpo", "dr_grpo", "rloo"]
rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(0, 3), st.integers(1, 9)),
    min_size=1,
    max_size=16,
)


@given(rows, st.sampled_from(GROUPED))
def test_a_constant_on_all_rewards_of_a_task_changes_nothing(drawn: list[tuple[float, int, int]], name: str) -> None:
    rewards, groups, lengths = (list(column) for column in zip(*drawn, strict=True))
    found = per_sample(name, samples(rewards, groups, lengths))
    moved = [reward + 3 * group for reward, group in zip(rewards, groups, strict=True)]
    assert per_sample(name, samples(moved, groups, lengths)) == pytest.approx(found, abs=1e-4)
    by_task = defaultdict(list)
    for i, group in enumerate(groups):
        by_task[group].append(i)
    for members in by_task.values():
        if len({rewards[i] for i in members}) == 1:
            assert all(abs(found[i]) < 1e-6 for i in members)
        if name in CENTRED:
            assert sum(found[i] for i in members) == pytest.approx(0, abs=1e-4)
        if name == "opo":
            assert sum(found[i] * lengths[i] for i in members) == pytest.approx(0, abs=1e-3)
        best = max(members, key=lambda i: rewards[i])
        assert found[best] >= max(found[i] for i in members) - 1e-6


@given(rows, st.sampled_from([*GROUPED, "reinforce_plus_plus", "reinforce_plus_plus_baseline"]), st.randoms())
def test_the_order_of_samples_does_not_matter(drawn: list[tuple[float, int, int]], name: str, random: object) -> None:
    order = list(range(len(drawn)))
    random.shuffle(order)  # type: ignore[attr-defined]

    def found(rows_: list[tuple[float, int, int]]) -> list[float]:
        return per_sample(name, samples(*(list(column) for column in zip(*rows_, strict=True))))

    whole = found(drawn)
    assert found([drawn[i] for i in order]) == pytest.approx([whole[i] for i in order], abs=1e-5)


@given(rows)
def test_rloo_is_dr_grpo_times_k_over_k_less_one(drawn: list[tuple[float, int, int]]) -> None:
    rewards, groups, _ = (list(column) for column in zip(*drawn, strict=True))
    found = per_sample("rloo", samples(rewards, groups))
    centred = per_sample("dr_grpo", samples(rewards, groups))
    for i, group in enumerate(groups):
        k = groups.count(group)
        assert found[i] == pytest.approx(centred[i] * k / max(1, k - 1), abs=1e-5)
