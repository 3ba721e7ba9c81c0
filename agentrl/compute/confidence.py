"""What the critic is told of a sample's tokens so far: how sure the policy was of those that it sampled.

A policy that errs mostly errs by an unlikely token. What is still to come depends on that more than on anything else
that a small critic finds in few steps: on the calculator recipe's first policy these two columns explain 27 % of the
variance of returns after 128 samples, of 39 % that can be explained at all; the backbone by itself 6 % after 2,000.
Only tokens before the one whose state is valued count, so that the value stays a baseline.
"""

import numpy as np
import numpy.typing as npt

from agentrl.compute.batch import Batch

COLUMNS = 2


def doubt(batch: Batch) -> npt.NDArray[np.float32]:
    """Of the sampled tokens before each token of its sample, float32 [T, 2], each in 0..1: 1 - p of the least likely
    of them, and how much less likely all of them together are, min p - prod p. 0 before the first, and where nothing is
    sampled. p is the engine's, of the policy that sampled: exp(`logprobs`)."""
    found = np.zeros((int(batch.offsets[-1]), COLUMNS), np.float32)
    at = np.flatnonzero(batch.tokens["loss_mask"])
    bounds = np.concatenate([[0], np.cumsum(batch.sampled)])
    logprobs = np.minimum(batch.tokens["logprobs"][at].astype(np.float64), 0.0)
    for low, high in zip(bounds[:-1], bounds[1:] - 1, strict=True):
        if high > low:
            before = logprobs[low:high]
            least, all_ = np.exp(np.minimum.accumulate(before)), np.exp(np.cumsum(before))
            found[at[low + 1 : high + 1]] = np.stack([1 - least, least - all_], 1)
    return found
