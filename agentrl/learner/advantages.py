"""Advantages of a whole batch, from its rewards, its values and the KL penalty, before the batch is split."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.compute.batch import Batch
from agentrl.errors import UserError, call_plugin
from agentrl.recipe.schema import AlgorithmSection
from agentrl.rollout.hooks import STEP
from agentrl.trajectory import Trajectory

Floats = npt.NDArray[np.float32]


def with_advantages(batch: Batch, estimator: Any, config: AlgorithmSection) -> Batch:
    """Return `batch` with advantages by `estimator`, a function of the registry `algo.advantages`.

    It adds the token column `advantages`, and `returns` if the estimator gives them: float32 [T], 0 where nothing was
    sampled; and the sample column `advantage`, float32 [S], the mean over a sample's tokens. It reads the sample
    columns `reward` and `group` and, if they exist, the token columns `step_rewards`, `values` and `kl_penalty`, which
    is subtracted from the rewards. config: the recipe's `algorithm`.

    Raises UserError: the estimator raised, or returned another type or shape, or values that are not finite.
    """
    sampled = batch.tokens["loss_mask"].astype(bool)
    lengths = batch.sampled
    if not lengths.any():
        return _with_columns(batch, np.zeros(int(batch.offsets[-1]), np.float32), {})
    values, penalty = batch.tokens.get("values"), batch.tokens.get("kl_penalty")
    earned, each_token = batch.samples["reward"], token_rewards(batch)
    samples = Samples(
        rewards=torch.from_numpy(earned if penalty is None else earned - sums(batch, penalty)),
        groups=torch.from_numpy(batch.samples["group"]),
        lengths=torch.from_numpy(lengths),
        token_rewards=torch.from_numpy((each_token if penalty is None else each_token - penalty)[sampled]),
        values=None if values is None else torch.from_numpy(values[sampled]),
        earned=None if penalty is None else torch.from_numpy(earned),
    )
    found = call_plugin(_named(config), estimator, samples, config)
    each = found if isinstance(found, TokenAdvantages) else _spread(found, samples.lengths, config)
    if values is not None and each.returns is None:
        raise UserError(f"{_named(config)} gave no returns, which the critic learns from")
    columns = {"advantages": each.advantages} | ({} if each.returns is None else {"returns": each.returns})
    tokens = {name: _column(name, column, sampled, config) for name, column in columns.items()}
    return _with_columns(batch, tokens.pop("advantages"), tokens)


def carries_gradient(batch: Batch) -> npt.NDArray[np.bool_]:
    """Return which samples have a token whose advantage is not 0, bool [S]."""
    total = np.concatenate([[0], np.cumsum(batch.tokens["advantages"] != 0)])
    some: npt.NDArray[np.bool_] = total[batch.offsets[1:]] > total[batch.offsets[:-1]]
    return some


def token_rewards(batch: Batch) -> Floats:
    """Return the rewards by token, float32 [T]: the column `step_rewards`, and the rest of a sample's reward at its
    last sampled token. A sample without a sampled token has no reward."""
    found = batch.tokens.get("step_rewards", np.zeros(int(batch.offsets[-1]), np.float32)).copy()
    at = np.flatnonzero(batch.tokens["loss_mask"])
    filled = batch.sampled > 0
    last = at[np.cumsum(batch.sampled)[filled] - 1]
    found[last] += (batch.samples["reward"] - sums(batch, found))[filled]
    return found


def step_rewards(trajectories: Sequence[Trajectory]) -> Floats:
    """Return the weighted step rewards, each at the last sampled token of its turn, float32 [T].

    The reward of a turn without a sampled token is at the last token sampled before it; if there is none, it is left
    to `token_rewards`, which puts it at the end of the sample.
    """
    columns = [np.zeros(0, np.float32)]
    for t in trajectories:
        column, last = np.zeros(len(t.ids), np.float32), -1
        for turn in t.turns:
            last = turn.end - 1 if turn.end > turn.start else last
            if last >= 0:
                column[last] += turn.reward * t.weights.get(STEP, 1.0)
        columns.append(column)
    return np.concatenate(columns)


def _spread(found: Any, lengths: Tensor, config: AlgorithmSection) -> TokenAdvantages:
    if not isinstance(found, Tensor) or found.shape != lengths.shape:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{_named(config)} gave {got}, not a tensor [{len(lengths)}] or TokenAdvantages")
    return TokenAdvantages(torch.repeat_interleave(found.detach().cpu(), lengths))


def _column(name: str, found: Any, sampled: npt.NDArray[np.bool_], config: AlgorithmSection) -> Floats:
    tokens = int(sampled.sum())
    if not isinstance(found, Tensor):
        raise UserError(f"{_named(config)} gave {name} of type {type(found).__name__}, not a tensor [{tokens}]")
    if found.shape != (tokens,):
        raise UserError(
            f"{_named(config)} gave {name} of shape {list(found.shape)}, not [{tokens}], one for every sampled token"
        )
    if not found.is_floating_point():
        raise UserError(f"{_named(config)} gave {name} of {found.dtype}, not of floating point")
    column = np.zeros(len(sampled), np.float32)
    column[sampled] = found.detach().float().cpu().numpy()
    if not np.isfinite(column).all():  # of float64, what float32 cannot hold included
        raise UserError(f"{_named(config)} gave {name} that are not finite")
    return column


def _named(config: AlgorithmSection) -> str:
    return f"algorithm.advantage {config.advantage!r}"


def sums(batch: Batch, column: Floats) -> Floats:
    """Sum a token column [T] over each sample, [S]."""
    total = np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
    summed: Floats = (total[batch.offsets[1:]] - total[batch.offsets[:-1]]).astype(np.float32)
    return summed


def _with_columns(batch: Batch, advantages: Floats, others: dict[str, Floats]) -> Batch:
    mean = sums(batch, advantages) / np.maximum(batch.sampled, 1)
    return batch.with_tokens(advantages=advantages, **others).with_samples(advantage=mean.astype(np.float32))


def with_kl_penalty(batch: Batch, actor: Any, reference: Any, coefficient: float) -> Batch:
    """Return the batch with `old_logprobs`, `reference_logprobs` and `kl_penalty`, coefficient x (old - reference):
    token columns, float32 [T], 0 where nothing was sampled. actor, reference: have `logprobs(batch)`.

    Ziegler et al. (arXiv:1909.08593), equation 2, by token, as in REINFORCE++ (arXiv:2501.03262). The difference is the
    estimator k1 of Schulman, "Approximating KL divergence" (2020), which is unbiased and of either sign; its sum over a
    sample is the log-ratio of the whole sample.
    """
    sampled = batch.sampled > 0
    old, frozen = (scattered(batch, sampled, role.logprobs) for role in (actor, reference))
    penalty = np.float32(coefficient) * (old - frozen)
    return batch.with_tokens(old_logprobs=old, reference_logprobs=frozen, kl_penalty=penalty)


def penalty_metrics(batch: Batch) -> dict[str, float]:
    """Return reward/kl_penalty, the mean penalty of a sample; nothing if the batch has no penalty."""
    if "kl_penalty" not in batch.tokens:
        return {}
    return {"reward/kl_penalty": float(sums(batch, batch.tokens["kl_penalty"]).sum()) / max(1, len(batch))}


def scattered(batch: Batch, chosen: npt.NDArray[np.bool_], compute: Callable[[Batch], Floats]) -> Floats:
    """Return `compute` of the chosen samples as a token column of the whole batch, float32 [T], 0 for the others.

    chosen: bool [S]. `compute` is not called if no sample is chosen.
    """
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    if chosen.any():
        found[np.repeat(chosen, batch.lengths)] = compute(batch.select(np.flatnonzero(chosen)))
    return found
