"""The arguments and results of advantage estimators and losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Update:
    """The R samples of one optimizer update, as an aggregation receives them."""

    lengths: npt.NDArray[np.int64]
    """int64 [R]: number of sampled tokens of each sample; 0 for one without any, which does not count."""
    groups: npt.NDArray[np.int64] | None = None
    """int64 [R]: equal for the samples of one task; None if the caller does not know."""
    horizon: int | None = None
    """`rollout.max_tokens`: no sample has more tokens."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The S samples of a step, as an advantage estimator receives them, with N sampled tokens, sample after sample.

    Tokens of prompts and tool results are left out.
    """

    rewards: Tensor
    """float32 [S]: the weighted sum of a trajectory's reward parts, minus the KL to the reference if
    `kl_in: reward`."""
    groups: Tensor
    """int64 [S]: equal for the samples of one task."""
    lengths: Tensor
    """int64 [S]: number of sampled tokens of each sample; the sum is N."""
    token_rewards: Tensor | None = None
    """float32 [N]: each reward at the token after which it was given; the sum over a sample is its reward. None: the
    whole reward is at the last token."""
    values: Tensor | None = None
    """float32 [N]: the critic's value of the state before each token; None without a critic."""
    earned: Tensor | None = None
    """float32 [S]: the rewards before the KL was subtracted; None if no KL was subtracted."""
    logprobs: Tensor | None = None
    """float32 [N]: the engine's log-prob of each token."""
    parts: Mapping[str, "RewardPart"] | None = None
    """The reward parts by name; None unless the estimator is registered with `needs_parts`."""
    turns: Tensor | None = None
    """int64 [N]: the number (0, 1, ...) of each token's turn in its rollout; None unless the estimator is registered
    with `needs_turns`."""
    states: Tensor | None = None
    """int64 [N]: equal for turns of a task that began in the same state; None unless the estimator is registered with
    `needs_states`."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One part of the rewards of a step's samples."""

    values: Tensor
    """float32 [S]: before weighting; 0 for a sample without the part."""
    weights: Tensor
    """float32 [S]: the weight of the part in each sample's reward."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """The result of an estimator with one advantage per token."""

    advantages: Tensor
    """float [N]: the advantage of each sampled token."""
    returns: Tensor | None = None
    """float [N]: the critic's targets; None without a critic."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The N sampled tokens of a micro-batch, as a policy loss receives them. Log-probs are natural logarithms."""

    logprobs: Tensor
    """float32 [N]: log-probs under the model being trained, with gradient."""
    old: Tensor
    """float32 [N]: log-probs under the weights at the start of the step, computed by the trainer."""
    advantages: Tensor
    """float32 [N]: the advantage of each token."""
    sample: Tensor | None = None
    """int64 [N]: equal for the tokens of one sample, all of which are in one micro-batch; None if the caller does not
    know."""
    chosen: Tensor | None = None
    """float32 [N]: what the loss's `choose` gave each token, of the whole update; None for a loss without one."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The result of a policy loss."""

    loss: Tensor
    """float [N]: the loss of each token, before aggregation."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> float [N]: averaged over the tokens and logged as train/<name>."""
