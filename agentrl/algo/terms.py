"""What advantage estimators and losses are given and give back. Sums over these are exact however they are split."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """The S samples of a step, as an advantage estimator sees them; N sampled tokens in all, sample after sample.

    rewards: float32 [S], the sum of a trajectory's parts, less what a KL to the reference costs where the recipe puts
    that into the reward. groups: int64 [S], equal for the samples of one task.
    lengths: int64 [S], sampled tokens, which sum to N. What tools wrote is not here: it is nobody's action.
    token_rewards: float32 [N], the same rewards at the tokens after which they came; their sum over a sample is its
    reward. values: float32 [N], the critic's, each of the state before its token; None where there is no critic.
    earned: float32 [S], the rewards before a KL was taken off; None where none was.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor
    token_rewards: Tensor | None = None
    values: Tensor | None = None
    earned: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What an estimator gives back that tells the tokens of a sample apart.

    advantages: float32 [N]. returns: float32 [N], what the critic learns to foresee; None where it needs no critic.
    """

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """N sampled tokens of a micro-batch, as a policy loss sees them: float32 [N] each, log-probs natural.

    logprobs: of the model that is trained (with gradient). old: of the weights that sampled, recomputed by the trainer.
    sample: int64 [N], equal for the tokens of one sample; all sampled tokens of a sample are in one micro-batch. None
    where the caller cannot tell.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    sample: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """loss: float32 [N], one a token, not aggregated yet. metrics: name -> float [N], averaged over the tokens."""

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
