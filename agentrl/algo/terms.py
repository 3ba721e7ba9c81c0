"""What advantage estimators and losses are given and give back. Sums over these are exact however they are split."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """The S samples of a step, as an advantage estimator sees them.

    rewards: float32 [S], the sum of a trajectory's parts. groups: int64 [S], equal for the samples of one task.
    lengths: int64 [S], sampled tokens.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """N sampled tokens of a micro-batch, as a policy loss sees them: float32 [N] each, log-probs natural.

    logprobs: of the model that is trained (with gradient). old: of the weights that sampled, recomputed by the trainer.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """loss: float32 [N], one a token, not aggregated yet. metrics: name -> float [N], averaged over the tokens."""

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
