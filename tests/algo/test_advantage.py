"""Advantages, losses and aggregation against numbers worked out by hand or by plain formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentrl.algo import advantages, aggregations, losses
from agentrl.algo.advantage import grpo
from agentrl.algo.aggregation import token_weights
from agentrl.algo.loss import entropy, k3, ppo_clip
from agentrl.algo.registry import LossEntry
from agentrl.algo.terms import LossTerms, Samples, Tokens, Update
from agentrl.errors import UserError
from agentrl.recipe.sections.algorithm import AlgorithmSection

CONFIG = AlgorithmSection(clip_low=0.2, clip_high=0.3, clip_dual=3.0)


def samples(rewards: list[float], groups: list[int]) -> Samples:
    return Samples(torch.tensor(rewards), torch.tensor(groups), torch.ones(len(rewards), dtype=torch.long))


def test_grpo_normalizes_within_each_group() -> None:
    found = grpo(samples([1, 0, 0, 5, 7], [3, 3, 3, 9, 9]), CONFIG)
    a, b = 1 / math.sqrt(1 / 3), math.sqrt(2) / 2
    torch.testing.assert_close(found, torch.tensor([2 / 3 * a, -a / 3, -a / 3, -b, b]), atol=1e-5, rtol=0)


def test_dr_grpo_only_centres() -> None:
    found = advantages.get("dr_grpo").function(samples([1, 0, 0, 5, 7], [3, 3, 3, 9, 9]), CONFIG)
    torch.testing.assert_close(found, torch.tensor([2 / 3, -1 / 3, -1 / 3, -1.0, 1.0]))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("rewards", [[0.1] * 8, [1.0]])
def test_groups_with_nothing_to_compare_get_zero(rewards: list[float], name: str) -> None:
    found = advantages.get(name).function(samples(rewards, [0] * len(rewards)), CONFIG)
    assert torch.equal(found, torch.zeros(len(rewards)))


def tokens(ratios: list[float], values: list[float]) -> Tokens:
    new = torch.tensor(ratios).log().requires_grad_()
    return Tokens(new, torch.zeros(len(ratios)), torch.tensor(values))


def test_ppo_clips_each_side_and_reports_it() -> None:
    #        inside  high   low   helpful sides are free        dual
    given_ = tokens([1.1, 1.5, 0.5, 0.5, 2.0, 4.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    terms = ppo_clip(given_, CONFIG)
    torch.testing.assert_close(terms.loss.detach(), torch.tensor([-1.1, -1.3, 0.8, -0.5, 2.0, 3.0]))
    terms.loss.sum().backward()
    moves = given_.logprobs.grad
    assert moves is not None
    assert (moves != 0).tolist() == [True, False, False, True, True, False]
    found = {name: value.tolist() for name, value in terms.metrics.items()}
    assert found["clip_fraction_high"] == [0, 1, 0, 0, 0, 0]
    assert found["clip_fraction_low"] == [0, 0, 1, 0, 0, 0]
    assert found["clip_fraction_dual"] == [0, 0, 0, 0, 0, 1]
    assert found["clip_fraction"] == [0, 1, 1, 0, 0, 0]


def test_dual_clip_can_be_off() -> None:
    off = CONFIG.model_copy(update={"clip_dual": None})
    assert ppo_clip(tokens([4.0], [-1.0]), off).loss.item() == pytest.approx(4.0)


def test_at_ratio_one_the_gradient_is_that_of_reinforce() -> None:
    given_ = tokens([1.0, 1.0], [0.7, -1.3])
    ppo_clip(given_, CONFIG).loss.sum().backward()
    torch.testing.assert_close(given_.logprobs.grad, torch.tensor([-0.7, 1.3]))


def test_k3_is_the_kl_in_expectation_and_never_negative() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(5).log_softmax(0), torch.randn(5).log_softmax(0)
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * k3(p, q)).sum(), expected)
    assert bool((k3(p, q) >= 0).all())
    assert k3(p, p).abs().max() == 0


def test_entropy_of_a_uniform_distribution() -> None:
    assert entropy(torch.zeros(7)).item() == pytest.approx(math.log(7))


def weights_of(lengths: Any, aggregation: str, **args: Any) -> Any:
    config = AlgorithmSection(aggregation={"name": aggregation, "args": args})
    update = Update(np.asarray(lengths), np.array([7, 7, 9])[: len(lengths)], 100)
    return token_weights(update, aggregations.bound(config.aggregation), config)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), st.sampled_from(["token_mean", "sequence_mean"])
)
def test_weights_of_all_tokens_sum_to_one(lengths: list[int], aggregation: str) -> None:
    counts = np.array(lengths)
    assert float((weights_of(counts, aggregation) * counts).sum()) == pytest.approx(1.0, rel=1e-5)


def test_aggregations_weigh_long_samples_differently() -> None:
    counts = np.array([1, 3, 0])
    assert weights_of(counts, "token_mean").tolist() == pytest.approx([0.25, 0.25, 0.25])
    assert weights_of(counts, "sequence_mean")[:2].tolist() == pytest.approx([1 / 2, 1 / 6])


class TaskMeanArgs(BaseModel):
    scale: float = 1.0


def task_mean(update: Update, config: AlgorithmSection, args: TaskMeanArgs) -> Any:
    """Each task counts the same."""
    totals = np.array([update.lengths[update.groups == group].sum() for group in update.groups])
    return args.scale / (np.maximum(totals, 1) * len(set(update.groups.tolist())))


def wrong_aggregation(update: Update, config: AlgorithmSection) -> Any:
    return update.lengths[:1] / 0.5


def test_a_users_aggregation_comes_by_its_import_path_with_arguments_of_its_own() -> None:
    found = weights_of([1, 3, 4], f"{__name__}:task_mean", scale=2.0)
    assert found.tolist() == pytest.approx([2 / 8, 2 / 8, 2 / 8])
    with pytest.raises(UserError, match=r"^no aggregation 'token_meen'; did you mean 'token_mean'"):
        weights_of([1, 2, 3], "token_meen")
    with pytest.raises(UserError, match=r"^algorithm\.aggregation\.args\.scal: task_mean takes no such argument"):
        weights_of([1, 2, 3], f"{__name__}:task_mean", scal=2.0)
    with pytest.raises(UserError, match=r"gave weights of shape \[1\], not an array \[3\], one for every sample$"):
        weights_of([1, 2, 3], f"{__name__}:wrong_aggregation")


def test_registries_know_the_built_in_names_and_hint_at_them() -> None:
    assert advantages.get("grpo").function is grpo
    assert losses.get("ppo_clip").function is ppo_clip
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        advantages.get("grppo")


def users_loss(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    return ppo_clip(tokens, config)


@losses.register("users_registered_loss", vanishes_with_advantage=True)
def registered_loss(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    return ppo_clip(tokens, config)


def test_a_users_function_comes_by_its_import_path_with_the_flags_it_is_registered_with() -> None:
    assert losses.get(f"{__name__}:users_loss") == LossEntry(users_loss)
    assert losses.get(f"{__name__}:registered_loss") == LossEntry(registered_loss, vanishes_with_advantage=True)
    assert losses.get("users_registered_loss") == losses.get(f"{__name__}:registered_loss")
    with pytest.raises(ValueError, match="there is a loss 'ppo_clip' already"):
        losses.register("ppo_clip")(users_loss)
    with pytest.raises(TypeError, match="needs_values"):
        losses.register("mine", needs_values=True)(users_loss)


def test_a_flag_as_an_attribute_is_still_read_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_loss, "vanishes_with_advantage", True, raising=False)
    with pytest.warns(FutureWarning, match=r"users_loss by `register\(name, vanishes_with_advantage=True\)`.* 0\.3\.0"):
        assert losses.get(f"{__name__}:users_loss").vanishes_with_advantage
    old = f"{__name__}:grpo"
    monkeypatch.setattr(grpo, "wants_values", True, raising=False)
    assert not advantages.get(old).needs_values  # it is registered: its entry counts
