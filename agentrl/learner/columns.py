"""The columns of a step's batch that are decided over the whole of it, before it is split: what each token earned, its
advantage, how much it is learned from by the policy loss, by imitation and by a teacher (the token streams), and which
tokens count at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo import aggregations
from agentrl.algo.aggregation import token_weights
from agentrl.algo.loss import highest, kl_estimate, kl_estimator
from agentrl.algo.off_policy import rejected
from agentrl.algo.registry import AdvantageEntry
from agentrl.algo.terms import RewardPart, Samples, TokenAdvantages, Tokens, Update
from agentrl.compute.batch import ALLOWED, Batch
from agentrl.errors import UserError, call_plugin
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.trajectory import STEP, FinishReason, Trajectory, spread

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
STREAMS = {"policy": "weight", "imitate": "imitate", "distill": "distill"}
"""Streams, and the token column that holds the weights of each. A sample column of the stream's name, float32 [S], is
what a rollout's weights are multiplied by; without one, `policy` has 1, the others 0."""
PartOf = Callable[[Task], int]
"""The index of a task's environment in `env.mix`, 0 where the recipe mixes none."""


def with_advantages(batch: Batch, estimator: Any, config: AlgorithmSection) -> Batch:
    """`batch` with the token column `advantages`, and `returns` where the estimator gives them, float32 [T], 0
    where nothing was sampled; and with the sample column `advantage`, the mean over a rollout's tokens.

    A rollout that branched is one sample to the estimator: its tokens stand in the order in which they were sampled,
    each value taken on its own path. A seat with a reward of its own (`seat_columns`) is a sample beside its rollout,
    of a group with the same seat of the task's other rollouts; its step rewards are its rollout's. It reads the sample
    columns `reward` and `group`, and, where they are, the token columns `step_rewards`, `turns`, `values` and
    `kl_penalty` (subtracted from each token's reward, its sum over a rollout from the rollout's).
    estimator: as algo's registry `advantages` gives it; config: the recipe's `algorithm`. Raises UserError for an error
    of the estimator, and when it gives something of another type or shape, or not finite.
    """
    first, compared = first_of_rollouts(batch), _compared(batch)
    sampled, lengths = compared.sampled, compared.lengths
    if not lengths.any():
        return _with_columns(batch, np.zeros(int(batch.offsets[-1]), np.float32), {})
    values, penalty = batch.tokens.get("values"), batch.tokens.get("kl_penalty")
    earned, each_token = compared.rewards, token_rewards(batch)
    parts = _parts(batch, first)
    if parts is not None and len(lengths) != len(first):
        raise UserError(f"{_named(config)} compares parts of the reward, which rewards of seats do not have")
    samples = Samples(
        rewards=torch.from_numpy(earned if penalty is None else earned - compared.sums(penalty)),
        groups=torch.from_numpy(compared.groups),
        lengths=torch.from_numpy(lengths),
        token_rewards=torch.from_numpy((each_token if penalty is None else each_token - penalty)[sampled]),
        turns=torch.from_numpy(compared.turns(batch)) if "turns" in batch.tokens else None,
        states=torch.from_numpy(batch.tokens["states"][sampled]) if "states" in batch.tokens else None,
        logprobs=torch.from_numpy(batch.tokens["logprobs"][sampled]),
        parts=parts,
        values=None if values is None else torch.from_numpy(values[sampled]),
        earned=None if penalty is None else torch.from_numpy(earned),
    )
    found = call_plugin(_named(config), estimator, samples, config)
    each = found if isinstance(found, TokenAdvantages) else _spread(found, samples.lengths, config)
    if values is not None and each.returns is None:
        raise UserError(f"{_named(config)} gave no returns, which the critic learns from")
    columns = {"advantages": each.advantages} | ({} if each.returns is None else {"returns": each.returns})
    size = int(batch.offsets[-1])
    tokens = {name: _column(name, column, sampled, size, config) for name, column in columns.items()}
    return _with_columns(batch, tokens.pop("advantages"), tokens)


def carries_gradient(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which samples have a token whose advantage is not 0, bool [S]."""
    total = np.concatenate([[0], np.cumsum(batch.tokens["advantages"] != 0)])
    return total[batch.offsets[1:]] > total[batch.offsets[:-1]]


def sampled_in_order(batch: Batch) -> npt.NDArray[np.int64]:
    """The indices of the sampled tokens, int64 [N]: rollout after rollout, each in the order of sampling."""
    at = np.flatnonzero(batch.tokens["loss_mask"])
    if "began" not in batch.tokens:
        return at
    rollout = np.repeat(batch.rollouts, batch.lengths)[at]
    return at[np.lexsort((batch.tokens["began"][at], rollout))]


def sampled_of_rollouts(batch: Batch) -> npt.NDArray[np.int64]:
    """The number of sampled tokens of each of the R rollouts, int64 [R]."""
    counts: npt.NDArray[np.int64] = (
        np.add.reduceat(batch.sampled, first_of_rollouts(batch)) if len(batch) else batch.sampled
    )
    return counts


def sampled_of_samples(batch: Batch) -> npt.NDArray[np.int64]:
    """The number of sampled tokens of each sample that are not rejected (token column `kept`), int64 [S]."""
    if "kept" not in batch.tokens:
        return batch.sampled
    total = np.concatenate([[0], np.cumsum(batch.tokens["kept"] > 0)])
    counts: npt.NDArray[np.int64] = total[batch.offsets[1:]] - total[batch.offsets[:-1]]
    return counts


def first_of_rollouts(batch: Batch) -> npt.NDArray[np.int64]:
    """The first sample of each of the R rollouts, int64 [R]."""
    return np.flatnonzero(np.diff(batch.rollouts, prepend=-1))


def token_rewards(batch: Batch) -> Floats:
    """Every reward at tokens, float32 [T]: the column `step_rewards`, and the rest at the last sampled token of
    the rollout; the reward of a seat at the seat's last token. What has no sampled token earns nothing."""
    found = batch.tokens.get("step_rewards", np.zeros(int(batch.offsets[-1]), np.float32)).copy()
    if SEATS in batch.tokens:
        found[batch.tokens[SEATS] > 0] = 0
    compared = _compared(batch)
    filled = compared.lengths > 0
    last = compared.sampled[np.cumsum(compared.lengths)[filled] - 1]
    found[last] += (compared.rewards - compared.sums(found))[filled]
    return found


SEATS, SEAT = "seats", "seat."


def seat_columns(trajectories: Sequence[Trajectory], batch: Batch) -> Batch:
    """`batch`, which holds the trajectories, with the token column `seats`, int64 [T]: the number of the seat
    that each token is of, 0 for the rollout's own; and a sample column `seat.<number>` with the reward of each. A turn
    whose role has no reward in its rollout is the rollout's own."""
    names = sorted({turn.role for t in trajectories for turn in t.turns if turn.trained and turn.role in t.seats})
    if not names:
        return batch
    number = {name: index for index, name in enumerate(names, 1)}
    each = [[number.get(turn.role, 0) if turn.role in t.seats else 0 for turn in t.turns] for t in trajectories]
    rewards = {
        f"{SEAT}{index}": np.array([t.seats.get(name, 0.0) for t in trajectories], np.float32)[batch.rollouts]
        for name, index in number.items()
    }
    return batch.with_tokens(**{SEATS: _of_turns(trajectories, batch, each)}).with_samples(**rewards)


@dataclass(frozen=True, slots=True)
class _Compared:
    """What is compared with each other, C in all: rollouts, and beside each those of its seats that have a reward."""

    sampled: npt.NDArray[np.int64]
    """int64 [N]: the sampled tokens, one after the other, each's in the order of sampling."""
    lengths: npt.NDArray[np.int64]
    """int64 [C]: how many each has."""
    rewards: Floats
    """float32 [C]."""
    groups: npt.NDArray[np.int64]
    """int64 [C]: equal where they are compared."""

    def sums(self, column: Floats) -> Floats:
        """Sum a token column [T] over the tokens of each, [C]."""
        total = np.concatenate([[0.0], np.cumsum(column[self.sampled], dtype=np.float64)])
        ends = np.cumsum(self.lengths)
        summed: Floats = (total[ends] - total[ends - self.lengths]).astype(np.float32)
        return summed

    def turns(self, batch: Batch) -> npt.NDArray[np.int64]:
        """The number of each token's turn, [N]: beside seats, among the turns of its own rollout or seat."""
        each: npt.NDArray[np.int64] = batch.tokens["turns"][self.sampled]
        if SEATS not in batch.tokens:
            return each
        own = np.repeat(np.arange(len(self.lengths)), self.lengths)
        pairs, place = np.unique(np.stack([own, each]), axis=1, return_inverse=True)
        found: npt.NDArray[np.int64] = place.reshape(-1) - np.searchsorted(pairs[0], own)
        return found


def _compared(batch: Batch) -> _Compared:
    sampled, first = sampled_in_order(batch), first_of_rollouts(batch)
    rewards, groups = batch.samples["reward"][first], batch.samples["group"][first]
    if SEATS not in batch.tokens:
        return _Compared(sampled, sampled_of_rollouts(batch), rewards, groups)
    seats = sum(name.startswith(SEAT) for name in batch.samples) + 1
    cell = np.repeat(batch.rollouts, batch.lengths)[sampled] * seats + batch.tokens[SEATS][sampled]
    counts = np.bincount(cell, minlength=len(first) * seats).reshape(len(first), seats)
    there = counts > 0
    there[:, 0] = True  # a rollout counts in its group, whatever it sampled
    table = np.stack([rewards, *(batch.samples[f"{SEAT}{index}"][first] for index in range(1, seats))], axis=1)
    named = groups[:, None] * seats + np.arange(seats)
    return _Compared(sampled[np.argsort(cell, kind="stable")], counts[there], table[there], named[there])


def with_rewards(batch: Batch, trajectories: Sequence[Trajectory], reads: AdvantageEntry) -> Batch:
    """`batch`, which holds the trajectories, with what they earned: the token columns `step_rewards`, `turns`, `states`
    and `seats`, and the sample columns of reward parts and of seats; those that the advantage (`reads`) needs."""
    batch = batch.with_tokens(step_rewards=step_rewards(trajectories, batch))
    if reads.needs_turns:
        batch = batch.with_tokens(turns=turn_numbers(trajectories, batch))
    if reads.needs_states:
        batch = batch.with_tokens(states=turn_states(trajectories, batch))
    if reads.needs_parts:
        batch = batch.with_samples(**part_columns(trajectories, batch))
    return seat_columns(trajectories, batch)


def step_rewards(trajectories: Sequence[Trajectory], batch: Batch) -> Floats:
    """The weighted step rewards of the turns, each at the last trained token of its turn, float32 [T] of
    `batch`, which holds the trajectories.

    The reward of a turn without a trained token is at the last trained token before it; before the first, at the end of
    the rollout.
    """
    columns = [np.zeros(0, np.float32)]
    for t in trajectories:
        column, last = np.zeros(len(t.ids), np.float32), -1
        for turn in t.turns:
            last = turn.end - 1 if turn.end > turn.start and turn.trained else last
            if last >= 0:
                column[last] += turn.reward * t.weights.get(STEP, 1.0)
        columns.append(column)
    if "began" not in batch.tokens:
        return np.concatenate(columns)
    return np.concatenate(columns)[_places(trajectories, batch)] * batch.tokens["loss_mask"]


def without_cut(batch: Batch, trajectories: Sequence[Trajectory], recipe: Recipe) -> tuple[Batch, dict[str, float]]:
    """The batch of these trajectories as `algorithm.overlong` and `algorithm.leave_out` say, and their metrics:
    with less in the sample column `reward`, and with a column `left_out`, bool [S]."""
    section, finishes = recipe.algorithm.overlong, recipe.algorithm.leave_out
    metrics: dict[str, float] = {}
    if section is not None:
        limit = recipe.rollout.max_tokens
        buffer = section.buffer * (limit if section.buffer <= 1 else 1)
        penalty = section.factor * np.array([overlong(t, limit, buffer) for t in trajectories], np.float32)
        batch = batch.with_samples(reward=(batch.samples["reward"] - penalty[batch.rollouts]).astype(np.float32))
        metrics["reward/overlong"] = -float(penalty.mean()) if len(penalty) else 0.0
    if finishes:
        cut = np.array([str(t.finish) in finishes for t in trajectories], bool)
        batch = batch.with_samples(left_out=cut[batch.rollouts])
        metrics["train/left_out"] = int(cut.sum())
    return batch, metrics


def overlong(trajectory: Trajectory, limit: int, buffer: float) -> float:
    """How far a conversation is into the last `buffer` tokens before `limit`, 0 to 1; 1 where a limit of tokens
    cut it (DAPO, arXiv:2503.14476, equation 13, with its sign turned)."""
    if trajectory.finish is FinishReason.LENGTH:
        return 1.0
    length = len(trajectory.ids[trajectory.last_path()])
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def left_out(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which samples `algorithm.leave_out` leaves out, bool [S]."""
    return batch.samples.get("left_out", np.zeros(len(batch), bool))


def turn_numbers(trajectories: Sequence[Trajectory], batch: Batch) -> npt.NDArray[np.int64]:
    """The number (0, 1, ...) of each sampled token's turn in its rollout, int64 [T] of `batch`, which holds the
    trajectories; 0 elsewhere."""
    return _of_turns(trajectories, batch, [list(range(len(t.turns))) for t in trajectories])


def turn_states(trajectories: Sequence[Trajectory], batch: Batch) -> npt.NDArray[np.int64]:
    """A number for the state in which each sampled token's turn began, equal for equal states of one task and
    role, int64 [T] of `batch`, which holds the trajectories; 0 elsewhere.

    States are equal by the environment's `state_key`, else by the tokens that the model was given since its last turn.
    """
    group, numbers = batch.samples["group"][first_of_rollouts(batch)].tolist(), dict[Any, int]()
    found = []
    for t, task in zip(trajectories, group, strict=True):
        begins = [*(segment.start for segment in t.segments), *(turn.end for turn in t.turns), 0]
        given = [t.ids[max(at for at in begins if at <= turn.start) : turn.start].tobytes() for turn in t.turns]
        keys = [(task, turn.role, turn.state or seen) for turn, seen in zip(t.turns, given, strict=True)]
        found.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return _of_turns(trajectories, batch, found)


def _of_turns(
    trajectories: Sequence[Trajectory], batch: Batch, values: Sequence[Sequence[int]]
) -> npt.NDArray[np.int64]:
    """Spread a value for each turn over its tokens, int64 [T] of the batch."""
    columns = [np.zeros(0, np.int64)]
    for t, each in zip(trajectories, values, strict=True):
        column = np.zeros(len(t.ids), np.int64)
        for turn, value in zip(t.turns, each, strict=True):
            column[turn.start : turn.end] = value
        columns.append(column)
    found: npt.NDArray[np.int64] = np.concatenate(columns)
    return found if "began" not in batch.tokens else found[_places(trajectories, batch)]


PART, PART_WEIGHT = "part.", "part_weight."


def part_columns(trajectories: Sequence[Trajectory], batch: Batch) -> dict[str, Floats]:
    """The reward parts of the trajectories as sample columns of `batch`, which holds them, float32 [S]:
    `part.<name>`, before weighting (0 where a sample has none), and `part_weight.<name>`."""
    found: dict[str, Floats] = {}
    for name in dict.fromkeys(name for t in trajectories for name in t.rewards):
        values = np.array([t.rewards.get(name, 0.0) for t in trajectories], np.float32)
        weights = np.array([t.weights.get(name, 1.0) for t in trajectories], np.float32)
        found |= {PART + name: values[batch.rollouts], PART_WEIGHT + name: weights[batch.rollouts]}
    return found


def _parts(batch: Batch, first: npt.NDArray[np.int64]) -> dict[str, RewardPart] | None:
    """What `part_columns` gave, a value for each rollout; None where it was not asked for."""
    names = [name.removeprefix(PART) for name in batch.samples if name.startswith(PART)]
    return {
        name: RewardPart(*(torch.from_numpy(batch.samples[kind + name][first]) for kind in (PART, PART_WEIGHT)))
        for name in names
    } or None


def _places(trajectories: Sequence[Trajectory], batch: Batch) -> npt.NDArray[np.int64]:
    """Where each token of the batch, whose rollouts branched, lies in the concatenated trajectories, [T]."""
    starts = np.cumsum([0, *(len(t.ids) for t in trajectories)])[:-1]
    return np.repeat(starts[batch.rollouts], batch.lengths) + batch.tokens["began"]


def _spread(found: object, lengths: Tensor, config: AlgorithmSection) -> TokenAdvantages:
    if not isinstance(found, Tensor) or found.shape != lengths.shape:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{_named(config)} gave {got}, not a tensor [{len(lengths)}] or TokenAdvantages")
    return TokenAdvantages(torch.repeat_interleave(found.detach().cpu(), lengths))


def _column(name: str, found: Any, sampled: npt.NDArray[np.int64], size: int, config: AlgorithmSection) -> Floats:
    tokens = len(sampled)
    if not isinstance(found, Tensor):
        raise UserError(f"{_named(config)} gave {name} of type {type(found).__name__}, not a tensor [{tokens}]")
    if found.shape != (tokens,):
        raise UserError(
            f"{_named(config)} gave {name} of shape {list(found.shape)}, not [{tokens}], one for every sampled token"
        )
    if not found.is_floating_point():
        raise UserError(f"{_named(config)} gave {name} of {found.dtype}, not of floating point")
    column = np.zeros(size, np.float32)
    column[sampled] = found.detach().float().cpu().numpy()
    if not np.isfinite(column).all():  # of float64, what float32 cannot hold included
        raise UserError(f"{_named(config)} gave {name} that are not finite")
    return column


def _named(config: AlgorithmSection) -> str:
    return f"algorithm.advantage {config.advantage.name!r}"


def sums(batch: Batch, column: Floats) -> Floats:
    """Sum a token column [T] over each rollout, [R]."""
    total = np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
    first = first_of_rollouts(batch)
    ends = np.append(first[1:], len(batch)) if len(first) else first
    summed: Floats = (total[batch.offsets[ends]] - total[batch.offsets[first]]).astype(np.float32)
    return summed


def _with_columns(batch: Batch, advantages: Floats, others: dict[str, Floats]) -> Batch:
    mean = (sums(batch, advantages) / np.maximum(sampled_of_rollouts(batch), 1))[batch.rollouts]
    return batch.with_tokens(advantages=advantages, **others).with_samples(advantage=mean.astype(np.float32))


def with_kl_penalty(batch: Batch, config: AlgorithmSection, coefficient: float | None = None) -> Batch:
    """The batch, which has `old_logprobs` and `reference_logprobs`, with the token column `kl_penalty`: the
    estimated KL times `coefficient` (None: algorithm.kl_coef), float32 [T], 0 where nothing was sampled.

    Ziegler et al. (arXiv:1909.08593), equation 2, token by token, as REINFORCE++ (arXiv:2501.03262) does. By default
    the estimate is k1 = old - reference: unbiased, and of either sign. Its sum over a rollout is the log-ratio of the
    rollout as a whole.
    """
    old, reference = (torch.from_numpy(batch.tokens[name]) for name in ("old_logprobs", "reference_logprobs"))
    estimate = kl_estimate(old, reference, kl_estimator(config)).numpy()
    return batch.with_tokens(kl_penalty=np.float32(config.kl_coef if coefficient is None else coefficient) * estimate)


def advantage_metrics(batch: Batch) -> dict[str, float]:
    """train/advantage_... over the sampled tokens of a batch that has `advantages`, and train/return_... where
    it has `returns`: mean, deviation, smallest and largest."""
    sampled = sampled_in_order(batch)
    names = {"train/advantage": "advantages", "train/return": "returns"}
    found: dict[str, float] = {}
    for name, column in names.items():
        if column in batch.tokens:
            found |= spread(name, batch.tokens[column][sampled])
    return found


def penalty_metrics(batch: Batch) -> dict[str, float]:
    """reward/kl_penalty, the mean over the rollouts of what was subtracted; nothing where the batch has none."""
    if "kl_penalty" not in batch.tokens:
        return {}
    subtracted = sums(batch, batch.tokens["kl_penalty"])
    return {"reward/kl_penalty": float(subtracted.sum()) / max(1, len(subtracted))}


def scattered(batch: Batch, chosen: npt.NDArray[np.bool_], compute: Callable[[Batch], Floats]) -> Floats:
    """`compute` of the chosen samples as a token column of the whole batch, float32 [T], 0 for the others.

    chosen: bool [S]. `compute` is not called if no sample is chosen.
    """
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    if chosen.any():
        found[np.repeat(chosen, batch.lengths)] = compute(batch.select(np.flatnonzero(chosen)))
    return found


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
            kept = _counted(batch, stream)
            each = token_shares(batch, recipe, chosen, None if kept is None else _sums(batch, kept))
            weights = batch.spread(each * batch.samples[stream] if stream in batch.samples else each)
            columns[column] = weights if kept is None else weights * kept
    return batch.with_tokens(**columns)


def _counted(batch: Batch, stream: str) -> Floats | None:
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
    return _sampled_column(batch, ~out)


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
    return _sampled_column(batch, highest(torch.from_numpy(batch.tokens["entropy"][sampled_in_order(batch)]), share))


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
    owner = f"algorithm.loss {config.loss.name!r}"
    given = call_plugin(owner, choose, Tokens(current, old, advantages, sample), rng, config)
    if not isinstance(given, Tensor) or given.shape != (len(sampled),) or not bool(torch.isfinite(given).all()):
        raise UserError(f"{owner} chose no finite tensor [{len(sampled)}], a value for every sampled token")
    return _sampled_column(batch, given)


def _sampled_column(batch: Batch, values: Tensor) -> Floats:
    """The values of the sampled tokens, in their order, as a token column [T], 0 elsewhere."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    found[sampled_in_order(batch)] = values.float().numpy()
    return found
