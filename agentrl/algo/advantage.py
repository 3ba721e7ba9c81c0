"""Advantage estimators that compare the samples of a task: one advantage per sample, used for all of its tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algo.registry import advantages
from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.recipe.sections.algorithm import AlgorithmSection

EPSILON = 1e-6  # added to a standard deviation; a deviation up to this size counts as rounding error


@advantages.register("grpo")
def grpo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Group-relative advantage, one per sample: float32 [S]. Reads no recipe keys.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r) over the samples of a task, with the
    sample standard deviation (n - 1). In a group of one, or of equal rewards, every advantage is 0.

    If a KL is subtracted from the rewards, std is that of the rewards before the subtraction. Otherwise, in a group
    whose rewards are equal but for the KL, KL differences as small as rounding errors would be scaled up to the size of
    the difference between right and wrong answers.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    deviation = groups.deviation(earned(samples))
    centred = rewards - groups.mean(rewards)
    return torch.where(deviation > EPSILON, centred / (deviation + EPSILON), torch.zeros_like(centred)).float()


@advantages.register("dr_grpo")
def dr_grpo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Reward minus the mean reward of the task, one per sample: float32 [S]. Reads no recipe keys.

    Dr. GRPO (arXiv:2503.20783), equation 4: A_i = r_i - mean(r), so that very easy and very hard tasks get no extra
    weight. In a group of one, or of equal rewards, every advantage is 0.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    centred = rewards - groups.mean(rewards)
    return torch.where(groups.deviation(rewards) > EPSILON, centred, torch.zeros_like(centred)).float()


@advantages.register("rloo")
def rloo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """REINFORCE leave-one-out advantage, one per sample: float32 [S]. Reads no recipe keys.

    "Back to Basics" (arXiv:2402.14740), section 3.2: A_i = r_i - mean of the k - 1 other samples of the task. In a
    group of one the advantage is 0.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    others = (groups.total(rewards) - rewards) / (groups.count - 1).clamp(min=1)
    return torch.where(groups.count > 1, rewards - others, torch.zeros_like(rewards)).float()


@advantages.register("opo")
def opo(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Reward minus the minimum-variance baseline, one per sample: float32 [S]. Reads no recipe keys.

    OPO (arXiv:2505.23585), section 3: b = sum(l_i r_i) / sum(l_i) over the samples of a task, where l_i is the number
    of sampled tokens (a longer sample has a larger gradient, so its reward counts more); A_i = r_i - b. The paper makes
    one update per step. In a group of one the advantage is 0.
    """
    groups = Groups(samples.groups)
    rewards, lengths = samples.rewards.double(), samples.lengths.double()
    baseline = groups.total(rewards * lengths) / groups.total(lengths).clamp(min=1)
    return torch.where(groups.count > 1, rewards - baseline, torch.zeros_like(rewards)).float()


@advantages.register("grpo_passk")
def grpo_passk(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Advantage for pass@k training, one per sample: float32 [S]. Reads no recipe keys.

    "Optimizing language models for inference time objectives" (arXiv:2503.19595), section 3, with the maximum reward of
    the k samples as the objective: a sample's advantage is the decrease of the maximum when the sample is left out, so
    r_max - r_second for the best sample and 0 for all others; 0 for all if two are best. Divided by the group's
    standard deviation as in `grpo`, also where a KL is subtracted from the rewards.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    ahead = rewards - groups.best_of_others(rewards)
    deviation = groups.deviation(earned(samples))
    leads = (deviation > EPSILON) & (ahead > EPSILON)
    return torch.where(leads, ahead / (deviation + EPSILON), torch.zeros_like(rewards)).float()


@advantages.register("gpg")
def gpg(samples: Samples, config: AlgorithmSection) -> Tensor:
    """Reward minus the mean reward of the task, larger where few samples earn anything: float32 [S]. Reads no recipe
    keys.

    GPG (arXiv:2504.02546), equation 6: A_i = alpha (r_i - mean(r)), alpha = S / (samples of the step whose reward is
    not 0). The paper's loss is `reinforce`. In a group of one the mean is 0, as in the authors' code.
    """
    groups = Groups(samples.groups)
    rewards = samples.rewards.double()
    mean = torch.where(groups.count > 1, groups.mean(rewards), torch.zeros_like(rewards))
    alpha = len(rewards) / max(1, int((rewards != 0).sum()))
    return (alpha * (rewards - mean)).float()


@advantages.register("gdpo", needs_parts=True)
def gdpo(samples: Samples, config: AlgorithmSection) -> TokenAdvantages:
    """Each reward part compared within the task by itself, then whitened over the step: one per token.

    GDPO (arXiv:2601.05242), equations 4 to 6: A_i = sum over the parts k of w_k (r_ik - mean(r_k)) / std(r_k), with the
    weights of the parts in `rewards.weights`; then centred over all tokens of the step and divided by their standard
    deviation. A part of small spread counts as much as one of large spread. Reads no recipe keys. Raises ValueError
    without `Samples.parts`, and where a KL was subtracted from the rewards, which is no part (use `kl_in: loss`).
    """
    if samples.parts is None:
        raise ValueError("gdpo needs the parts of the rewards")
    if samples.earned is not None:
        raise ValueError("gdpo compares reward parts, of which a KL is none: use `algorithm.kl_in: loss`")
    found = torch.zeros(len(samples.rewards), dtype=torch.float64)
    for part in samples.parts.values():
        found += part.weights.double() * grpo(replace(samples, rewards=part.values), config).double()
    return TokenAdvantages(whitened(torch.repeat_interleave(found, samples.lengths)).float())


def whitened(values: Tensor) -> Tensor:
    """Shift and scale values [N] to mean 0 and standard deviation 1; all 0 if the values are equal."""
    centred = values - values.mean() if len(values) else values
    deviation = (centred.square().sum() / max(1, len(values) - 1)).sqrt()
    if deviation <= EPSILON:
        return torch.zeros_like(values)
    return centred / (deviation + EPSILON)


def earned(samples: Samples) -> Tensor:
    """The rewards before any KL was subtracted, float64 [S]."""
    return (samples.rewards if samples.earned is None else samples.earned).double()


class Groups:
    """Statistics over the samples of each task. Methods take one value per sample, float64 [S], and return for each
    sample the statistic of its task, float64 [S].

    groups: int64 [S], equal for the samples of one task.
    """

    def __init__(self, groups: Tensor) -> None:
        self._of = torch.unique(groups, return_inverse=True)[1]
        self.count = self.total(torch.ones(len(groups), dtype=torch.float64))
        """float64 [S]: the number of samples of each sample's task."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over the samples of the task."""
        sums = torch.zeros(len(self._of), dtype=torch.float64).index_add_(0, self._of, values)
        return sums[self._of]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the samples of the task."""
        return self.total(values) / self.count

    def deviation(self, values: Tensor) -> Tensor:
        """The sample standard deviation (n - 1); 0 for a group of one."""
        squares = self.total((values - self.mean(values)) ** 2)
        return (squares / (self.count - 1).clamp(min=1)).sqrt()

    def best(self, values: Tensor) -> Tensor:
        """The maximum over the samples of the task."""
        nothing = torch.full((len(self._of),), -torch.inf, dtype=torch.float64)
        return nothing.scatter_reduce(0, self._of, values, "amax")[self._of]

    def best_of_others(self, values: Tensor) -> Tensor:
        """The maximum over the other samples of the task; -inf if there are none."""
        best = self.best(values)
        is_best = values == best
        alone = self.total(is_best.double()) == 1
        second = self.best(torch.where(is_best, -torch.inf, values))
        return torch.where(is_best & alone, second, best)
