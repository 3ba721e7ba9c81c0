"""Distillation: losses that move the policy towards a teacher, on tokens that the policy sampled itself.

The default is the reverse KL of each token's distribution, KL(pi || teacher), given the tokens before it
(arXiv:2306.13649, arXiv:2306.08543). What a token does to later ones is left out: the gradient of the sum over a sample
of these divergences, at fixed beginnings, is an on-policy gradient of every next-token distribution.
"""

import torch
from torch import Tensor

from agentrl.algo.loss import LOG_RATIO_LIMIT


def sampled_reverse_kl(logprobs: Tensor, old: Tensor, teacher: Tensor) -> Tensor:
    """Return the loss [N] of sampled tokens whose expected gradient is that of KL(pi || teacher).

    It is a policy gradient with the detached reward log teacher - log pi. The log-ratio log pi - log teacher itself is
    an unbiased estimate of the KL, but no loss: its expected gradient, sum_a pi(a) grad log pi(a), is 0. The ratio
    pi / old corrects for weights that moved since the tokens were sampled.

    logprobs: under the model being trained, with gradient; old: before the step; teacher: natural log-probs [N] of the
    same tokens. The reward is bounded by LOG_RATIO_LIMIT, since a teacher may give a token no probability at all.
    """
    reward = (teacher - logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return -reward * (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def bucketed_reverse_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(pi || teacher) [N] over K tokens of each distribution and all others as one bucket.

    It is exact on these K + 1 outcomes and no more than the KL of the whole vocabulary. Its gradient needs no samples.

    logprobs: [N, K], with gradient; teacher: natural log-probs [N, K] of the same tokens. A token at which the
    teacher's is -inf is not one of the K.
    """
    there = teacher > -torch.inf
    ours, theirs = (each.masked_fill(~there, -torch.inf) for each in (logprobs, teacher))
    gap = torch.where(there, logprobs - teacher, 0.0)
    rest, rest_of_teacher = _log_rest(ours), _log_rest(theirs)
    return (ours.exp() * gap).sum(-1) + rest.exp() * (rest - rest_of_teacher)


def _log_rest(logprobs: Tensor) -> Tensor:
    """Return the log-probability [N] of what is not among the K tokens [N, K]; at least -LOG_RATIO_LIMIT."""
    least = torch.finfo(logprobs.dtype).eps if logprobs.dtype != torch.float32 else 1e-7
    total = logprobs.logsumexp(-1).clamp(max=-least)
    return torch.log(-torch.expm1(total)).clamp(min=-LOG_RATIO_LIMIT)
