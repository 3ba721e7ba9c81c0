"""Importance weights that correct for the difference between the engine's and the trainer's probabilities.

The engine uses other kernels and number formats than the trainer and, if rollouts and updates overlap, older weights.
The policy loss is an expectation under `old`, the trainer's probabilities before the update, but the samples come from
the engine's. Each token's loss is therefore multiplied by old / engine, truncated from above to bound the variance:
truncated importance sampling (Ionides 2008; for language models arXiv:2505.24298, section 4, and Yao et al., "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025, with the bound 2).
"""

from enum import StrEnum

import torch
from torch import Tensor

from agentrl.algo.loss import LOG_RATIO_LIMIT


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


def importance_weights(old: Tensor, engine: Tensor, sample: Tensor, kind: str, cap: float) -> Tensor:
    """Return the factor of each token's loss, float32 [N], without gradient.

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
