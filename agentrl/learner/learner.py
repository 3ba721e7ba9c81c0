"""`Learner`: one step of learning, from groups to metrics, as one sequential program.

The roles (`Actor`, `Critic`, `Reference`) do the tensor work, in this process or on a cluster, through the same
methods. What depends on the whole step (advantages, the weight of each token in the loss, the order of mini-batches) is
fixed here, before anything is split. Samples whose advantage is 0 count in those weights, but are not computed if they
have no gradient.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from agentrl.algo import advantages, losses
from agentrl.algo.aggregation import token_weights
from agentrl.compute.batch import Batch
from agentrl.learner.advantages import (
    advantage_metrics,
    carries_gradient,
    first_of_rollouts,
    left_out,
    penalty_metrics,
    sampled_of_rollouts,
    scattered,
    step_rewards,
    turn_numbers,
    with_advantages,
    with_kl_penalty,
    without_cut,
)
from agentrl.learner.metrics import MicroBatchMetrics, critic_metrics, policy_metrics
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.roles import Roles
from agentrl.recipe.schema import Recipe
from agentrl.trajectory import Group, Learned, Trajectory

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class Learner:
    """Learns by `recipe` with the roles of `role_host`, which may be wrapped, for example by a profiler.

    steps: number of steps of the loop so far. learned: what the last call of `learn` made of the valid trajectories, in
    their order.
    """

    def __init__(self, recipe: Recipe, role_host: Roles) -> None:
        self.recipe, self.actor = recipe, role_host.actor
        self.reference, self.critic = role_host.reference, role_host.critic
        self.advantage = advantages.bound(recipe.algorithm.advantage)
        self._needs_turns = advantages.get(recipe.algorithm.advantage.name).needs_turns
        self._vanishes = losses.get(recipe.algorithm.loss.name).vanishes_with_advantage
        self.steps = 0
        self.learned: list[Learned] = []

    @property
    def updates(self) -> int:
        """Number of optimizer updates, of all roles, that changed weights or began to."""
        return self.actor.updates + (self.critic.updates if self.critic is not None else 0)

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make one step: values, advantages, old and reference log-probs, updates. Return the metrics of `update`.

        If a KL is part of the reward, log-probs are computed before advantages.
        """
        batch = Batch.from_groups(groups)
        trajectories = [t for group in groups for t in group.trajectories]
        batch = batch.with_tokens(step_rewards=step_rewards(trajectories, batch))
        if self._needs_turns:
            batch = batch.with_tokens(turns=turn_numbers(trajectories, batch))
        batch, cut = without_cut(trajectories, batch, self.recipe)
        batch = self.with_advantages(batch)
        metrics, trained, logprobs = self._update(batch)
        self.learned = learned(trajectories, batch, trained, logprobs)
        return {**metrics, **advantage_metrics(batch), **cut}

    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with the token column `advantages`, and those that it needs: `values` and `returns` with a
        critic; `old_logprobs`, `reference_logprobs` and `kl_penalty` with a KL in the reward.
        """
        if self.critic is not None:
            batch = batch.with_tokens(values=self.critic.values(batch))
        if self.reference is not None and self.recipe.algorithm.kl_in == "reward":
            batch = with_kl_penalty(batch, self.actor, self.reference, self.recipe.algorithm)
        return with_advantages(batch, self.advantage, self.recipe.algorithm)

    def update(self, batch: Batch) -> dict[str, float]:
        """Make one step of the loop: mini-batches x epochs of optimizer updates on `batch`, which has `advantages`.

        With a single update, the old log-probs are those of the differentiated pass and need no pass of their own.
        While the critic warms up, only the critic is updated.

        Returns train/... (loss, grad_norm, lr, entropy, what the loss measures, kl with a reference, tokens and samples
        computed), mismatch/... (see `policy_metrics`), critic/... with a critic, and reward/kl_penalty with a KL in the
        reward.
        """
        return self._update(batch)[0]

    def _update(self, batch: Batch) -> tuple[dict[str, float], Bools, Floats | None]:
        """Make one step; return its metrics, which samples the policy was trained on [S], and their log-probs before it
        [T], None where they are not known."""
        train, critic = self.recipe.train, self.recipe.critic
        rate = self._rate(train.lr)
        policy, values = MicroBatchMetrics(rate), MicroBatchMetrics()
        waits = critic is not None and self.steps < critic.warmup_steps
        if not waits:
            batch = self._with_logprobs(batch)
        trained = self._useful(batch) & (not waits)
        logprobs = batch.tokens.get("old_logprobs")
        for part in self._mini_batches(batch):
            if self.critic is not None:
                values.add(self.critic.update(self._weighted(part), self._critic_rate()))
            if not waits:
                found = self._update_actor(part, rate, policy)
                if found is not None and "old_logprobs" not in batch.tokens:  # the only update of the step
                    logprobs = found
        self.steps += 1
        valued = critic_metrics(values) if self.critic is not None else {}
        metrics = {**policy_metrics(policy), **valued, **penalty_metrics(batch)}
        return {**metrics, "train/parameters": self.actor.trained}, trained, logprobs

    def _with_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with the old and reference log-probs of the samples that can have a gradient."""
        train, useful = self.recipe.train, self._useful(batch)
        if train.mini_batches * train.epochs > 1 and useful.any() and "old_logprobs" not in batch.tokens:
            batch = batch.with_tokens(old_logprobs=scattered(batch, useful, self.actor.logprobs))
        if self.reference is not None and "reference_logprobs" not in batch.tokens:
            batch = batch.with_tokens(reference_logprobs=scattered(batch, useful, self.reference.logprobs))
        return batch

    def _update_actor(self, batch: Batch, rate: float, metrics: MicroBatchMetrics) -> Floats | None:
        """Fix the weights by the whole update, drop samples without a gradient, and update the actor. Return the
        log-probs of that pass [T], 0 where none was computed; None where the actor does not give them."""
        useful = self._useful(batch)
        weighted = self._weighted(batch).select(np.flatnonzero(useful))
        if not len(weighted):
            return None
        found = self.actor.update(weighted, rate)
        metrics.add(found, int(weighted.rollouts[-1]) + 1)
        logprobs = found.columns.get("logprobs")
        return None if logprobs is None else scattered(batch, useful, lambda _: logprobs)

    def _critic_rate(self) -> float:
        assert self.recipe.critic is not None
        return self._rate(self.recipe.critic.lr)

    def _rate(self, peak: float) -> float:
        train = self.recipe.train
        return learning_rate(
            self.steps, train.steps, peak, train.schedule, train.warmup, train.min_lr_ratio, train.cycles
        )

    def _weighted(self, batch: Batch) -> Batch:
        recipe = self.recipe
        counted = ~left_out(batch)[first_of_rollouts(batch)]
        lengths = sampled_of_rollouts(batch) * counted
        weights = token_weights(lengths, recipe.algorithm.aggregation, recipe.rollout.max_tokens) * counted
        return batch.with_tokens(weight=batch.spread(weights[batch.rollouts]))

    def _useful(self, batch: Batch) -> Bools:
        """Return which samples can have a gradient, bool [S]."""
        algorithm = self.recipe.algorithm
        pulled = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        counted = (batch.sampled > 0) & ~left_out(batch)
        if pulled or algorithm.entropy_coef > 0 or not self._vanishes:
            return counted
        return carries_gradient(batch) & counted

    def _mini_batches(self, batch: Batch) -> Iterator[Batch]:
        """Yield the mini-batches of every epoch, in a new order of groups seeded by the step."""
        train = self.recipe.train
        if train.mini_batches == 1:
            yield from (batch for _ in range(train.epochs))
            return
        rng = np.random.default_rng((train.seed, self.steps))
        for _ in range(train.epochs):
            position = rng.permutation(int(batch.samples["group"].max(initial=-1)) + 1)
            order = np.argsort(position[batch.samples["group"]], kind="stable")
            yield from (part for part in batch.select(order).split(train.mini_batches) if len(part))


def learned(trajectories: Sequence[Trajectory], batch: Batch, trained: Bools, logprobs: Floats | None) -> list[Learned]:
    """Return what an update made of each trajectory of `batch`, which has `advantages`.

    trained: bool [S]. logprobs: of the trainer before the update [T]; known of the samples that were trained, and of
    all where a KL is part of the reward.
    """
    known = trained | ("kl_penalty" in batch.tokens)
    found = []
    bounds = np.append(first_of_rollouts(batch), len(batch)).tolist()
    for t, (first, end) in zip(trajectories, pairwise(bounds), strict=True):
        given = logprobs if known[first:end].all() else None
        columns = [_of_rollout(t, batch, column, first, end) for column in (batch.tokens["advantages"], given)]
        assert columns[0] is not None
        found.append(Learned(bool(trained[first:end].any()), columns[0], columns[1]))
    return found


def _of_rollout(t: Trajectory, batch: Batch, column: Floats | None, first: int, end: int) -> Floats | None:
    """Return a token column [T] of the rollout whose paths are the samples first:end of the batch, in its own order."""
    if column is None or "began" not in batch.tokens:
        return None if column is None else column[batch.span(first)]
    whole = np.zeros(len(t.ids), np.float32)
    span = slice(int(batch.offsets[first]), int(batch.offsets[end]))
    mask = batch.tokens["loss_mask"][span].astype(bool)
    whole[batch.tokens["began"][span][mask]] = column[span][mask]
    return whole
