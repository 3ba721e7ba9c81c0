"""Advantage estimators: how much better a sample is than what was to be expected of its task."""

import torch
from torch import Tensor

from agentrl.algo.registry import advantages
from agentrl.algo.terms import Samples
from agentrl.recipe.schema import AlgorithmSection

EPSILON = 1e-6  # added to a group's standard deviation


@advantages.register("grpo")
def grpo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Group-relative advantage, one a sample: float32 [S].

    DeepSeekMath (arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r) over the samples of a task, the
    standard deviation being that of the sample (n - 1). With `normalize_std` off it is Dr. GRPO (arXiv:2503.20783),
    equation 4: A_i = r_i - mean(r). A group of one, or of equal rewards, has nothing to compare: 0.
    """
    rewards = samples.rewards.double()
    _, group = torch.unique(samples.groups, return_inverse=True)
    count = torch.bincount(group).double()
    mean = _sum_by_group(rewards, group) / count
    centred = rewards - mean[group]
    variance = _sum_by_group(centred**2, group) / (count - 1).clamp(min=1)
    deviation = variance.sqrt()[group]
    comparable = (count[group] > 1) & (deviation > EPSILON)
    scale = deviation + EPSILON if config.normalize_std else torch.ones_like(deviation)
    return torch.where(comparable, centred / scale, torch.zeros_like(centred)).float()


def _sum_by_group(values: Tensor, group: Tensor) -> Tensor:
    """[S] and indices [S] to sums [G]."""
    return torch.zeros(int(group.max()) + 1, dtype=values.dtype).index_add_(0, group, values)
