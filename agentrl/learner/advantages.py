"""Advantages of a whole batch, from its rewards, its values and the KL penalty, before the batch is split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo.loss import kl_estimate, kl_estimator
from agentrl.algo.terms import RewardPart, Samples, TokenAdvantages
from agentrl.compute.batch import Batch
from agentrl.errors import UserError, call_plugin
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.rollout.hooks import STEP
from agentrl.rollout.metrics import spread
from agentrl.trajectory import FinishReason, Trajectory

Floats = npt.NDArray[np.float32]


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


def without_cut(trajectories: Sequence[Trajectory], batch: Batch, recipe: Recipe) -> tuple[Batch, dict[str, float]]:
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
        keys = [(task, turn.role, turn.state or told) for turn, told in zip(t.turns, given, strict=True)]
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
