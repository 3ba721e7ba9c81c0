"""Token-level estimators against slow loops, and the columns of a step."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_help import TWO_TURNS, trajectory_of

from agentrl.algo import advantages
from agentrl.algo.returns import DiscountArgs, GaeArgs, discounted, gae, reinforce_plus_plus
from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.compute.batch import Batch
from agentrl.errors import UserError
from agentrl.learner.columns import carries_gradient, step_rewards, token_rewards, with_advantages
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.trajectory import Trajectory


def config(**keys: Any) -> AlgorithmSection:
    return AlgorithmSection(advantage="gae", **keys)


def scaled(raw: torch.Tensor) -> torch.Tensor:
    return (raw - raw.mean()) / (raw.std() + 1e-6)


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum of equation 16, term by term."""
    after = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, len(errors))) for t in range(len(errors))]


token = st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
ragged = st.lists(st.lists(token, max_size=9), min_size=1, max_size=6).filter(any)


def made(rows: list[list[tuple[float, float]]]) -> Samples:
    lengths = torch.tensor([len(row) for row in rows])
    flat = torch.tensor([pair for row in rows for pair in row])
    rewards = torch.tensor([sum(r for r, _ in row) for row in rows], dtype=torch.float32)
    return Samples(rewards, torch.arange(len(rows)), lengths, flat[:, 0], flat[:, 1])


@pytest.mark.slow
@given(ragged, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_sum_of_its_definition(rows: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    found = gae(made(rows), config(), GaeArgs(gamma=gamma, lam=lam))
    raw = torch.tensor(
        [a for row in rows for a in slow_gae([r for r, _ in row], [v for _, v in row], gamma, lam)],
        dtype=torch.float64,
    )
    values = torch.tensor([v for row in rows for _, v in row], dtype=torch.float64)
    torch.testing.assert_close(found.returns.double(), raw + values, atol=1e-5, rtol=1e-5)
    deviation = raw.std() if len(raw) > 1 else torch.tensor(0.0)
    if deviation > 1e-3:
        torch.testing.assert_close(found.advantages.double(), scaled(raw), atol=1e-4, rtol=1e-4)
        assert float(found.advantages.mean()) == pytest.approx(0, abs=1e-5)
    elif deviation == 0:
        assert not found.advantages.any()


def test_gae_by_hand() -> None:
    given_ = Samples(
        torch.tensor([1.0]), torch.tensor([0]), torch.tensor([2]), torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    )
    found = gae(given_, config(), GaeArgs(gamma=0.5, lam=0.5))
    raw = [(0 + 0.5 * 0.25 - 0.5) + 0.25 * 0.75, 1 - 0.25]
    assert found.returns.tolist() == pytest.approx([raw[0] + 0.5, raw[1] + 0.25])
    assert found.advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)  # of two numbers


def test_with_lam_one_returns_do_not_depend_on_the_critic() -> None:
    rng = np.random.default_rng(0)
    rewards = torch.from_numpy(rng.random(7).astype(np.float32))
    lengths, groups = torch.tensor([4, 3]), torch.tensor([0, 0])

    def returns(values: torch.Tensor) -> torch.Tensor:
        found = gae(Samples(torch.zeros(2), groups, lengths, rewards, values), config(), GaeArgs(gamma=0.9)).returns
        assert found is not None
        return found

    torch.testing.assert_close(returns(torch.randn(7)), returns(torch.zeros(7)))
    torch.testing.assert_close(returns(torch.zeros(7)), discounted(rewards, lengths, 0.9))


@pytest.mark.slow
@given(ragged, st.floats(0, 1))
def test_reinforce_plus_plus_is_the_whitened_reward_to_go(rows: list[list[tuple[float, float]]], gamma: float) -> None:
    to_go = [sum(gamma**i * r for i, (r, _) in enumerate(row[t:])) for row in rows for t in range(len(row))]
    raw = torch.tensor(to_go, dtype=torch.float64)
    found = reinforce_plus_plus(made(rows), config(), DiscountArgs(gamma=gamma))
    assert found.returns is None
    if len(raw) > 1 and raw.std() > 1e-3:
        torch.testing.assert_close(found.advantages.double(), scaled(raw), atol=1e-4, rtol=1e-4)


def test_a_reward_without_a_place_comes_with_the_last_token() -> None:
    given_ = Samples(torch.tensor([2.0, 5.0, 3.0]), torch.tensor([0, 0, 1]), torch.tensor([3, 0, 1]))
    raw = torch.tensor([0.5, 1.0, 2.0, 3.0])
    found = reinforce_plus_plus(given_, config(), DiscountArgs(gamma=0.5)).advantages
    torch.testing.assert_close(found, scaled(raw), atol=1e-5, rtol=1e-5)


def test_gae_needs_values() -> None:
    assert advantages.get("gae").needs_values
    assert not advantages.get("grpo").needs_values
    with pytest.raises(ValueError, match="critic"):
        gae(Samples(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.long)), config(), GaeArgs())


def batch_of(trajectories: list[Trajectory]) -> Batch:
    batch = Batch.from_trajectories(trajectories, [0] * len(trajectories))
    return batch.with_tokens(step_rewards=step_rewards(trajectories, batch))


EMPTY_TURNS = trajectory_of([(3, 3, 0.5), (4, 6, 0.0), (7, 7, 1.0)], 8, {"step": 1.5})
NOTHING = trajectory_of([], 4, {"answer": 9.0})


def test_rewards_stand_at_the_ends_of_their_turns() -> None:
    batch = batch_of([TWO_TURNS, EMPTY_TURNS, NOTHING])
    found = [token_rewards(batch)[batch.span(i)] for i in range(3)]
    assert found[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1.5, 0]
    assert found[1].tolist() == [0, 0, 0, 0, 0, 1.5, 0, 0]
    assert not found[2].any()


def test_the_tokens_of_tools_are_no_step_of_time() -> None:
    batch = batch_of([TWO_TURNS])
    values = np.where(batch.tokens["loss_mask"], 0.1, 77.0).astype(np.float32)
    discounts = partial(gae, args=GaeArgs(gamma=0.5, lam=0.5))
    found = with_advantages(batch.with_tokens(values=values), discounts, config())
    raw = slow_gae([0, 1, 0, 0, 1.5], [0.1] * 5, 0.5, 0.5)
    mask = batch.tokens["loss_mask"].astype(bool)
    np.testing.assert_allclose(found.tokens["returns"][mask], np.array(raw) + 0.1, atol=1e-6)
    np.testing.assert_allclose(found.tokens["advantages"][mask], scaled(torch.tensor(raw)), atol=1e-4)
    assert not found.tokens["advantages"][~mask].any()
    assert not found.tokens["returns"][~mask].any()
    assert found.samples["advantage"].tolist() == pytest.approx([0], abs=1e-6)
    assert carries_gradient(found).tolist() == [True]


def test_one_number_a_sample_goes_to_its_sampled_tokens() -> None:
    batch = batch_of([TWO_TURNS, EMPTY_TURNS, NOTHING])
    found = with_advantages(batch, lambda samples, _: samples.rewards - 2.5, config())
    assert found.samples["advantage"].tolist() == [0.0, -1.0, 0.0]
    assert found.tokens["advantages"].tolist() == batch.spread(np.array([0, -1, 0], np.float32)).tolist()
    assert carries_gradient(found).tolist() == [False, True, False]
    assert "returns" not in found.tokens


@pytest.mark.parametrize("batch", [batch_of([NOTHING]), batch_of([]), batch_of([TWO_TURNS]).select([])])
def test_a_step_without_a_sampled_token_has_no_advantage(batch: Batch) -> None:
    found = with_advantages(batch, gae, config())
    assert not found.tokens["advantages"].any()
    assert found.samples["advantage"].tolist() == [0.0] * len(batch)


@pytest.mark.parametrize(
    ("estimator", "why"),
    [
        (lambda s, c: s.rewards[:-1], r"gave \[1\], not a tensor \[2\]"),
        (lambda s, c: s.rewards.tolist(), "gave list"),
        (lambda s, c: TokenAdvantages(s.rewards), r"advantages of shape \[2\], not \[7\]"),
        (lambda s, c: TokenAdvantages(torch.zeros(7), torch.zeros(3)), r"returns of shape \[3\]"),
        (lambda s, c: s.rewards / 0, "not finite"),
    ],
)
def test_what_an_estimator_gives_is_checked(estimator: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        with_advantages(batch_of([TWO_TURNS, EMPTY_TURNS]), estimator, config())
