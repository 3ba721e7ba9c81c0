"""`Learner`: one step of learning, from groups to metrics, as one sequential program.

The roles (`Actor`, `Critic`, `Reference`) do the tensor work, in this process or on a cluster, through the same
methods. What depends on the whole step (advantages, the weight of each token in the loss, the order of mini-batches) is
fixed here, before anything is split. Samples whose advantage is 0 count in those weights, but are not computed if they
have no gradient.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from agentrl.algo import advantages, losses
from agentrl.algo.aggregation import token_weights
from agentrl.compute.batch import Batch
from agentrl.learner.advantages import (
    carries_gradient,
    penalty_metrics,
    sampled_of_rollouts,
    scattered,
    step_rewards,
    with_advantages,
    with_kl_penalty,
)
from agentrl.learner.metrics import MicroBatchMetrics, critic_metrics, policy_metrics
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.roles import Roles
from agentrl.recipe.schema import Recipe
from agentrl.trajectory import Group

Bools = npt.NDArray[np.bool_]


class Learner:
    """Learns by `recipe` with the roles of `role_host`, which may be wrapped, for example by a profiler.

    steps: number of steps of the loop so far.
    """

    def __init__(self, recipe: Recipe, role_host: Roles) -> None:
        self.recipe, self.actor = recipe, role_host.actor
        self.reference, self.critic = role_host.reference, role_host.critic
        self.advantage = advantages.get(recipe.algorithm.advantage).function
        self._vanishes = losses.get(recipe.algorithm.loss).vanishes_with_advantage
        self.steps = 0

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
        return self.update(self.with_advantages(batch.with_tokens(step_rewards=step_rewards(trajectories, batch))))

    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with the token column `advantages`, and those that it needs: `values` and `returns` with a
        critic; `old_logprobs`, `reference_logprobs` and `kl_penalty` with a KL in the reward.
        """
        if self.critic is not None:
            batch = batch.with_tokens(values=self.critic.values(batch))
        if self.reference is not None and self.recipe.algorithm.kl_in == "reward":
            batch = with_kl_penalty(batch, self.actor, self.reference, self.recipe.algorithm.kl_coef)
        return with_advantages(batch, self.advantage, self.recipe.algorithm)

    def update(self, batch: Batch) -> dict[str, float]:
        """Make one step of the loop: mini-batches x epochs of optimizer updates on `batch`, which has `advantages`.

        With a single update, the old log-probs are those of the differentiated pass and need no pass of their own.
        While the critic warms up, only the critic is updated.

        Returns train/... (loss, grad_norm, lr, entropy, what the loss measures, kl with a reference, tokens and samples
        computed), mismatch/... (see `policy_metrics`), critic/... with a critic, and reward/kl_penalty with a KL in the
        reward.
        """
        train, critic = self.recipe.train, self.recipe.critic
        rate = learning_rate(self.steps, train.steps, train.lr, train.schedule, train.warmup_steps)
        policy, values = MicroBatchMetrics(rate), MicroBatchMetrics()
        waits = critic is not None and self.steps < critic.warmup_steps
        if not waits:
            batch = self._with_logprobs(batch)
        for part in self._mini_batches(batch):
            if self.critic is not None:
                values.add(self.critic.update(self._weighted(part), self._critic_rate()))
            if not waits:
                self._update_actor(part, rate, policy)
        self.steps += 1
        learned = critic_metrics(values) if self.critic is not None else {}
        return {**policy_metrics(policy), **learned, **penalty_metrics(batch), "train/parameters": self.actor.trained}

    def _with_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with the old and reference log-probs of the samples that can have a gradient."""
        train, useful = self.recipe.train, self._useful(batch)
        if train.mini_batches * train.epochs > 1 and useful.any() and "old_logprobs" not in batch.tokens:
            batch = batch.with_tokens(old_logprobs=scattered(batch, useful, self.actor.logprobs))
        if self.reference is not None and "reference_logprobs" not in batch.tokens:
            batch = batch.with_tokens(reference_logprobs=scattered(batch, useful, self.reference.logprobs))
        return batch

    def _update_actor(self, batch: Batch, rate: float, metrics: MicroBatchMetrics) -> None:
        """Fix the weights by the whole update, drop samples without a gradient, and update the actor."""
        weighted = self._weighted(batch).select(np.flatnonzero(self._useful(batch)))
        if len(weighted):
            metrics.add(self.actor.update(weighted, rate), int(weighted.rollouts[-1]) + 1)

    def _critic_rate(self) -> float:
        train, critic = self.recipe.train, self.recipe.critic
        assert critic is not None
        return learning_rate(self.steps, train.steps, critic.lr, train.schedule, train.warmup_steps)

    def _weighted(self, batch: Batch) -> Batch:
        weights = token_weights(sampled_of_rollouts(batch), self.recipe.algorithm.aggregation)
        return batch.with_tokens(weight=batch.spread(weights[batch.rollouts]))

    def _useful(self, batch: Batch) -> Bools:
        """Return which samples can have a gradient, bool [S]."""
        algorithm = self.recipe.algorithm
        pulled = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        if pulled or algorithm.entropy_coef > 0 or not self._vanishes:
            return batch.sampled > 0
        return carries_gradient(batch) & (batch.sampled > 0)

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
