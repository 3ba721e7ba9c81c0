"""Policy losses a token, and the two regularizers. Nothing here knows of batches: `aggregation` weighs the sums."""

import torch
from torch import Tensor

from agentrl.algo.registry import losses
from agentrl.algo.terms import LossTerms, Tokens
from agentrl.recipe.schema import AlgorithmSection

LOG_RATIO_LIMIT = 20.0  # exp of it is still finite in float32; a ratio beyond it is clipped anyway


@losses.register("ppo_clip")
def ppo_clip(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """The clipped surrogate, float32 [N].

    PPO (arXiv:1707.06347), equation 7: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_old. A
    clip_high above clip_low is DAPO's clip-higher (arXiv:2503.14476), equation 10. `clip_dual` = c > 1 is dual-clip PPO
    (arXiv:1912.09729), equation 5: where A < 0 the loss is at most -c A.

    metrics: clip_fraction_high and clip_fraction_low (tokens whose gradient the clip stopped, by side), clip_fraction
    (both), clip_fraction_dual, ratio_mean, approx_kl (k3 against the old policy).
    """
    log_ratio = (tokens.logprobs - tokens.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, advantages = log_ratio.exp(), tokens.advantages
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(free, clipped)
    stopped = clipped > free
    metrics = {
        "clip_fraction": stopped,
        "clip_fraction_high": stopped & (advantages > 0),
        "clip_fraction_low": stopped & (advantages < 0),
    }
    if config.clip_dual is not None:
        ceiling = -config.clip_dual * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        metrics["clip_fraction_dual"] = over
    measured = {name: value.float() for name, value in metrics.items()}
    measured["ratio_mean"] = ratio.detach()
    measured["approx_kl"] = k3(tokens.logprobs.detach(), tokens.old)
    return LossTerms(loss, measured)


ppo_clip.vanishes_with_advantage = True  # type: ignore[attr-defined]


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(pi || reference) by the low-variance estimator k3, one a token: [N], never negative.

    Schulman, "Approximating KL divergence" (2020): r - 1 - log r with r = reference / pi, on tokens sampled from pi;
    GRPO's equation 4 (arXiv:2402.03300).
    """
    log_ratio = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def entropy(logits: Tensor) -> Tensor:
    """H = -sum p log p of a categorical distribution, in nats: [..., V] to [...]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
