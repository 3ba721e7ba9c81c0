"""PF-PPO: PPO's advantages weighted by a sample's rank within its task, because rewards in the middle are unreliable.

PF-PPO (arXiv:2409.06957) ranks the N samples of a task by reward, draws some of them with probabilities w by rank, and
learns from those. Here nothing is drawn: a sample's advantages are multiplied by N x w, which in a policy loss equals
the draw in expectation. Samples of equal rank share their weight; if all rewards of a task are equal, every weight is
1. The critic learns from every sample.
"""

import torch
from torch import Tensor

from agentrl.algo.advantage import Groups, earned
from agentrl.algo.registry import advantages
from agentrl.algo.returns import gae
from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.recipe.schema import AlgorithmSection


@advantages.register("pf_ppo_best_worst", needs_values=True)
def best_worst(samples: Samples, config: AlgorithmSection) -> TokenAdvantages:
    """The paper's BW: `gae` with half of a task's weight on its best sample and half on its worst."""
    groups, rewards = Groups(samples.groups), earned(samples)
    best, worst = rewards == groups.best(rewards), rewards == -groups.best(-rewards)
    return _weighted(samples, config, (_share(groups, best) + _share(groups, worst)) / 2)


@advantages.register("pf_ppo_best_random", needs_values=True)
def best_random(samples: Samples, config: AlgorithmSection) -> TokenAdvantages:
    """The paper's BR: `gae` with half of a task's weight on its best sample and half spread over the others."""
    groups, rewards = Groups(samples.groups), earned(samples)
    best = rewards == groups.best(rewards)
    all_equal = groups.total(best.double()) == groups.count
    return _weighted(samples, config, torch.where(all_equal, 1.0, (_share(groups, best) + _share(groups, ~best)) / 2))


def _share(groups: Groups, chosen: Tensor) -> Tensor:
    """Return N / (chosen samples of the task) for each chosen sample, 0 for the others: float64 [S]."""
    chosen = chosen.double()
    return chosen * groups.count / groups.total(chosen).clamp(min=1)


def _weighted(samples: Samples, config: AlgorithmSection, weights: Tensor) -> TokenAdvantages:
    """Return the advantages of `gae` times `weights`, float64 [S]: N x w, whose mean over a task is 1."""
    found = gae(samples, config)
    each = torch.repeat_interleave(weights, samples.lengths)
    return TokenAdvantages((found.advantages.double() * each).float(), found.returns)
