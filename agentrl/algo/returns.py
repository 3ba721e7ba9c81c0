"""Advantage estimators with one advantage per sampled token.

Tokens of tool results are not time steps: for discounts and values, the first sampled token of a turn directly follows
the last sampled token of the turn before.
"""

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from agentrl.algo.advantage import EPSILON, Groups, earned, whitened
from agentrl.algo.registry import advantages
from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.recipe.sections.algorithm import AlgorithmSection

_TINY = 1e-8  # added to a sum that may be 0


class DiscountArgs(BaseModel):
    """Arguments of `reinforce_plus_plus` and `turn`."""

    model_config = ConfigDict(extra="forbid")
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount for each sampled token (gae, reinforce_plus_plus), or for each turn (turn)."""


class GaeArgs(DiscountArgs):
    """Arguments of `gae`, and of what weighs its advantages (`pf_ppo_best_worst`, `pf_ppo_best_random`)."""

    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda: 1 takes returns as they come, 0 relies on the critic."""


_UNDISCOUNTED, _GAE = DiscountArgs(), GaeArgs()


@advantages.register("gae", needs_values=True)
def gae(samples: Samples, config: AlgorithmSection, args: GaeArgs = _GAE) -> TokenAdvantages:
    """Generalized advantage estimation with a critic's values, one per token, whitened over the step.

    arXiv:1506.02438, equations 11, 12 and 16: d_t = r_t + gamma V_t+1 - V_t, A_t = sum over l of (gamma lam)^l d_t+l,
    where V after the last token is 0. The returns are A_t + V_t before whitening. Then A is centred over all tokens of
    the step and divided by its standard deviation. Raises ValueError without `Samples.values`.
    """
    rewards, values = _token_rewards(samples), samples.values
    if values is None:
        raise ValueError("gae needs the critic's values")
    values = values.double()
    errors = rewards + args.gamma * _following(values, samples.lengths) - values
    found = discounted(errors, samples.lengths, args.gamma * args.lam)
    return TokenAdvantages(whitened(found).float(), (found + values).float())


@advantages.register("reinforce_plus_plus")
def reinforce_plus_plus(
    samples: Samples, config: AlgorithmSection, args: DiscountArgs = _UNDISCOUNTED
) -> TokenAdvantages:
    """Discounted reward-to-go, one per token, whitened over the step, without a critic or a comparison within a task.

    REINFORCE++ (arXiv:2501.03262), global advantage normalization: A_t = sum over l of gamma^l r_t+l, centred over all
    tokens of the step and divided by their standard deviation. The paper subtracts a KL to the reference from the
    reward of each token (`kl_in: reward`); a separate loss term works too.
    """
    found = discounted(_token_rewards(samples), samples.lengths, args.gamma)
    return TokenAdvantages(whitened(found).float())


@advantages.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(samples: Samples, config: AlgorithmSection) -> TokenAdvantages:
    """Reward minus the mean reward of the task, one per token, whitened over the step. Reads no recipe keys.

    REINFORCE++ with baseline (arXiv:2501.03262): A_i = r_i - mean(r) over the samples of a task, as in Dr. GRPO; then
    centred over all tokens of the step and divided by their standard deviation.
    """
    rewards = samples.rewards.double()
    centred = rewards - Groups(samples.groups).mean(rewards)
    spread = torch.repeat_interleave(centred, samples.lengths)
    return TokenAdvantages(whitened(spread).float())


@advantages.register("turn", needs_turns=True)
def turn(samples: Samples, config: AlgorithmSection, args: DiscountArgs = _UNDISCOUNTED) -> TokenAdvantages:
    """Rewards from a turn on, minus those of the other samples of the task that reached that turn: one per token.

    A_ik = G_ik - mean over j != i of G_jk, over the samples j of the task that have a turn k; the mean is 0 where there
    is none. G_ik = sum over l >= k of gamma^(l - k) r_il, where r_il is what was earned in turn l (the reward of the
    whole sample in its last turn).

    Unbiased, also where the policy decides how many turns there are. Given the task, the baseline of sample i depends
    on other samples alone (which of them reached turn k included), so it is independent of what sample i did, and the
    expectation of its product with the gradient of log pi of a turn is 0; G_ik holds all that a turn can still change.
    A mean over all samples that reached turn k, i included, is biased: how many there are depends on what i did. So are
    deviations, and weights by numbers of turns or tokens: use `aggregation: constant` or `sequence_sum`. Raises
    ValueError without `Samples.turns`.
    """
    if samples.turns is None:
        raise ValueError("turn needs the numbers of the turns")
    cell, to_go, reached = _returns_by_turn(samples, args.gamma)
    task = torch.unique(samples.groups, return_inverse=True)[1]
    total = torch.zeros_like(to_go)
    earned_by_others = total.index_add(0, task, to_go)[task] - to_go
    others = total.index_add(0, task, reached)[task] - reached
    found = to_go - earned_by_others / others.clamp(min=1)
    return TokenAdvantages(found.view(-1)[cell])


class GigpoArgs(BaseModel):
    """Arguments of `gigpo`."""

    model_config = ConfigDict(extra="forbid")
    weight: float = Field(1.0, ge=0)
    """Weight of the comparison by state beside that of whole samples."""
    normalise: bool = True
    """Whether both are divided by the standard deviation of what is compared."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount for each turn of the rewards that a turn is worth."""


@advantages.register("gigpo", needs_turns=True, needs_states=True)
def gigpo(samples: Samples, config: AlgorithmSection, args: GigpoArgs) -> TokenAdvantages:
    """Reward of the sample against the task's, plus rewards to go of a turn against those of all turns of the task that
    began in the same state: one per token.

    GiGPO (arXiv:2505.10978), equations 3 to 9: A = A_E + weight A_S, A_E = (r_i - mean(r)) / std(r), A_S = (G_ik - mean
    of G) / std of G over the turns of the state, G_ik = sum over l >= k of gamma^(l - k) r_il, with the reward of the
    whole sample in its last turn. A state that one turn alone began in, or whose turns are worth the same, adds 0.
    Biased, unlike `turn`: the baseline counts the turn itself, and other turns of its sample in the same state. Raises
    ValueError without `Samples.turns` or `Samples.states`.
    """
    if samples.turns is None or samples.states is None:
        raise ValueError("gigpo needs the numbers of the turns and their states")
    cell, to_go, reached = _returns_by_turn(samples, args.gamma)
    states = torch.zeros(to_go.numel(), dtype=torch.int64).scatter(0, cell, samples.states)
    turns = reached.view(-1).nonzero()[:, 0]
    by_turn = torch.zeros(to_go.numel(), dtype=torch.float64)
    by_turn[turns] = _compared(to_go.view(-1)[turns], states[turns], args.normalise)
    episode = _compared(samples.rewards.double(), samples.groups, args.normalise)
    each = torch.repeat_interleave(episode, samples.lengths)
    return TokenAdvantages((each + args.weight * by_turn[cell]).float())


def _compared(values: Tensor, groups: Tensor, normalise: bool) -> Tensor:
    """Values [N] minus the mean of their group, by its standard deviation if `normalise`; 0 in a group of
    equals."""
    within = Groups(groups)
    deviation, centred = within.deviation(values), values - within.mean(values)
    scaled = centred / (deviation + EPSILON) if normalise else centred
    return torch.where(deviation > EPSILON, scaled, torch.zeros_like(centred))


def _returns_by_turn(samples: Samples, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """The cell of each token, int64 [N], in a table of samples by turns; discounted rewards from each turn on,
    float64 [S, K]; and 1 for the turns that there are, [S, K]."""
    assert samples.turns is not None
    size, turns = len(samples.lengths), int(samples.turns.max()) + 1 if len(samples.turns) else 1
    cell = torch.repeat_interleave(torch.arange(size), samples.lengths) * turns + samples.turns
    zeros = torch.zeros(size * turns, dtype=torch.float64)
    to_go = zeros.index_add(0, cell, _token_rewards(samples)).view(size, turns)
    reached = zeros.index_fill(0, cell, 1.0).view(size, turns)
    for k in reversed(range(turns - 1)):
        to_go[:, k] += gamma * to_go[:, k + 1]
    return cell, to_go * reached, reached


@advantages.register("optimal_token_baseline")
def optimal_token_baseline(samples: Samples, config: AlgorithmSection) -> TokenAdvantages:
    """Reward to go minus the baseline of least variance at each token, one per token.

    A_it = G_it - b_t with b_t = sum over the samples j of the task of W_jt G_jt / sum of W_jt: W_jt, the sum over
    l <= t of 1 - p_jl, stands for the squared norm of the gradient of the log-prob of sample j's first t tokens
    (Greensmith et al. 2004, JMLR 5, theorem 8; by token as in verl's optimal token baseline, whose 1 - 2 p + sum of p^2
    over the vocabulary has the same expectation, and needs a pass). p: the engine's probability. t counts sampled
    tokens. The baseline counts the sample itself, as that of `opo` does; where no other sample of the task has a token
    t, it is 0. Reads no recipe keys. Raises ValueError without `Samples.logprobs`.
    """
    if samples.logprobs is None:
        raise ValueError("optimal_token_baseline needs the engine's log-probs")
    lengths, size = samples.lengths, len(samples.lengths)
    longest = int(lengths.max()) if size else 0
    starts = torch.repeat_interleave(torch.cumsum(lengths, 0) - lengths, lengths)
    at = torch.arange(len(starts)) - starts
    cell = torch.repeat_interleave(torch.arange(size), lengths) * longest + at
    grid = torch.zeros(size * longest, dtype=torch.float64)
    energy = grid.index_add(0, cell, 1 - samples.logprobs.double().exp()).view(size, longest).cumsum(1)
    reached = grid.index_fill(0, cell, 1.0).view(size, longest)
    weight = energy * reached
    to_go = grid.index_add(0, cell, discounted(_token_rewards(samples), lengths, 1.0)).view(size, longest)
    task = torch.unique(samples.groups, return_inverse=True)[1]

    def over_task(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, task, values)[task]

    baseline = over_task(weight * to_go) / (over_task(weight) + _TINY)
    return TokenAdvantages((to_go - baseline * (over_task(reached) > 1)).view(-1)[cell].float())


def discounted(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """Y with y_t = x_t + factor * y_t+1 within each sample. values: float64 [N]. lengths: int64 [S], sum N."""
    order = torch.argsort(lengths, descending=True, stable=True)
    lasts = (torch.cumsum(lengths, 0) - 1)[order]
    longest = int(lengths.max()) if len(lengths) else 0
    longer = torch.searchsorted(lengths.sort().values, torch.arange(longest), right=True)
    alive = (len(lengths) - longer).tolist()  # alive[k]: number of samples with more than k tokens, first in `order`
    found = torch.empty_like(values)
    carry = torch.zeros(len(lengths), dtype=values.dtype)
    for back, count in enumerate(alive):
        at = lasts[:count] - back
        carry = values[at] + factor * carry[:count]
        found[at] = carry
    return found


def _following(values: Tensor, lengths: Tensor) -> Tensor:
    """V_t+1 for each token t, 0 for the last token of a sample: [N]."""
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following[(torch.cumsum(lengths, 0) - 1)[lengths > 0]] = 0.0
    return following


def _token_rewards(samples: Samples) -> Tensor:
    """The reward of each token, float64 [N]; without `token_rewards`, a sample's reward is at its last token."""
    if samples.token_rewards is not None:
        return samples.token_rewards.double()
    found = torch.zeros(int(samples.lengths.sum()), dtype=torch.float64)
    some = samples.lengths > 0
    found[(torch.cumsum(samples.lengths, 0) - 1)[some]] = samples.rewards.double()[some]
    return found


@advantages.register("pf_ppo_best_worst", needs_values=True)
def pf_ppo_best_worst(samples: Samples, config: AlgorithmSection, args: GaeArgs = _GAE) -> TokenAdvantages:
    """PF-PPO with the policy BW: `gae` with half of a task's weight on its best sample and half on its worst.

    PF-PPO (arXiv:2409.06957) ranks the N samples of a task by reward, since rewards in the middle are unreliable, draws
    some of them with probabilities w by rank, and learns from those. Here nothing is drawn: a sample's advantages are
    multiplied by N x w, which in a policy loss equals the draw in expectation. Samples of equal rank share their
    weight; if all rewards of a task are equal, every weight is 1. The critic learns from every sample.
    """
    groups, rewards = Groups(samples.groups), earned(samples)
    best, worst = rewards == groups.best(rewards), rewards == -groups.best(-rewards)
    return _weighted(samples, config, args, (_share(groups, best) + _share(groups, worst)) / 2)


@advantages.register("pf_ppo_best_random", needs_values=True)
def pf_ppo_best_random(samples: Samples, config: AlgorithmSection, args: GaeArgs = _GAE) -> TokenAdvantages:
    """PF-PPO with the policy BR (see `pf_ppo_best_worst`): `gae` with half of a task's weight on its best sample and
    half spread over the others."""
    groups, rewards = Groups(samples.groups), earned(samples)
    best = rewards == groups.best(rewards)
    all_equal = groups.total(best.double()) == groups.count
    weights = torch.where(all_equal, 1.0, (_share(groups, best) + _share(groups, ~best)) / 2)
    return _weighted(samples, config, args, weights)


def _share(groups: Groups, chosen: Tensor) -> Tensor:
    """N / (chosen samples of the task) for each chosen sample, 0 for the others: float64 [S]."""
    chosen = chosen.double()
    return chosen * groups.count / groups.total(chosen).clamp(min=1)


def _weighted(samples: Samples, config: AlgorithmSection, args: GaeArgs, weights: Tensor) -> TokenAdvantages:
    """The advantages of `gae` times `weights`, float64 [S]: N x w, whose mean over a task is 1."""
    found = gae(samples, config, args)
    each = torch.repeat_interleave(weights, samples.lengths)
    return TokenAdvantages((found.advantages.double() * each).float(), found.returns)
