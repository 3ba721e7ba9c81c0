"""Importance weights, what they do to the update, and what is said of the mismatch."""

import math

import numpy as np
import pytest
import torch
from learner_help import REWARDS, alone, make_groups, make_model, make_recipe

from agentrl.algo.off_policy import importance_weights, sequence_mask
from agentrl.compute.batch import Batch
from agentrl.learner.actor import off_policy_of
from agentrl.recipe.schema import Recipe
from agentrl.trajectory import Group

OLD = torch.tensor([-1.0, -2.0, -1.0, -3.0, -0.5])
ENGINE = torch.tensor([-1.5, -1.0, -1.0, -5.0, -0.5])  # ratios e^.5, e^-1, 1, e^2, 1
SAMPLE = torch.tensor([0, 0, 4, 4, 4])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("token_tis", [math.e**0.5, 1 / math.e, 1, 2, 1]),
        ("token_mask", [math.e**0.5, 0, 1, 0, 1]),
        ("sequence_tis", [math.e**-0.5, math.e**-0.5, 2, 2, 2]),
    ],
)
def test_weights(kind, expected):
    assert importance_weights(OLD, ENGINE, SAMPLE, kind, 2.0).tolist() == pytest.approx(expected)


def test_weights_carry_no_gradient_and_stay_finite():
    old = torch.tensor([0.0, -500.0], requires_grad=True)
    weights = importance_weights(old, torch.tensor([-500.0, 0.0]), torch.tensor([0, 1]), "token_tis", 1e30)
    assert not weights.requires_grad
    assert torch.isfinite(weights).all()


def with_engine_logprobs(groups, found, shift):
    """The groups as an engine would have sampled them whose log-probs are the trainer's plus `shift`."""
    made, at = [], 0
    for group in groups:
        trajectories = []
        for t in group.trajectories:
            t.logprobs[:] = np.where(t.loss_mask, found[at : at + len(t.ids)] + shift, 0)
            at += len(t.ids)
            trajectories.append(t)
        made.append(Group(group.task, tuple(trajectories)))
    return made


def learned(kind, shift, micro=10_000, cap=2.0):
    """The gradient norm and metrics of one update on what an engine `shift` nats away sampled."""
    model, groups = make_model(), make_groups(REWARDS)
    recipe = make_recipe({"off_policy": kind, "off_policy_cap": cap}, micro_batch_tokens=micro)
    learner = alone(model, recipe)
    found = learner.actor.logprobs(Batch.from_groups(groups))
    return learner.learn(with_engine_logprobs(groups, found, shift))


@pytest.mark.parametrize("kind", ["token_tis", "token_mask"])
def test_the_gradient_is_scaled_by_the_weight(kind):
    plain = learned("none", -0.3)["train/grad_norm"]
    assert learned(kind, -0.3)["train/grad_norm"] == pytest.approx(plain * math.e**0.3, rel=1e-4)
    assert learned(kind, 0.3)["train/grad_norm"] == pytest.approx(plain * math.e**-0.3, rel=1e-4)


def test_truncation_masking_and_the_whole_sample():
    plain = learned("none", -1.0)["train/grad_norm"]
    assert learned("token_tis", -1.0)["train/grad_norm"] == pytest.approx(2 * plain, rel=1e-4)
    assert learned("token_mask", -1.0)["train/grad_norm"] == 0
    assert learned("sequence_tis", -1.0)["train/grad_norm"] == pytest.approx(2 * plain, rel=1e-4)


def test_sequence_weights_do_not_depend_on_micro_batches():
    whole, parts = learned("sequence_tis", 0.05, cap=10), learned("sequence_tis", 0.05, micro=40, cap=10)
    assert whole["train/grad_norm"] == pytest.approx(parts["train/grad_norm"], rel=1e-5)
    assert whole["mismatch/ess"] == pytest.approx(parts["mismatch/ess"])


def test_metrics_of_the_mismatch():
    same, near = learned("token_tis", 0.0), learned("token_tis", -1.0)
    assert same["mismatch/logprob_max"] < 1e-5
    assert same["mismatch/kl"] == pytest.approx(0, abs=1e-9)
    assert (same["mismatch/ess"], same["mismatch/weight_cut"]) == (pytest.approx(1), 0)
    assert near["mismatch/logprob_mean"] == pytest.approx(1, rel=1e-4)
    assert near["mismatch/kl"] == pytest.approx(math.e - 2, rel=1e-4)
    assert (near["mismatch/weight_mean"], near["mismatch/weight_cut"]) == (pytest.approx(2), 1)
    assert learned("none", -1.0)["mismatch/weight_cut"] == 0


def test_auto_corrects_where_engine_and_trainer_are_apart():
    def kind(**sections):
        return off_policy_of(Recipe.model_validate(sections))

    assert kind() == "none"
    assert kind(engine={"name": "sglang"}) == "token_tis"
    assert kind(rollout={"overlap": "async"}) == "token_tis"
    assert kind(engine={"name": "sglang"}, algorithm={"off_policy": "none"}) == "none"


def test_what_is_rejected_counts_in_no_weight():
    """Samples of one task, moved apart by hand: the gradient is that of the update without them."""
    model, groups = make_model(), make_groups(REWARDS)
    actor = alone(model, make_recipe({})).actor
    groups = with_engine_logprobs(groups, actor.logprobs(Batch.from_groups(groups)), 0.0)
    for t in groups[0].trajectories:
        t.logprobs[t.loss_mask == 1] -= 0.2
    odd = groups[1].trajectories[1]
    odd.logprobs[odd.turns[0].start] += 10  # one token that the trainer finds all but impossible

    def found(*rules, of=groups, **train):
        return alone(make_model(), make_recipe({"reject": rules, "aggregation": "sequence_mean"}, **train)).learn(of)

    without = found(of=groups[1:])
    whole = found({"level": "group", "high": 1.1})
    assert whole["train/grad_norm"] == pytest.approx(without["train/grad_norm"], rel=1e-5)
    assert whole["mismatch/rejected_samples"] == pytest.approx(1 / len(groups))
    assert found({"level": "group", "high": 1.1}, micro_batch_tokens=1)["train/grad_norm"] == pytest.approx(
        whole["train/grad_norm"], rel=1e-5
    )
    veto = found({"over": "min", "low": 1e-4})
    assert veto["mismatch/rejected_samples"] == pytest.approx(1 / Batch.from_groups(groups).sampled.size)
    token = found({"level": "token", "low": 1e-4})
    assert token["mismatch/rejected_tokens"] == pytest.approx(1 / Batch.from_groups(groups).sampled.sum())
    assert token["mismatch/rejected_samples"] == 0
    assert found({"low": 10.0})["train/updates"] == 0, "nothing is left"
    with pytest.raises(ValueError, match="without a bound nothing is left out"):
        make_recipe({"reject": [{"level": "token"}]})


def test_samples_that_the_policy_has_left_keep_what_speaks_for_them() -> None:
    """Of mean log engine - log pi: 0.3, 0.05 and 0.3, where the last is as good as the others."""
    moved = torch.tensor([0.6, 0.0, 0.05, 0.05, 0.3])
    advantages, sample = torch.tensor([-1.0, -1.0, -1.0, -1.0, 0.0]), torch.tensor([4, 4, 7, 7, 9])
    logprobs = torch.full((5,), -2.0)
    for most, kept in ((0.1, [0, 0, 1, 1, 1]), (0.01, [0, 0, 0, 0, 1]), (0.4, [1, 1, 1, 1, 1])):
        assert sequence_mask(logprobs, logprobs + moved, advantages, sample, most).tolist() == kept
