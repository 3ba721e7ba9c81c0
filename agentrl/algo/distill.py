"""Distillation: losses that move the policy towards a teacher, on tokens that the policy sampled itself.

The default is the reverse KL of each token's distribution, KL(pi || teacher), given the tokens before it
(arXiv:2306.13649, arXiv:2306.08543). What a token does to later ones is left out: the gradient of the sum over a sample
of these divergences, at fixed beginnings, is an on-policy gradient of every next-token distribution.
"""

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
