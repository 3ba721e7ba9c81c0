"""Aggregation of token losses by a weight per token, computed from the whole update before it is split.

The loss of an update is sum(weight * loss) over its sampled tokens. Since the weights are known in advance, the
gradients of micro-batches and workers add up to exactly the same sum, however the samples are distributed.
"""

from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Aggregation(StrEnum):
    """Values of `algorithm.aggregation`."""

    TOKEN_MEAN = "token_mean"
    """Every sampled token counts equally: 1 / tokens of the update (DAPO, arXiv:2503.14476, equation 8)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every sample counts equally: 1 / (samples x tokens of the sample) (GRPO, arXiv:2402.03300, equation 3)."""
    TOKEN_SUM = "token_sum"
    """1: the loss grows with the tokens of an update."""
    SEQUENCE_SUM = "sequence_sum"
    """1 / samples: tokens of a sample are summed, as in the policy gradient of whole samples."""
    CONSTANT = "constant"
    """1 / (samples x horizon): SEQUENCE_SUM by a constant, so that long samples are not favoured (Dr. GRPO,
    arXiv:2503.20783, section 3.2)."""


def token_weights(
    lengths: npt.NDArray[np.int64], aggregation: str, horizon: int | None = None
) -> npt.NDArray[np.float32]:
    """Return the weight of each token of a sample, float32 [S].

    lengths: int64 [S], the sampled tokens of each sample of the WHOLE update. aggregation: a value of `Aggregation`.
    horizon: the most tokens that a sample may have, which `constant` divides by.
    Samples with advantage 0 count too: without them the weights, and so the optimizer's step, would grow when few
    samples have an advantage. Samples without sampled tokens do not count. The weights of means sum to 1 over all
    tokens. Raises ValueError for an unknown aggregation, and for `constant` without a horizon.
    """
    filled = np.maximum(lengths, 1).astype(np.float64)
    samples = max(int((lengths > 0).sum()), 1)
    match Aggregation(aggregation):
        case Aggregation.TOKEN_MEAN:
            weights = np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))
        case Aggregation.SEQUENCE_MEAN:
            weights = 1.0 / (filled * samples)
        case Aggregation.TOKEN_SUM:
            weights = np.ones(len(lengths))
        case Aggregation.SEQUENCE_SUM:
            weights = np.full(len(lengths), 1.0 / samples)
        case Aggregation.CONSTANT:
            if horizon is None:
                raise ValueError("aggregation `constant` needs a horizon")
            weights = np.full(len(lengths), 1.0 / (samples * horizon))
    return weights.astype(np.float32)
