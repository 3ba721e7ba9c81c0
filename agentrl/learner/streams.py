"""Token streams: how much each rollout is learned from by the policy loss, by imitation and by a teacher; and which
tokens count, as all tokens of the update or of the step decide it together: those that `algorithm.reject` keeps, those
of high entropy, and what a loss chooses."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo import aggregations
from agentrl.algo.aggregation import token_weights
from agentrl.algo.loss import highest
from agentrl.algo.off_policy import rejected
from agentrl.algo.terms import Tokens, Update
from agentrl.compute.batch import ALLOWED, Batch
from agentrl.errors import UserError, call_plugin
from agentrl.learner.advantages import (
    first_of_rollouts,
    left_out,
    sampled_in_order,
    sampled_of_rollouts,
    sampled_of_samples,
)
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.trajectory import Trajectory

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
STREAMS = {"policy": "weight", "imitate": "imitate", "distill": "distill"}
"""Streams, and the token column that holds the weights of each. A sample column of the stream's name, float32 [S], is
what a rollout's weights are multiplied by; without one, `policy` has 1, the others 0."""
PartOf = Callable[[Task], int]
"""The index of a task's environment in `env.mix`, 0 where the recipe mixes none."""


def with_streams(batch: Batch, trajectories: Sequence[Trajectory], recipe: Recipe, step: int, part_of: PartOf) -> Batch:
    """The batch with a sample column for each stream that has a weight in this step (counted from 0) in any
    environment, and `part`, int64 [S]: the environment of each sample."""
    parts = np.array([part_of(t.task) for t in trajectories], np.int64)[batch.rollouts]
    found = {}
    for name in STREAMS:
        weights = np.array([getattr(streams, name).at(step) for streams in recipe.streams], np.float32)
        if name == "policy" or weights.any():
            found[name] = weights[parts] if len(parts) else np.zeros(0, np.float32)
    if "imitate" in found:
        found["imitate"] *= good(batch, recipe.algorithm.imitate_from)
    return batch.with_samples(part=parts, **found)


def good(batch: Batch, least: float | None) -> Bools:
    """Which samples are imitated, bool [S]: their reward is at least `least`; None: more than the mean of the
    rollouts of their group, so that none of a group is where all earned the same."""
    rewards, groups = batch.samples["reward"], batch.samples["group"]
    if least is not None:
        return rewards >= least
    first = first_of_rollouts(batch)  # each rollout counts once, however often it branched
    size = int(groups.max(initial=-1)) + 1
    total = np.bincount(groups[first], rewards[first].astype(np.float64), size)
    mean = total / np.maximum(np.bincount(groups[first], minlength=size), 1)
    return rewards > mean[groups] + 1e-6


def learned_by(batch: Batch, stream: str) -> Bools:
    """Which samples a stream has a weight for, bool [S]; none of those that are left out of the loss."""
    if stream not in batch.samples:
        return np.full(len(batch), stream == "policy") & ~left_out(batch)
    return (batch.samples[stream] > 0) & ~left_out(batch)


def weighted(batch: Batch, recipe: Recipe) -> Batch:
    """The batch, which is a whole update, with the token column of each stream that any of its samples has a
    weight for: what each token counts among those of the stream, as `algorithm.aggregation` says, times the weight.
    Tokens that are rejected (token column `kept`) do not count for the policy, and those that were sampled under a
    constraint not for distillation: a teacher says how likely a token is among all."""
    columns = {}
    for stream, column in STREAMS.items():
        chosen = learned_by(batch, stream)
        if chosen.any():
            kept = _kept(batch, stream)
            each = token_shares(batch, recipe, chosen, None if kept is None else _sums(batch, kept))
            weights = batch.spread(each * batch.samples[stream] if stream in batch.samples else each)
            columns[column] = weights if kept is None else weights * kept
    return batch.with_tokens(**columns)


def _kept(batch: Batch, stream: str) -> Floats | None:
    """1 for the tokens that count in a stream, float32 [T], 0 elsewhere; None where all sampled ones do."""
    if stream == "policy":
        return batch.tokens.get("kept")
    if stream == "imitate" or ALLOWED not in batch.tokens:
        return None
    free = np.array([one is None for one in batch.tokens[ALLOWED]], np.float32)
    return (free * batch.tokens["loss_mask"]).astype(np.float32)


def _sums(batch: Batch, kept: Floats) -> npt.NDArray[np.int64]:
    """The number of tokens of each sample that are kept, int64 [S]."""
    total = np.concatenate([[0], np.cumsum(kept > 0)])
    counts: npt.NDArray[np.int64] = total[batch.offsets[1:]] - total[batch.offsets[:-1]]
    return counts


def token_shares(
    batch: Batch, recipe: Recipe, chosen: Bools | None = None, counts: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.float32]:
    """What each sampled token of a sample counts, float32 [S]. chosen: the samples among which, bool [S]; None:
    all that are not left out of the loss. counts: the tokens of each sample that count, int64 [S]; None: those that
    were sampled."""
    chosen = ~left_out(batch) if chosen is None else chosen
    counts, first = batch.sampled if counts is None else counts, first_of_rollouts(batch)
    lengths = (np.add.reduceat(counts, first) if len(batch) else counts) * chosen[first]
    update = Update(lengths, batch.samples["group"][first], recipe.rollout.max_tokens)
    shares = token_weights(update, aggregations.bound(recipe.algorithm.aggregation), recipe.algorithm)
    return shares[batch.rollouts] * chosen


def kept_tokens(batch: Batch, config: AlgorithmSection) -> Floats:
    """1 for the sampled tokens that `algorithm.reject` leaves in an update, float32 [T], 0 elsewhere. batch: has
    `old_logprobs`."""
    sampled = sampled_in_order(batch)
    difference = (batch.tokens["old_logprobs"] - batch.tokens["logprobs"])[sampled]
    rollout = np.repeat(batch.rollouts, batch.lengths)[sampled]
    group = np.repeat(batch.samples["group"], batch.lengths)[sampled]
    out = rejected(torch.from_numpy(difference), torch.from_numpy(rollout), torch.from_numpy(group), config.reject)
    return _column(batch, ~out)


def rejection_metrics(batch: Batch) -> dict[str, float]:
    """mismatch/rejected_tokens and mismatch/rejected_samples: the share of the sampled tokens that were
    rejected, and of the rollouts of which none was kept. Nothing where the recipe has no rule."""
    if "kept" not in batch.tokens:
        return {}
    before, first = sampled_of_rollouts(batch), first_of_rollouts(batch)
    after = np.add.reduceat(sampled_of_samples(batch), first)
    return {
        "mismatch/rejected_tokens": 1 - float(after.sum()) / max(1, int(before.sum())),
        "mismatch/rejected_samples": float(((after == 0) & (before > 0)).sum()) / max(1, int((before > 0).sum())),
    }


def of_high_entropy(batch: Batch, share: float) -> Floats:
    """1 for the `share` of the sampled tokens with the highest `entropy`, float32 [T], 0 elsewhere."""
    return _column(batch, highest(torch.from_numpy(batch.tokens["entropy"][sampled_in_order(batch)]), share))


def chosen(
    batch: Batch, logprobs: Floats, choose: Callable[..., object], rng: np.random.Generator, config: AlgorithmSection
) -> Floats:
    """What a loss's `choose` gives the sampled tokens of an update, float32 [T], 0 elsewhere.

    batch: the whole update, with `advantages` and `old_logprobs`. logprobs: float32 [T], just before it. Raises
    UserError for an error of `choose`, and where it does not give a finite value for each token.
    """
    sampled = sampled_in_order(batch)
    current, old = (torch.from_numpy(column[sampled]) for column in (logprobs, batch.tokens["old_logprobs"]))
    advantages = torch.from_numpy(batch.tokens["advantages"][sampled])
    sample = torch.from_numpy(np.repeat(batch.rollouts, batch.lengths)[sampled])
    whose = f"algorithm.loss {config.loss.name!r}"
    given = call_plugin(whose, choose, Tokens(current, old, advantages, sample), rng, config)
    if not isinstance(given, Tensor) or given.shape != (len(sampled),) or not bool(torch.isfinite(given).all()):
        raise UserError(f"{whose} chose no finite tensor [{len(sampled)}], a value for every sampled token")
    return _column(batch, given)


def _column(batch: Batch, values: Tensor) -> Floats:
    """The values of the sampled tokens, in their order, as a token column [T], 0 elsewhere."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    found[sampled_in_order(batch)] = values.float().numpy()
    return found
