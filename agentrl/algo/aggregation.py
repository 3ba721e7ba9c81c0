"""Aggregation of token losses by a weight per token, computed from the whole update before it is split.

The loss of an update is sum(weight * loss) over its sampled tokens. Since the weights are known in advance, the
gradients of micro-batches and workers add up to exactly the same sum, however the samples are distributed.

Samples with advantage 0 count too: without them the weights, and so the optimizer's step, would grow when few samples
have an advantage. Samples without sampled tokens do not count. The weights of means sum to 1 over all tokens.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.algo.registry import aggregations
from agentrl.algo.terms import Update
from agentrl.errors import UserError, call_plugin
from agentrl.recipe.sections.algorithm import AlgorithmSection

Weights = npt.NDArray[np.float64]


@aggregations.register("token_mean")
def token_mean(update: Update, config: AlgorithmSection) -> Weights:
    """Every sampled token counts equally: 1 / tokens of the update (DAPO, arXiv:2503.14476, equation 8)."""
    return np.full(len(update.lengths), 1.0 / max(int(update.lengths.sum()), 1))


@aggregations.register("sequence_mean")
def sequence_mean(update: Update, config: AlgorithmSection) -> Weights:
    """Every sample counts equally: 1 / (samples x tokens of the sample) (GRPO, arXiv:2402.03300, equation 3)."""
    return 1.0 / (np.maximum(update.lengths, 1) * float(_samples(update)))


@aggregations.register("token_sum")
def token_sum(update: Update, config: AlgorithmSection) -> Weights:
    """1: the loss grows with the tokens of an update."""
    return np.ones(len(update.lengths))


@aggregations.register("sequence_sum")
def sequence_sum(update: Update, config: AlgorithmSection) -> Weights:
    """1 / samples: tokens of a sample are summed, as in the policy gradient of whole samples."""
    return np.full(len(update.lengths), 1.0 / _samples(update))


@aggregations.register("constant")
def constant(update: Update, config: AlgorithmSection) -> Weights:
    """1 / (samples x horizon): `sequence_sum` by a constant, so that long samples are not favoured (Dr. GRPO,
    arXiv:2503.20783, section 3.2). Raises ValueError without a horizon."""
    if update.horizon is None:
        raise ValueError("aggregation `constant` needs a horizon")
    return np.full(len(update.lengths), 1.0 / (_samples(update) * update.horizon))


def token_weights(update: Update, aggregation: Any, config: AlgorithmSection) -> npt.NDArray[np.float32]:
    """The weight of each token of a sample, float32 [R], by a function of the registry `aggregations`.

    config: the recipe's `algorithm`. Raises UserError for an error of the function, and where it does not give a finite
    weight for each sample.
    """
    owner = f"algorithm.aggregation {config.aggregation.name!r}"
    found = call_plugin(owner, aggregation, update, config)
    if not isinstance(found, np.ndarray) or found.shape != update.lengths.shape:
        got = f"of shape {list(found.shape)}" if isinstance(found, np.ndarray) else f"of type {type(found).__name__}"
        raise UserError(f"{owner} gave weights {got}, not an array [{len(update.lengths)}], one for every sample")
    if not np.issubdtype(found.dtype, np.number) or not np.isfinite(found).all():
        raise UserError(f"{owner} gave weights that are not finite numbers")
    return found.astype(np.float32)


def _samples(update: Update) -> int:
    return max(int((update.lengths > 0).sum()), 1)
