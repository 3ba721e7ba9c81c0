"""The further losses against their formulas, and exact however tokens are dealt out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_help import REWARDS, learned, make_groups, make_recipe

from agentrl.algo import losses
from agentrl.algo.loss import cispo, gspo, ppo_clip, reinforce, value_loss
from agentrl.algo.terms import Tokens
from agentrl.errors import UserError
from agentrl.recipe.sections.algorithm import AlgorithmSection, LossSection

CONFIG = AlgorithmSection(clip_low=0.2, clip_high=0.3)


def tokens(new: list[float], old: list[float], advantages: list[float], sample: list[int] | None = None) -> Tokens:
    return Tokens(
        torch.tensor(new).requires_grad_(),
        torch.tensor(old),
        torch.tensor(advantages),
        None if sample is None else torch.tensor(sample),
    )


def gradient(given_: Tokens, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    assert given_.logprobs.grad is not None
    return given_.logprobs.grad


def test_gspo_is_the_clipped_geometric_mean_of_a_sample() -> None:
    new, old = [-1.0, -2.0, -0.5, -1.0, -3.0], [-1.1, -2.2, -0.4, -1.9, -3.2]
    which, advantages = [4, 4, 4, 7, 7], [1.5, 1.5, 1.5, 2.0, 2.0]
    given_ = tokens(new, old, advantages, which)
    terms = gspo(given_, CONFIG)

    logprobs = torch.tensor(new, requires_grad=True)
    log_ratio = logprobs - torch.tensor(old)
    wanted = torch.zeros(())
    for rows, advantage in (([0, 1, 2], 1.5), ([3, 4], 2.0)):
        s = log_ratio[rows].mean().exp()
        wanted = wanted - torch.minimum(s * advantage, s.clamp(0.8, 1.3) * advantage)
    per_sample = torch.stack([terms.loss[:3].mean(), terms.loss[3:].mean()]).sum()
    torch.testing.assert_close(per_sample, wanted)
    wanted.backward()
    torch.testing.assert_close(gradient(given_, per_sample), logprobs.grad)
    assert terms.metrics["clip_fraction_high"].tolist() == [0, 0, 0, 1, 1]
    assert terms.metrics["ratio_mean"][3].item() == pytest.approx(2.718281828**0.55, rel=1e-4)


def test_gspo_needs_to_know_the_samples() -> None:
    with pytest.raises(ValueError, match="sample"):
        gspo(tokens([-1.0], [-1.0], [1.0]), CONFIG)


def test_cispo_keeps_every_tokens_gradient_and_bounds_its_weight() -> None:
    ratios = torch.tensor([1.1, 2.0, 0.5, 2.0])
    given_ = tokens([-1.0] * 4, (torch.tensor(-1.0) - ratios.log()).tolist(), [1.0, 1.0, -1.0, -2.0])
    terms = cispo(given_, CONFIG)
    found = gradient(given_, terms.loss.sum())
    torch.testing.assert_close(found, torch.tensor([-1.1, -1.3, 0.8, 2.6]))
    torch.testing.assert_close(terms.loss.detach(), torch.tensor([1.1, 1.3, -0.8, -2.6]))
    assert terms.metrics["clip_fraction"].tolist() == [0, 1, 1, 1]


def test_reinforce_is_the_plain_policy_gradient() -> None:
    given_ = tokens([-1.0, -2.0], [-5.0, -0.1], [0.7, -1.3])
    terms = reinforce(given_, CONFIG)
    torch.testing.assert_close(terms.loss.detach(), torch.tensor([0.7, -2.6]))
    torch.testing.assert_close(gradient(given_, terms.loss.sum()), torch.tensor([-0.7, 1.3]))


ALL = ["ppo_clip", "gspo", "cispo", "reinforce", "sapo", "gmpo", "dppo", "vespo"]


def bound(name: str, **args: Any) -> Any:
    return losses.bound(LossSection(name=name, args=args))


@pytest.mark.parametrize("name", ALL)
def test_at_ratio_one_every_loss_is_the_policy_gradient(name: str) -> None:
    given_ = tokens([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5], [0.7, 0.7, -1.3], [0, 0, 1])
    torch.testing.assert_close(
        gradient(given_, bound(name)(given_, CONFIG).loss.sum()), torch.tensor([-0.7, -0.7, 1.3])
    )


@pytest.mark.parametrize("name", ALL)
def test_no_advantage_no_gradient(name: str) -> None:
    assert losses.get(name).vanishes_with_advantage
    given_ = tokens([-1.0, -2.0], [-3.0, -0.5], [0.0, 0.0], [0, 1])
    assert not gradient(given_, bound(name)(given_, CONFIG).loss.sum()).any()


rows = st.lists(
    st.lists(st.tuples(*[st.floats(-4, 0, width=32)] * 2, st.floats(-2, 2, width=32)), min_size=1, max_size=5),
    min_size=2,
    max_size=6,
)


@pytest.mark.slow
@settings(deadline=None)
@given(rows, st.sampled_from(ALL), st.integers(1, 5))
def test_losses_add_up_however_samples_are_dealt_out(rows: list[list[Any]], name: str, cut: int) -> None:
    def computed(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = rows[low:high]
        new, old, advantages = (list(column) for column in zip(*(t for row in part for t in row), strict=True))
        which = [low + i for i, row in enumerate(part) for _ in row]
        given_ = tokens(new, old, advantages, which)
        loss = bound(name)(given_, CONFIG).loss
        return loss.detach(), gradient(given_, loss.sum())

    cut = min(cut, len(rows) - 1)
    whole = computed(0, len(rows))
    parts = computed(0, cut), computed(cut, len(rows))
    for i in range(2):
        torch.testing.assert_close(torch.cat([parts[0][i], parts[1][i]]), whole[i], atol=1e-5, rtol=1e-5)


def test_the_value_loss_stops_values_that_moved_far() -> None:
    #                        free  held, past the clip  moved far in the wrong direction: free
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    terms = value_loss(values, torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), clip=0.2)
    torch.testing.assert_close(terms.loss.detach(), torch.tensor([0.81, 0.64, 2.25]) / 2)
    terms.loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, -1.5]))
    assert terms.metrics["clip_fraction"].tolist() == [0, 1, 0]


@given(st.lists(st.tuples(*[st.floats(-3, 3, width=32)] * 3), min_size=1, max_size=8), st.floats(0.01, 5))
def test_the_value_loss_is_never_below_the_plain_one(drawn: list[tuple[float, float, float]], clip: float) -> None:
    values, old, returns = torch.tensor(drawn).unbind(1)
    terms = value_loss(values, old, returns, clip)
    assert bool((terms.loss >= 0.5 * (values - returns) ** 2 - 1e-6).all())
    near = (values - old).abs() < clip * 0.999
    assert not terms.metrics["clip_fraction"][near].any()
    torch.testing.assert_close(terms.loss[near], 0.5 * (values - returns)[near] ** 2)


def test_ppo_and_gspo_agree_on_samples_of_one_token() -> None:
    plain = AlgorithmSection(clip_dual=None)
    given_ = ([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [1.0, -1.0, 0.5], [0, 1, 2])
    torch.testing.assert_close(gspo(tokens(*given_), plain).loss, ppo_clip(tokens(*given_), plain).loss)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["gspo", "cispo", "reinforce", "gmpo"])
def test_in_the_actor_micro_batches_change_nothing(name: str) -> None:
    def after(tokens: int) -> tuple[torch.Tensor, dict[str, float]]:
        keys = {"loss": name, "aggregation": "sequence_mean", "clip_low": 0.01, "clip_high": 0.01}
        return learned(make_recipe(keys, epochs=2, lr=5e-3, micro_batch_tokens=tokens), make_groups(REWARDS))

    whole, metrics = after(16384)
    split, same = after(1)
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-4)
    assert same["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-5, rel=1e-4)
    assert name == "reinforce" or metrics["train/clip_fraction"] > 0


def test_dppo_drops_what_moved_far_and_would_move_on() -> None:
    #        rare, ratio 4   likely: moved 0.45   the same, pulled back   less likely, pushed on
    new, old = [0.04, 0.95, 0.95, 0.3], [0.01, 0.5, 0.5, 0.9]
    given_ = tokens(torch.tensor(new).log().tolist(), torch.tensor(old).log().tolist(), [1.0, 1.0, -1.0, -1.0])
    terms = bound("dppo", ratio_cap=3.0)(given_, CONFIG)
    moves = gradient(given_, terms.loss.sum())
    torch.testing.assert_close(moves, torch.tensor([-3.0, 0.0, 1.9, 0.0]))
    assert terms.metrics["clip_fraction"].tolist() == [0, 1, 0, 1]


def test_clip_cov_leaves_out_some_of_those_between_its_bounds() -> None:
    logprobs, advantages = [-0.1, -0.2, -3.0, -0.1, -3.0, -3.0], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0]
    whole = tokens(logprobs, logprobs, advantages)  # covariance: 2.93, 2.73, -2.87, -2.93, 2.87, 2.87
    section = LossSection(name="clip_cov", args={"share": 0.5, "low": 2.8, "high": 2.9})
    choose = losses.chooser(section)
    assert choose is not None
    with torch.no_grad():
        assert choose(whole, np.random.default_rng(0), CONFIG).tolist() == [0, 0, 0, 0, 1, 1]
        few = losses.chooser(LossSection(name="clip_cov", args={"share": 0.01, "low": 2.0}))
        assert few is not None
        drawn = [few(whole, np.random.default_rng(seed), CONFIG).tolist() for seed in range(20)]
    assert all(sum(each) == 1 and not any(each[2:4]) for each in drawn)
    assert len({tuple(each) for each in drawn}) == 4, "any of the candidates"
    given_ = replace(whole, chosen=torch.tensor([0.0, 0, 0, 0, 1, 1]))
    found = gradient(given_, bound("clip_cov")(given_, CONFIG).loss.sum())
    torch.testing.assert_close(found, torch.tensor([-2.0, -2.0, -2.0, 2.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"Tokens\.chosen"):
        bound("kl_cov")(whole, CONFIG)


def test_arguments_of_a_loss_are_typed() -> None:
    for args, said in [
        (
            {"tau_positve": 2},
            r"^algorithm\.loss\.args\.tau_positve: sapo takes no such argument; did you mean 'tau_posit",
        ),
        ({"tau_positive": -1}, r"^algorithm\.loss\.args\.tau_positive: should be greater than 0, got -1"),
    ]:
        with pytest.raises(UserError, match=said):
            bound("sapo", **args)
    with pytest.raises(UserError, match=r"^algorithm\.loss\.args\.beta: dro needs it, and it is missing"):
        bound("dro")
    with pytest.raises(UserError, match=r"^algorithm\.loss\.args\.tau: gspo takes no arguments of its own"):
        bound("gspo", tau=1)
