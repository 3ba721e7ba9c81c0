"""Policy losses per token, the value loss, those of distillation, and the two regularizers. `aggregation` weights
their sums."""

from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from agentrl.algo.registry import losses
from agentrl.algo.terms import LossTerms, Tokens
from agentrl.recipe.sections.algorithm import AlgorithmSection

_TINY = 1e-8  # added to probabilities that may be 0
LOG_RATIO_LIMIT = 20.0  # its exp is finite in float32; larger ratios are clipped by the losses anyway


@losses.register("ppo_clip", vanishes_with_advantage=True)
def ppo_clip(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Clipped surrogate loss, float32 [N].

    PPO (arXiv:1707.06347), equation 7: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_old. A
    clip_high above clip_low is DAPO's clip-higher (arXiv:2503.14476), equation 10. `clip_dual` = c > 1 is dual-clip PPO
    (arXiv:1912.09729), equation 5: where A < 0 the loss is at most -c A. Reads algorithm.clip_low, clip_high and
    clip_dual.

    metrics: clip_fraction_high and clip_fraction_low (tokens whose gradient the upper or lower clip removed),
    clip_fraction (both), clip_fraction_dual, ratio_mean, approx_kl (k3 against the old policy).
    """
    return _clipped(_ratio(tokens), tokens, config)


@losses.register("gspo", vanishes_with_advantage=True)
def gspo(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Clipped surrogate loss with one ratio per sample, float32 [N].

    GSPO (arXiv:2507.18071), equations 5 and 7: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), where
    s = (pi(y) / pi_old(y))^(1 / |y|) is the geometric mean of the ratios of a sample's tokens. Implemented as the
    paper's GSPO-token, equations 13 and 14: each token has the value of s and the gradient of its own log-prob; with
    equal advantages this is the gradient of s. The paper weights all samples equally (`aggregation: sequence_mean`),
    clips at 3e-4 and 4e-4, and has no further bound; `clip_dual` = c bounds s where A < 0, as in `ppo_clip`. Reads
    algorithm.clip_low, clip_high and clip_dual. Raises ValueError without `Tokens.sample`.

    metrics: those of ppo_clip; all tokens of a clipped sample count as clipped.
    """
    log_ratio = tokens.logprobs - tokens.old
    sequence = _mean_by_sample(log_ratio.detach(), tokens.sample).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = sequence.exp() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return _clipped(ratio, tokens, config)


@losses.register("cispo", vanishes_with_advantage=True)
def cispo(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Policy gradient weighted by a clipped ratio, so that every token keeps its gradient: float32 [N].

    MiniMax-M1 (arXiv:2506.13585), equations 4 and 5: -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi. The paper
    uses no lower bound (`clip_low: 1`) and a high upper bound. Reads algorithm.clip_low and clip_high.

    metrics: clip_fraction (tokens whose ratio was clipped), ratio_mean, approx_kl.
    """
    ratio = (tokens.logprobs.detach() - tokens.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    metrics = {"clip_fraction": (weight != ratio).float(), **_against_old(ratio, tokens)}
    return LossTerms(-weight * tokens.advantages * tokens.logprobs, metrics)


@losses.register("reinforce", vanishes_with_advantage=True)
def reinforce(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Plain policy gradient, float32 [N]: -A log pi (Williams 1992, Machine Learning 8, 229-256).

    Correct for one update per step: there is neither clipping nor a correction for older weights. Reads no recipe keys.
    metrics: ratio_mean, approx_kl.
    """
    ratio = (tokens.logprobs.detach() - tokens.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return LossTerms(-tokens.advantages * tokens.logprobs, _against_old(ratio, tokens))


class SapoArgs(BaseModel):
    """Arguments of `sapo`."""

    model_config = ConfigDict(extra="forbid")
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness of the gate elsewhere; a larger one stops earlier."""


@losses.register("sapo", vanishes_with_advantage=True)
def sapo(tokens: Tokens, config: AlgorithmSection, args: SapoArgs) -> LossTerms:
    """Policy gradient under a smooth gate in place of the clip, float32 [N].

    SAPO (arXiv:2511.20347): -f(rho) A with f(rho) = 4 / tau sigmoid(tau (rho - 1)), whose slope at 1 is 1 and which
    flattens away from it, on both sides. The paper weights all samples equally (`aggregation: sequence_mean`).
    metrics: ratio_mean, approx_kl.
    """
    ratio = _ratio(tokens)
    tau = torch.where(tokens.advantages > 0, args.tau_positive, args.tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossTerms(-gate * tokens.advantages, _against_old(ratio.detach(), tokens))


@losses.register("gmpo", vanishes_with_advantage=True)
def gmpo(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Geometric mean of ratios that are clipped token by token, float32 [N].

    GMPO (arXiv:2507.20673), equation 4: -A exp(mean over a sample's tokens of c), where c is the log-ratio, clipped to
    -clip_low and clip_high on the side on which the advantage would push it further. Each token has the value of its
    sample and the gradient of its own c: with `aggregation: sequence_mean` and equal advantages, that of the formula.
    Reads algorithm.clip_low and clip_high (the paper: 0.4 both). Raises ValueError without `Tokens.sample`.

    metrics: clip_fraction, clip_fraction_high, clip_fraction_low, ratio_mean, approx_kl.
    """
    log_ratio, sign = tokens.logprobs - tokens.old, tokens.advantages.sign()
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    chosen = torch.where(sign * bounded < sign * log_ratio, bounded, log_ratio)
    chosen = chosen.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    mean = _mean_by_sample(chosen.detach(), tokens.sample).exp()
    is_clipped = chosen.detach() != log_ratio.detach()
    metrics = {
        "clip_fraction": is_clipped.float(),
        "clip_fraction_high": (is_clipped & (sign > 0)).float(),
        "clip_fraction_low": (is_clipped & (sign < 0)).float(),
        **_against_old(mean, tokens),
    }
    return LossTerms(-tokens.advantages * mean * (chosen - chosen.detach()).exp(), metrics)


class DppoArgs(BaseModel):
    """Arguments of `dppo`."""

    model_config = ConfigDict(extra="forbid")
    divergence: Literal["tv", "kl"] = "tv"
    """What is bounded: the change of the token's probability, or the KL of the token against all others."""
    ratio_cap: float = Field(20.0, ge=1)
    """Upper bound of the ratio, which is a weight without a gradient."""


@losses.register("dppo", vanishes_with_advantage=True)
def dppo(tokens: Tokens, config: AlgorithmSection, args: DppoArgs) -> LossTerms:
    """Policy gradient of the tokens whose distribution moved little, float32 [N].

    DPPO (arXiv:2602.04879) in its binary forms: -min(rho, ratio_cap) A log pi where the divergence of {token, others}
    from the old policy is within bounds, or A pulls back; 0 elsewhere. A ratio is large where a probability is small
    though nothing of it matters; the divergence is not. Reads algorithm.clip_low (A <= 0) and clip_high (A > 0) as the
    bounds of the divergence. metrics: clip_fraction (tokens without a gradient), ratio_mean, approx_kl.
    """
    ratio = _ratio(tokens).detach()
    new, old = tokens.logprobs.detach().exp(), tokens.old.exp()
    if args.divergence == "tv":
        moved = (new - old).abs()
    else:
        rest = ((1 - old + _TINY) / (1 - new + _TINY)).log()
        moved = old * (tokens.old - tokens.logprobs.detach()) + (1 - old) * rest
    up = tokens.advantages > 0
    kept = torch.where(
        up, (moved <= config.clip_high) | (new <= old), (moved <= config.clip_low) | (new >= old)
    )  # what pulls back is kept
    metrics = {"clip_fraction": (~kept).float(), **_against_old(ratio, tokens)}
    weight = ratio.clamp(max=args.ratio_cap) * kept
    return LossTerms(-weight * tokens.advantages * tokens.logprobs, metrics)


class DroArgs(BaseModel):
    """Arguments of `dro`."""

    model_config = ConfigDict(extra="forbid")
    beta: float = Field(gt=0)
    """Strength of the pull towards the old policy."""


@losses.register("dro", needs_updates=True)
def dro(tokens: Tokens, config: AlgorithmSection, args: DroArgs) -> LossTerms:
    """Policy gradient with a quadratic pull towards the old policy, float32 [N].

    DRO (arXiv:2405.19107), token by token: -(A log pi - beta / 2 (log pi - log pi_old)^2). metrics: ratio_mean,
    approx_kl.
    """
    pull = 0.5 * args.beta * (tokens.logprobs - tokens.old).square()
    return LossTerms(pull - tokens.advantages * tokens.logprobs, _against_old(_ratio(tokens).detach(), tokens))


class VespoArgs(BaseModel):
    """Arguments of `vespo`."""

    model_config = ConfigDict(extra="forbid")
    k_positive: float = Field(2.0, ge=0)
    """Exponent of the ratio where the advantage is not negative; a larger one holds back less likely samples more."""
    lambda_positive: float = Field(3.0, gt=0)
    """Decay with the ratio there; a larger one holds back likelier samples more."""
    k_negative: float = Field(3.0, ge=0)
    """Exponent where the advantage is negative."""
    lambda_negative: float = Field(2.0, gt=0)
    """Decay where the advantage is negative."""


@losses.register("vespo", vanishes_with_advantage=True)
def vespo(tokens: Tokens, config: AlgorithmSection, args: VespoArgs) -> LossTerms:
    """Policy gradient under a smooth weight of the whole sample's ratio, in place of a clip: float32 [N].

    VESPO (arXiv:2602.10693), as TRL 1.16 has it: -sg(phi(w)) A log pi, phi(w) = w^k exp(lambda (1 - w)), so that
    phi(1) = 1, and w the product of the ratios of a sample's tokens, kept within 1e-8 and e^20. k and lambda differ by
    the advantage's sign. Raises ValueError without `Tokens.sample`. metrics: weight_mean (phi), ratio_mean, approx_kl.
    """
    log_ratio = (tokens.logprobs.detach() - tokens.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_w = _sum_by_sample(log_ratio, tokens.sample).clamp(np.log(_TINY), LOG_RATIO_LIMIT)
    up = tokens.advantages >= 0
    k, decay = (
        torch.where(up, *both)
        for both in ((args.k_positive, args.k_negative), (args.lambda_positive, args.lambda_negative))
    )
    phi = (decay + k * log_w - decay * log_w.exp()).exp()
    metrics = {"weight_mean": phi, **_against_old(log_ratio.exp(), tokens)}
    return LossTerms(-phi * tokens.advantages * tokens.logprobs, metrics)


class ClipCovArgs(BaseModel):
    """Arguments of `clip_cov`."""

    model_config = ConfigDict(extra="forbid")
    share: float = Field(2e-4, gt=0, le=1)
    """The most tokens of an update that lose their gradient, as a share of them; one at least."""
    low: float = 1.0
    """Covariance above which a token may be chosen."""
    high: float = 5.0
    """Covariance below which a token may be chosen."""


def clip_cov_choice(update: Tokens, rng: np.random.Generator, config: AlgorithmSection, args: ClipCovArgs) -> Tensor:
    """1 for the tokens of an update that `clip_cov` leaves out: float32 [N]."""
    covariance = _covariance(update)
    clipped = _clipped(_ratio(update), update, config).metrics["clip_fraction"] > 0
    candidates = ((covariance > args.low) & (covariance < args.high) & ~clipped).nonzero()[:, 0]
    drawn = rng.permutation(len(candidates))[: max(1, int(args.share * len(covariance)))]
    return torch.zeros_like(update.logprobs).index_fill(0, candidates[torch.from_numpy(drawn)], 1.0)


@losses.register("clip_cov", vanishes_with_advantage=True, choose=clip_cov_choice)
def clip_cov(tokens: Tokens, config: AlgorithmSection, args: ClipCovArgs) -> LossTerms:
    """`ppo_clip` without some tokens that would lower the entropy most, float32 [N].

    Clip-Cov (arXiv:2505.22617), section 4.2: (A - mean A) (log pi - mean log pi) is how much a token adds to the
    covariance that drives the entropy down; of those between `low` and `high` some, drawn at random, carry no gradient.
    Means and draws are over a whole update, whatever micro-batches or workers it is computed in. Reads
    algorithm.clip_low and clip_high. Raises ValueError without `Tokens.chosen`.

    metrics: those of ppo_clip without clip_fraction_dual, and clip_fraction_cov.
    """
    terms, chosen = _clipped(_ratio(tokens), tokens, config), _chosen(tokens)
    return LossTerms(terms.loss * (1 - chosen), {**terms.metrics, "clip_fraction_cov": chosen})


class KlCovArgs(BaseModel):
    """Arguments of `kl_cov`."""

    model_config = ConfigDict(extra="forbid")
    share: float = Field(2e-4, gt=0, le=1)
    """Tokens of an update that are held, as a share of them; one at least."""
    kl_coef: float = Field(1.0, ge=0)
    """Coefficient of |log pi - log pi_old| on these tokens."""


def kl_cov_choice(update: Tokens, rng: np.random.Generator, config: AlgorithmSection, args: KlCovArgs) -> Tensor:
    """1 for the tokens of an update that `kl_cov` holds: float32 [N]."""
    return highest(_covariance(update), args.share)


@losses.register("kl_cov", choose=kl_cov_choice, needs_updates=True)
def kl_cov(tokens: Tokens, config: AlgorithmSection, args: KlCovArgs) -> LossTerms:
    """Policy gradient by the ratio, where the tokens that would lower the entropy most are held: float32 [N].

    KL-Cov (arXiv:2505.22617), section 4.2: -rho A, and kl_coef |log rho| on the tokens of the largest (A - mean A)
    (log pi - mean log pi) of the whole update. The first update of a step, where rho is 1, is not held: use several.
    Raises ValueError without `Tokens.chosen`. metrics: held_fraction, ratio_mean, approx_kl.
    """
    ratio, chosen = _ratio(tokens), _chosen(tokens)
    loss = -tokens.advantages * ratio + args.kl_coef * chosen * (tokens.logprobs - tokens.old).abs()
    return LossTerms(loss, {"held_fraction": chosen, **_against_old(ratio.detach(), tokens)})


def highest(values: Tensor, share: float) -> Tensor:
    """1 for the largest `share` of values [N] (one at least; the earlier of equals), 0 for others: float32."""
    count = max(1, int(share * len(values)))
    return torch.zeros(len(values)).index_fill(0, values.argsort(descending=True, stable=True)[:count], 1.0)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> LossTerms:
    """Clipped value loss of the critic, float32 [N].

    The reference implementation of PPO (Baselines' ppo2; described in arXiv:2005.12729, section 3): max((V - R)^2,
    (V_clipped - R)^2) / 2 with V_clipped = old + clip(V - old, -clip, clip). values, old, returns: float32 [N], the
    critic's values now and at the start of the step, and their targets. metrics: clip_fraction, the tokens whose
    gradient the clip removed.
    """
    near_old = old + (values - old).clamp(-clip, clip)
    unclipped, clipped = (values - returns) ** 2, (near_old - returns) ** 2
    # Without clipping, old + (V - old) can still differ from V by rounding.
    is_clipped = (clipped > unclipped) & ((values - old).abs() > clip)
    return LossTerms(0.5 * torch.maximum(unclipped, clipped), {"clip_fraction": is_clipped.float()})


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(pi || reference) per token by the low-variance estimator k3: [N], never negative.

    Schulman, "Approximating KL divergence" (2020): r - 1 - log r with r = reference / pi, on tokens sampled from pi;
    GRPO's equation 4 (arXiv:2402.03300). logprobs, reference: natural log-probs [N] of the same tokens.
    """
    log_ratio = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def kl_estimator(config: AlgorithmSection) -> str:
    """`algorithm.kl_estimator`, with `auto` resolved."""
    return {"loss": "k3", "reward": "k1"}[config.kl_in] if config.kl_estimator == "auto" else config.kl_estimator


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str, old: Tensor | None = None) -> Tensor:
    """Estimate KL(pi || reference) per token: [N]. logprobs, reference: natural log-probs [N] of the same tokens.

    Schulman, "Approximating KL divergence" (2020): k1 = log pi - log reference, unbiased; abs = |k1|; k2 = k1^2 / 2;
    k3: see there. The expected gradient of k2 is that of the KL, unlike those of k1 and k3: `k1+` and `k3+` have their
    values, and the gradient of k2. `k3*` is k3 times the ratio pi / pi_old, which has a gradient: then that of k3 is
    that of the KL in expectation, also where the policy has moved since it sampled (DeepSeek-V3.2, arXiv:2512.02556,
    its unbiased KL estimate). old: log-probs before the step, [N]; None: the ratio is 1. Raises ValueError for another
    estimator.
    """
    difference = logprobs - reference
    match estimator.removesuffix("+"):
        case "k1":
            value = difference
        case "abs":
            value = difference.abs()
        case "k2":
            value = 0.5 * difference.square()
        case "k3":
            value = k3(logprobs, reference)
        case "k3*":
            moved = logprobs - (logprobs.detach() if old is None else old)
            return k3(logprobs, reference) * moved.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        case _:
            raise ValueError(f"no estimator {estimator!r} of a KL")
    if not estimator.endswith("+"):
        return value
    slope = 0.5 * difference.square()
    return slope - slope.detach() + value.detach()


def sampled_reverse_kl(logprobs: Tensor, old: Tensor, teacher: Tensor) -> Tensor:
    """The distillation loss [N] of sampled tokens, whose expected gradient is that of KL(pi || teacher).

    The reverse KL of each token's distribution, given the tokens before it (arXiv:2306.13649, arXiv:2306.08543): what a
    token does to later ones is left out. The gradient of the sum over a sample of these divergences, at fixed
    beginnings, is an on-policy gradient of every next-token distribution.

    It is a policy gradient with the detached reward log teacher - log pi. The log-ratio log pi - log teacher itself is
    an unbiased estimate of the KL, but no loss: its expected gradient, sum_a pi(a) grad log pi(a), is 0. The ratio
    pi / old corrects for weights that moved since the tokens were sampled.

    logprobs: under the model being trained, with gradient; old: before the step; teacher: natural log-probs [N] of the
    same tokens. The reward is bounded by LOG_RATIO_LIMIT, since a teacher may give a token no probability at all.
    """
    reward = (teacher - logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return -reward * (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def bucketed_reverse_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """KL(pi || teacher) [N] over K tokens of each distribution and all others as one bucket.

    It is exact on these K + 1 outcomes and no more than the KL of the whole vocabulary. Its gradient needs no samples.

    logprobs: [N, K], with gradient; teacher: natural log-probs [N, K] of the same tokens. A token at which the
    teacher's is -inf is not one of the K.
    """
    there = teacher > -torch.inf
    ours, theirs = (each.masked_fill(~there, -torch.inf) for each in (logprobs, teacher))
    gap = torch.where(there, logprobs - teacher, 0.0)
    rest, rest_of_teacher = _log_rest(ours), _log_rest(theirs)
    return (ours.exp() * gap).sum(-1) + rest.exp() * (rest - rest_of_teacher)


def _log_rest(logprobs: Tensor) -> Tensor:
    """The log-probability [N] of what is not among the K tokens [N, K]; at least -LOG_RATIO_LIMIT."""
    least = torch.finfo(logprobs.dtype).eps if logprobs.dtype != torch.float32 else 1e-7
    total = logprobs.logsumexp(-1).clamp(max=-least)
    return torch.log(-torch.expm1(total)).clamp(min=-LOG_RATIO_LIMIT)


def entropy(logits: Tensor) -> Tensor:
    """The entropy -sum p log p of categorical distributions, in nats: logits [..., V] to [...]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def _clipped(ratio: Tensor, tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """max(-rho A, -clip(rho) A), at most -clip_dual A where A < 0, with the fractions of tokens whose gradient
    each clip removed as metrics."""
    advantages = tokens.advantages
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    is_clipped = clipped > unclipped
    metrics = {
        "clip_fraction": is_clipped.float(),
        "clip_fraction_high": (is_clipped & (advantages > 0)).float(),
        "clip_fraction_low": (is_clipped & (advantages < 0)).float(),
        **_against_old(ratio.detach(), tokens),
    }
    loss = torch.maximum(unclipped, clipped)
    if config.clip_dual is None:
        return LossTerms(loss, metrics)
    ceiling = -config.clip_dual * advantages
    over = (advantages < 0) & (loss > ceiling)
    return LossTerms(torch.where(over, ceiling, loss), {**metrics, "clip_fraction_dual": over.float()})


def _covariance(update: Tokens) -> Tensor:
    """What each token adds to the covariance of advantage and log-prob over an update, [N]."""
    advantages, logprobs = update.advantages, update.logprobs
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _chosen(tokens: Tokens) -> Tensor:
    if tokens.chosen is None:
        raise ValueError("a loss that chooses tokens of a whole update needs `Tokens.chosen`")
    return tokens.chosen


def _ratio(tokens: Tokens) -> Tensor:
    return (tokens.logprobs - tokens.old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _against_old(ratio: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    return {"ratio_mean": ratio, "approx_kl": k3(tokens.logprobs.detach(), tokens.old)}


def _mean_by_sample(values: Tensor, sample: Tensor | None) -> Tensor:
    """For each token, the mean of `values` [N] over the tokens of its sample, [N]."""
    return _sum_by_sample(values, sample) / _sum_by_sample(torch.ones_like(values), sample)


def _sum_by_sample(values: Tensor, sample: Tensor | None) -> Tensor:
    """For each token, the sum of `values` [N] over the tokens of its sample, [N]."""
    if sample is None:
        raise ValueError("a loss with one ratio per sample needs `Tokens.sample`")
    names, which = torch.unique(sample, return_inverse=True)
    return torch.zeros(len(names), dtype=values.dtype, device=values.device).index_add(0, which, values)[which]
