"""Estimators, losses, sums and KL against what verl 0.9.1 computes of the same step (`verl_arrays.py` wrote it).

Deliberate differences, and why: verl gives a sample that is alone in its task its reward as advantage (grpo) where ours
is 0, since there is nothing to compare it with; verl's k3 is cut off at 10, where ours keeps its gradient; SAPO's own
aggregation is the recipe's choice here. Tolerance: 1e-5, verl computes in float32.

At the end: losses against what TRL 1.16 computes of that step (`trl_arrays.py` wrote it). What differs there on purpose
is listed in docs/reference/algorithms.md.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algo import advantages, aggregations, losses
from agentrl.algo.aggregation import token_weights
from agentrl.algo.loss import kl_estimate, kl_estimator
from agentrl.algo.off_policy import rejected, sequence_mask
from agentrl.algo.terms import RewardPart, Samples, TokenAdvantages, Tokens, Update
from agentrl.recipe.sections.algorithm import AdvantageSection, AlgorithmSection, LossSection, RejectSection

VERL: dict[str, Any] = json.loads(Path(__file__).with_name("verl_0_9_1.json").read_text())
MASK = torch.tensor(VERL["mask"]).bool()
LENGTHS = MASK.sum(1)
SAMPLE = torch.repeat_interleave(torch.arange(len(MASK)), LENGTHS)
LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "vanilla": ({"name": "ppo_clip"}, "token_mean"),
    "gspo": ({"name": "gspo"}, "sequence_mean"),
    "sapo": ({"name": "sapo"}, "sequence_mean"),
    "gpg": ({"name": "reinforce"}, "token_mean"),
    "geo_mean": ({"name": "gmpo"}, "sequence_mean"),
    "cispo": ({"name": "cispo"}, "token_mean"),
    "dppo_tv": ({"name": "dppo"}, "token_mean"),
    "dppo_kl": ({"name": "dppo", "args": {"divergence": "kl"}}, "token_mean"),
    "dro": ({"name": "dro", "args": {"beta": 0.4}}, "token_mean"),
    "clip_cov": ({"name": "clip_cov", "args": {"share": 1.0, "low": 0.1, "high": 0.6}}, "token_mean"),
    "kl_cov": ({"name": "kl_cov", "args": {"share": 0.2, "kl_coef": 0.5}}, "token_mean"),
}
SUMS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}


def sampled(name: str) -> Tensor:
    """A column of the step at its sampled tokens, [N]."""
    return torch.tensor(VERL[name])[MASK]


def weights_of(aggregation: str) -> Tensor:
    config = AlgorithmSection(aggregation=aggregation)
    update = Update(LENGTHS.numpy(), horizon=MASK.shape[1])
    return torch.from_numpy(token_weights(update, aggregations.bound(config.aggregation), config))


@pytest.mark.parametrize("name", sorted(VERL["advantages"]))
def test_advantages(name: str) -> None:
    samples = Samples(
        rewards=torch.tensor(VERL["scores"]),
        groups=torch.arange(len(MASK)) // VERL["group"],
        lengths=LENGTHS,
        values=sampled("values") if name == "gae" else None,
        logprobs=sampled("old"),
        parts={
            part: RewardPart(torch.tensor(VERL["parts"][part]), torch.full((len(MASK),), weight))
            for part, weight in {"right": 1.0, "brief": 0.25}.items()
        },
    )
    args = {"gae": {"gamma": 0.9, "lam": 0.8}, "reinforce_plus_plus": {"gamma": 0.9}}.get(name, {})
    found = advantages.bound(AdvantageSection(name=name, args=args))(samples, AlgorithmSection())
    each = found.advantages if isinstance(found, TokenAdvantages) else torch.repeat_interleave(found, LENGTHS)
    torch.testing.assert_close(each, torch.tensor(VERL["advantages"][name])[MASK], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    section, aggregation = LOSSES[name]
    low, high = VERL["clip"]
    config = AlgorithmSection(clip_low=low, clip_high=high, loss=LossSection(**section))
    new = sampled("new").requires_grad_()
    given = Tokens(new, sampled("old"), torch.tensor(VERL["advantages"]["grpo"])[MASK], SAMPLE)
    if choose := losses.chooser(config.loss):
        picked = choose(replace(given, logprobs=new.detach()), np.random.default_rng(0), config)
        assert 0 < int(picked.sum()) < len(picked)
        given = replace(given, chosen=picked)
    terms = losses.bound(config.loss)(given, config)
    weights = weights_of(aggregation)[SAMPLE]
    loss = (weights * terms.loss).sum()
    loss.backward()
    wanted = VERL["losses"][name]
    torch.testing.assert_close(loss.detach(), torch.tensor(wanted["loss"]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(new.grad, torch.tensor(wanted["gradient"])[MASK], atol=1e-6, rtol=1e-5)


REJECTIONS: dict[str, dict[str, Any]] = {  # verl's ratio is the engine's over the trainer's
    "token_k1": {"level": "token", "low": 1 / 1.3, "high": 1 / 0.8},
    "token_k2": {"level": "token", "by": "k2", "high": 0.05},
    "token_k3": {"level": "token", "by": "k3", "high": 0.05},
    "seq_sum_k1": {"over": "sum", "low": 1 / 1.5, "high": 1 / 0.6},
    "seq_sum_k3": {"over": "sum", "by": "k3", "high": 0.4},
    "seq_mean_k1": {"low": 1 / 1.1, "high": 1 / 0.9},
    "seq_mean_k2": {"by": "k2", "high": 0.04},
    "seq_max_k2": {"over": "max", "by": "k2", "high": 0.15},
    "seq_max_k3": {"over": "max", "by": "k3", "high": 0.2},
}


@pytest.mark.parametrize("rule", sorted(VERL["rejected"]))
def test_rejection(rule: str) -> None:
    """The reference stands for the trainer here, and old for the engine."""
    rules = [RejectSection(**REJECTIONS[rule])]
    found = rejected(sampled("reference") - sampled("old"), SAMPLE, torch.zeros_like(SAMPLE), rules)
    wanted = torch.tensor(VERL["rejected"][rule])[MASK].bool()
    assert 0 < int(wanted.sum()) < len(wanted)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", SUMS)
def test_sums(mode: str) -> None:
    found = (weights_of(SUMS[mode])[SAMPLE] * sampled("new")).sum()
    torch.testing.assert_close(found, torch.tensor(VERL["sums"][mode]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(VERL["kl"]))
def test_kl(name: str) -> None:
    new = torch.tensor(VERL["new"]).requires_grad_()
    found = kl_estimate(new, torch.tensor(VERL["reference"]), name)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.tensor(VERL["kl"][name]["value"]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(new.grad, torch.tensor(VERL["kl"][name]["gradient"]), atol=1e-6, rtol=1e-5)


TRL: dict[str, Any] = json.loads(Path(__file__).with_name("trl_1_16_0.json").read_text())
TRL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "constant"},
    "dapo": {"aggregation": "token_mean"},
    "cispo": {"loss": "cispo", "aggregation": "token_mean", "clip_low": 1.0},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "luspo": {"loss": "gspo", "aggregation": "sequence_sum"},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean"},
    "grpo with a KL": {"aggregation": "sequence_mean", "kl_coef": 0.1},
    "grpo with an unbiased KL": {"aggregation": "sequence_mean", "kl_coef": 0.1, "kl_estimator": "k3*"},
    "grpo with delta": {"aggregation": "sequence_mean", "clip_dual": 1.4},
    "gspo with delta": {"loss": "gspo", "aggregation": "sequence_mean", "clip_dual": 1.4},
    "grpo with OPSM": {"aggregation": "sequence_mean", "off_policy_mask": 0.1},
    "vespo": {"loss": "vespo", "aggregation": "token_mean"},
}


@pytest.mark.parametrize("name", TRL)
def test_losses_of_trl(name: str) -> None:
    low, high = VERL["clip"]
    config = AlgorithmSection(**{"clip_low": low, "clip_high": high, "clip_dual": None, **TRL_LOSSES[name]})
    new = sampled("new").requires_grad_()
    tokens = Tokens(new, sampled("old"), torch.tensor(VERL["advantages"]["grpo"])[MASK], SAMPLE)
    each = losses.bound(config.loss)(tokens, config).loss
    if config.off_policy_mask is not None:
        mask = sequence_mask(new, tokens.old, tokens.advantages, SAMPLE, config.off_policy_mask)
        each = each * mask
        assert 0 < mask.sum() < len(mask)
    if config.kl_coef:
        each = each + config.kl_coef * kl_estimate(new, sampled("reference"), kl_estimator(config), tokens.old)
    loss = (weights_of(config.aggregation.name)[SAMPLE] * each).sum()
    loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(loss.detach(), torch.tensor(TRL[name]["loss"]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(new.grad, torch.tensor(TRL[name]["gradient"])[MASK], atol=1e-6, rtol=1e-5)
    assert not torch.tensor(TRL[name]["gradient"])[~MASK].any()
