"""The arguments and results of advantage estimators and losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """The S samples of a step, as an advantage estimator sees them; N sampled tokens in all, sample after sample.

    Tokens that tools wrote are left out.
    """

    rewards: Tensor
    """float32 [S]: the sum of a trajectory's parts, less the KL to the reference under `kl_in: reward`."""
    groups: Tensor
    """int64 [S]: equal for the samples of one task."""
    lengths: Tensor
    """int64 [S]: sampled tokens of each sample, which sum to N."""
    token_rewards: Tensor | None = None
    """float32 [N]: the rewards at the tokens after which they were given; their sum over a sample is its reward. None:
    all of it with the last token."""
    values: Tensor | None = None
    """float32 [N]: the critic's value of the state before each token; None where there is no critic."""
    earned: Tensor | None = None
    """float32 [S]: the rewards before a KL was subtracted; None where none was."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Result of an estimator with one advantage per token."""

    advantages: Tensor
    """float [N]."""
    returns: Tensor | None = None
    """float [N]: what the critic learns to predict; None without a critic."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """N sampled tokens of a micro-batch, as a policy loss sees them. Log-probs are natural."""

    logprobs: Tensor
    """float32 [N]: of the model that is trained, with gradient."""
    old: Tensor
    """float32 [N]: of the weights that sampled, recomputed by the trainer."""
    advantages: Tensor
    """float32 [N]."""
    sample: Tensor | None = None
    """int64 [N]: equal for the tokens of one sample, all of whose sampled tokens are in one micro-batch; None where the
    caller cannot tell."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Result of a loss."""

    loss: Tensor
    """float [N]: one per token, not aggregated yet."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> float [N]: averaged over the tokens into train/<name>."""
