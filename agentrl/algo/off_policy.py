"""Importance weights that correct for the difference between the engine's and the trainer's probabilities.

The engine uses other kernels and number formats than the trainer and, if rollouts and updates overlap, older weights.
The policy loss is an expectation under `old`, the trainer's probabilities before the update, but the samples come from
the engine's. Each token's loss is therefore multiplied by old / engine, truncated from above to bound the variance:
truncated importance sampling (Ionides 2008; for language models arXiv:2505.24298, section 4, and Yao et al., "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025, with the bound 2).
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from agentrl.algo.loss import LOG_RATIO_LIMIT
from agentrl.recipe.sections.algorithm import RejectSection


class OffPolicy(StrEnum):
    """Values of `algorithm.off_policy`, besides `auto`."""

    NONE = "none"
    """No correction: right if engine and trainer agree in their probabilities and rollouts and updates alternate."""
    TOKEN_TIS = "token_tis"
    """w_t = min(old_t / engine_t, cap): slightly biased, low variance."""
    SEQUENCE_TIS = "sequence_tis"
    """w = min(prod_t old_t / engine_t, cap) for all tokens of a sample: unbiased below the cap, high variance."""
    TOKEN_MASK = "token_mask"
    """w_t = old_t / engine_t if it is within [1 / cap, cap], else 0 (IcePop, Ant Group 2025)."""


def rejected(difference: Tensor, sample: Tensor, group: Tensor, rules: Sequence[RejectSection]) -> Tensor:
    """Which tokens are left out of an update, bool [N].

    difference: the trainer's log-prob less the engine's, [N]. sample, group: int64 [N], equal for the tokens of one
    sample, of one task; all of them are there. rules: the recipe's `algorithm.reject`.

    Rejection by a geometric mean is that of arXiv:2510.18855 and of verl's rollout correction, whose k1 is the
    logarithm of engine over trainer: its bounds are the reciprocals of ours.
    """
    d = difference.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    found = torch.zeros(len(d), dtype=torch.bool)
    for rule in rules:
        value = {"ratio": d, "k2": 0.5 * d.square(), "k3": torch.expm1(d) - d}[rule.by]
        if rule.level != "token":
            value = _together(value, sample if rule.level == "sequence" else group, rule.over)
        low, high = (
            bound if bound is None or rule.by != "ratio" else math.log(bound) for bound in (rule.low, rule.high)
        )
        found |= (value < low) if low is not None else False
        found |= (value > high) if high is not None else False
    return found


def _together(values: Tensor, which: Tensor, over: str) -> Tensor:
    """For each token, the mean, sum, max or min of `values` [N] over the tokens of equal `which` [N]."""
    place = torch.unique(which, return_inverse=True)[1]
    size = int(place.max()) + 1 if len(place) else 0
    reduce = {"mean": "mean", "sum": "sum", "max": "amax", "min": "amin"}[over]
    empty = torch.zeros(size, dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, place, values, reduce, include_self=False)[place]


def sequence_mask(logprobs: Tensor, engine: Tensor, advantages: Tensor, sample: Tensor, most: float) -> Tensor:
    """1 for the tokens whose policy loss counts, 0 for those of samples that are left out: float32 [N].

    Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9): a token of a negative advantage is left
    out where the mean of log engine - log pi over its sample is above `most`. logprobs: under the model being trained,
    engine: natural log-probs [N] of the same tokens; sample: int64 [N], equal for the tokens of one, which must be
    complete.
    """
    moved = _together((engine - logprobs.detach()).float(), sample, "mean")
    return ((advantages >= 0) | (moved <= most)).float()


def importance_weights(old: Tensor, engine: Tensor, sample: Tensor, kind: str, cap: float) -> Tensor:
    """The factor of each token's loss, float32 [N], without gradient.

    old, engine: natural log-probs [N] of the same tokens, from the trainer before the update and from the engine.
    sample: int64 [N], equal for the tokens of one sample; every sample must be complete. kind: a value of `OffPolicy`.
    cap: the bound on the factor. Raises ValueError for an unknown kind.
    """
    log_ratio = (old - engine).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match OffPolicy(kind):
        case OffPolicy.NONE:
            return torch.ones_like(log_ratio)
        case OffPolicy.TOKEN_TIS:
            return log_ratio.exp().clamp(max=cap)
        case OffPolicy.TOKEN_MASK:
            ratio = log_ratio.exp()
            return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)
        case OffPolicy.SEQUENCE_TIS:
            _, which = torch.unique(sample, return_inverse=True)
            total = torch.zeros(int(which.max()) + 1, device=log_ratio.device).index_add(0, which, log_ratio)
            return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)[which]
