"""Advantage estimators that compare the samples of a task: one number per sample, for all of its tokens."""

import torch
from torch import Tensor

from agentrl.algo.registry import advantages
from agentrl.algo.terms import Samples
from agentrl.recipe.schema import AlgorithmSection

EPSILON = 1e-6  # added to a standard deviation; one that is not larger than this is rounding


@advantages.register("grpo")
def grpo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Group-relative advantage, one a sample: float32 [S]. Reads nothing of the recipe.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r) over the samples of a task, the
    standard deviation being that of the sample (n - 1). A group of one, or of equal rewards, has nothing to compare: 0.

    Where a KL is subtracted from the rewards, std is that of the rewards before it: divided by their own deviation, the
    KLs of a group that is equal otherwise, be they no more than rounding, would count as much as right against wrong.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    deviation = groups.deviation(earned(samples))
    centred = rewards - groups.mean(rewards)
    return torch.where(deviation > EPSILON, centred / (deviation + EPSILON), torch.zeros_like(centred)).float()


@advantages.register("dr_grpo")
def dr_grpo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """The reward above the mean of its task, one a sample: float32 [S]. Reads nothing of the recipe.

    Dr. GRPO (arXiv:2503.20783), equation 4: A_i = r_i - mean(r); hard and easy tasks weigh no more than others do. A
    group of one, or of equal rewards: 0.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    centred = rewards - groups.mean(rewards)
    return torch.where(groups.deviation(rewards) > EPSILON, centred, torch.zeros_like(centred)).float()


@advantages.register("rloo")
def rloo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """REINFORCE leave-one-out, one a sample: float32 [S]. Reads nothing of the recipe.

    "Back to Basics" (arXiv:2402.14740), section 3.2: A_i = r_i - mean of the k - 1 other samples of the task. A group
    of one has no others: 0.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    others = (groups.total(rewards) - rewards) / (groups.count - 1).clamp(min=1)
    return torch.where(groups.count > 1, rewards - others, torch.zeros_like(rewards)).float()


@advantages.register("opo")
def opo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Advantage over the baseline of least variance, one a sample: float32 [S]. Reads nothing of the recipe.

    OPO (arXiv:2505.23585), section 3: b = sum(l_i r_i) / sum(l_i) over the samples of a task, l_i being their sampled
    tokens (a long sample's gradient is larger, so its reward counts more); A_i = r_i - b. The paper makes one update a
    step. A group of one: 0.
    """
    groups = Groups(samples.groups)
    rewards, lengths = samples.rewards.double(), samples.lengths.double()
    baseline = groups.total(rewards * lengths) / groups.total(lengths).clamp(min=1)
    return torch.where(groups.count > 1, rewards - baseline, torch.zeros_like(rewards)).float()


@advantages.register("grpo_passk")
def grpo_passk(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Advantage for the best of a task's k samples, one a sample: float32 [S].

    "Optimizing language models for inference time objectives" (arXiv:2503.19595), section 3, with max as the objective
    of k samples: what the maximum loses when a sample is left out, so r_max - r_second for the best and 0 for all
    others; where two are best, 0. Divided by the group's standard deviation, as `grpo` does and with its rule for a
    KL in the rewards. Reads nothing of the recipe.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    ahead = rewards - groups.best_of_others(rewards)
    deviation = groups.deviation(earned(samples))
    leads = (deviation > EPSILON) & (ahead > EPSILON)
    return torch.where(leads, ahead / (deviation + EPSILON), torch.zeros_like(rewards)).float()


def earned(samples: Samples) -> Tensor:
    """Return the rewards before a KL was subtracted from them, float64 [S]."""
    return (samples.rewards if samples.earned is None else samples.earned).double()


class Groups:
    """Statistics over the samples of each task, repeated for each of them: methods take and return float64 [S].

    count: float64 [S], the number of samples of each sample's task.
    """

    def __init__(self, groups: Tensor) -> None:
        self._of = torch.unique(groups, return_inverse=True)[1]
        self.count = self.total(torch.ones(len(groups), dtype=torch.float64))

    def total(self, values: Tensor) -> Tensor:
        sums = torch.zeros(len(self._of), dtype=torch.float64).index_add_(0, self._of, values)
        return sums[self._of]

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.count

    def deviation(self, values: Tensor) -> Tensor:
        """Return the sample standard deviation (n - 1); 0 for a group of one."""
        squares = self.total((values - self.mean(values)) ** 2)
        return (squares / (self.count - 1).clamp(min=1)).sqrt()

    def best(self, values: Tensor) -> Tensor:
        """Return the maximum over the samples of the task."""
        nothing = torch.full((len(self._of),), -torch.inf, dtype=torch.float64)
        return nothing.scatter_reduce(0, self._of, values, "amax")[self._of]

    def best_of_others(self, values: Tensor) -> Tensor:
        """Return the maximum over the other samples of the task; -inf where there are none."""
        best = self.best(values)
        is_best = values == best
        alone = self.total(is_best.double()) == 1
        second = self.best(torch.where(is_best, -torch.inf, values))
        return torch.where(is_best & alone, second, best)
