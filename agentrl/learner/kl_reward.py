"""The KL to the reference as a part of the reward, of the policy as it was when the step began."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.compute.batch import Batch
from agentrl.learner.advantages import sums

Floats = npt.NDArray[np.float32]


def with_kl_penalty(batch: Batch, actor: Any, reference: Any, coefficient: float) -> Batch:
    """With the token columns `old_logprobs`, `reference_logprobs` and `kl_penalty`, coefficient x (old - reference):
    float32 [T], 0 where nothing was sampled.

    Ziegler et al. (arXiv:1909.08593), equation 2, token by token, as REINFORCE++ (arXiv:2501.03262) does. The
    difference is the estimator k1 of Schulman, "Approximating KL divergence" (2020): unbiased, and of either sign. Its
    sum over a sample is the log-ratio of the sample as a whole.

    actor, reference: have `logprobs(batch)`; see `RoleHost`.
    """
    sampled = batch.sampled > 0
    old, frozen = (scattered(batch, sampled, role.logprobs) for role in (actor, reference))
    penalty = np.float32(coefficient) * (old - frozen)
    return batch.with_tokens(old_logprobs=old, reference_logprobs=frozen, kl_penalty=penalty)


def penalty_metrics(batch: Batch) -> dict[str, float]:
    """reward/kl_penalty: the mean over the samples of what was taken off; nothing where the batch has no penalty."""
    if "kl_penalty" not in batch.tokens:
        return {}
    return {"reward/kl_penalty": float(sums(batch, batch.tokens["kl_penalty"]).sum()) / max(1, len(batch))}


def scattered(batch: Batch, chosen: npt.NDArray[np.bool_], compute: Callable[[Batch], Floats]) -> Floats:
    """compute(the chosen samples) as a token column of the whole batch, 0 for the others; not called for none."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    if chosen.any():
        found[np.repeat(chosen, batch.lengths)] = compute(batch.select(np.flatnonzero(chosen)))
    return found
