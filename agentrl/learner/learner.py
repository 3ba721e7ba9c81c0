"""`Learner`: one step of learning, from groups to metrics, as one sequential program.

The roles (`Actor`, `Critic`, `Reference`) do the tensor work, in this process or on a cluster, through the same
methods. What depends on the whole step (advantages, the weight of each token in the loss, the order of mini-batches) is
fixed here, before anything is split. Samples whose advantage is 0 count in those weights, but are not computed if they
have no gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.algo import advantages, losses
from agentrl.compute.batch import Batch
from agentrl.containment.threads import DaemonThreads
from agentrl.learner.columns import (
    advantage_metrics,
    carries_gradient,
    chosen,
    first_of_rollouts,
    kept_tokens,
    learned_by,
    of_high_entropy,
    penalty_metrics,
    rejection_metrics,
    sampled_of_samples,
    scattered,
    token_shares,
    weighted,
    with_advantages,
    with_kl_penalty,
    with_rewards,
    with_streams,
    without_cut,
)
from agentrl.learner.metrics import MicroBatchMetrics, critic_metrics, policy_metrics
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.roles import Roles
from agentrl.learner.teacher import Guide
from agentrl.recipe.schema import Recipe
from agentrl.trajectory import Group, Learned, Trajectory

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(slots=True)
class Updates:
    """What the optimizer updates of one step came to."""

    policy: MicroBatchMetrics
    """Of the policy's updates."""
    values: MicroBatchMetrics
    """Of the critic's."""
    trained: Bools
    """Which samples the policy is trained on, bool [S]."""
    logprobs: Floats | None = None
    """The policy's log-probs before the step, float32 [T]; None where they are not known."""


class Learner:
    """Learns by `recipe` with the roles of `role_host`, which may be wrapped, for example by a profiler.

    guide: asks the teachers (None: those that the role host has). steps: number of steps of the loop so far. kl_coef:
    the coefficient of the KL in the next step. learned: what the last call of `learn` made of the valid trajectories,
    in their order.
    """

    def __init__(self, recipe: Recipe, role_host: Roles, guide: Guide | None = None) -> None:
        self.guide = guide or Guide(recipe, role_host.teachers)
        self.recipe, self.actor = recipe, role_host.actor
        self.reference, self.critic = role_host.reference, role_host.critic
        self._pools = role_host.pools
        self.advantage = advantages.bound(recipe.algorithm.advantage)
        self._reads = advantages.get(recipe.algorithm.advantage.name)
        self._choose = losses.chooser(recipe.algorithm.loss)
        self._vanishes = losses.get(recipe.algorithm.loss.name).vanishes_with_advantage
        self.steps = 0
        self.kl_coef = recipe.algorithm.kl_coef
        self._adaptive = recipe.algorithm.kl_target is not None
        self._moves = 0
        self.learned: list[Learned] = []

    @property
    def updates(self) -> int:
        """Number of optimizer updates, and of moves of the reference, that changed weights or began to."""
        return self.actor.updates + (self.critic.updates if self.critic is not None else 0) + self._moves

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make one step, stage by stage; return the metrics of `update`, train/advantage_... and what was cut.

        Beside each stage stand the columns of the batch that it adds.
        """
        trajectories = [t for group in groups for t in group.trajectories]
        batch = Batch.from_groups(groups)
        batch = with_rewards(batch, trajectories, self._reads)  # step_rewards, turns, states, seats; part., seat.
        batch, cut = without_cut(batch, trajectories, self.recipe)  # reward, left_out
        batch = with_streams(
            batch, trajectories, self.recipe, self.steps, self.guide.part_of
        )  # policy, imitate, distill
        batch = self.with_advantages(batch)  # values, kl_penalty, advantages, returns
        batch = self.guide.taught(batch, trajectories)  # what teachers would have said
        batch = self.with_logprobs(batch)  # old_logprobs, reference_logprobs, entropy, kept
        made = self._updates(batch)
        metrics = self._end_step(batch, made)
        self.learned = learned(trajectories, batch, made.trained, made.logprobs)
        return {**metrics, **advantage_metrics(batch), **cut}

    def with_advantages(self, batch: Batch) -> Batch:
        """The batch with the token column `advantages`, and those that it needs: `values` and `returns` with a
        critic; `old_logprobs`, `reference_logprobs` and `kl_penalty` with a KL in the reward.
        """
        algorithm = self.recipe.algorithm
        penalized = self.reference is not None and algorithm.kl_in == "reward"
        columns = {"values"} if self.critic is not None else set()
        columns |= {"old_logprobs", "reference_logprobs"} if penalized else set()
        if self.critic is not None and not self._waits:  # all at once: they may have workers of their own
            columns |= self._needed_logprobs()
        batch = self._with_passes(batch, dict.fromkeys(columns, batch.sampled > 0))
        if penalized:
            batch = with_kl_penalty(batch, algorithm, self.kl_coef)
        return with_advantages(batch, self.advantage, algorithm)

    def update(self, batch: Batch) -> dict[str, float]:
        """Make one step of the loop: mini-batches x epochs of optimizer updates on `batch`, which has `advantages`.

        With a single update, the old log-probs are those of the differentiated pass and need no pass of their own.
        While the critic warms up, only the critic is updated.

        Returns train/... (loss, grad_norm, lr, entropy, what the loss measures, kl with a reference, tokens and samples
        computed), mismatch/... (see `policy_metrics`), critic/... with a critic, and reward/kl_penalty with a KL in the
        reward.
        """
        batch = self.with_logprobs(batch)
        return self._end_step(batch, self._updates(batch))

    def with_logprobs(self, batch: Batch) -> Batch:
        """The batch, which has `advantages`, with the log-probs that the updates read, and what is decided by those of
        the whole step: `old_logprobs`, `reference_logprobs`, `entropy` and `kept`, as far as the recipe needs them."""
        if self._waits or not self._useful(batch).any():
            return batch
        algorithm, sampled = self.recipe.algorithm, batch.sampled > 0
        known = {
            "old_logprobs": sampled if self._judges_whole else self._useful(batch),
            "reference_logprobs": self._moved_by_policy(batch),
        }
        batch = self._with_passes(batch, {name: known[name] for name in self._needed_logprobs()})
        if algorithm.top_entropy < 1:
            batch = batch.with_tokens(entropy=scattered(batch, sampled, self.actor.entropies))
        return batch.with_tokens(kept=kept_tokens(batch, algorithm)) if algorithm.reject else batch

    def _updates(self, batch: Batch) -> "Updates":
        """Update the roles by each mini-batch of every epoch, the critic beside the policy."""
        rate, waits = self._rate(self.recipe.train.lr), self._waits
        made = Updates(MicroBatchMetrics(rate), MicroBatchMetrics(), self._useful(batch) & (not waits))
        made.logprobs = batch.tokens.get("old_logprobs")
        for number, part in enumerate(self._mini_batches(batch)):
            calls: dict[str, Callable[[], Any]] = {}
            if self.critic is not None:
                shared = part.with_tokens(weight=part.spread(token_shares(part, self.recipe)))
                calls["critic"] = partial(self.critic.update, shared, self._critic_rate())
            if not waits:
                calls["actor"] = partial(self._update_actor, self._chosen(part, number), rate, made.policy)
            results = self._at_once(calls)
            if "critic" in results:
                made.values.add(results["critic"])
            if results.get("actor") is not None and "old_logprobs" not in batch.tokens:  # the only update of the step
                made.logprobs = results["actor"]
        return made

    def _end_step(self, batch: Batch, made: "Updates") -> dict[str, float]:
        """Count the step, let the reference and the coefficient of the KL follow, and return the metrics."""
        self.steps += 1
        self._move_reference()
        valued = critic_metrics(made.values) if self.critic is not None else {}
        metrics = {**policy_metrics(made.policy), **valued, **penalty_metrics(batch), **rejection_metrics(batch)}
        if self._adaptive:
            metrics["train/kl_coef"] = self.kl_coef
            self.kl_coef = self._followed(batch, metrics)
        return {**metrics, "train/parameters": self.actor.trained}

    def _move_reference(self) -> None:
        """Let the reference follow the policy, if the recipe says so and this step is one of those."""
        moves = self.recipe.algorithm.reference
        if self.reference is not None and moves is not None and self.steps % (moves.every or 1) == 0:
            self._moves += 1
            self.reference.follow(moves.ema or 0.0)

    @property
    def _waits(self) -> bool:
        """Whether the critic warms up, so that the policy is not updated in this step."""
        critic = self.recipe.critic
        return critic is not None and self.steps < critic.warmup_steps

    def _needed_logprobs(self) -> set[str]:
        """The columns of log-probs that the updates of a step read besides the engine's."""
        before = self.recipe.train.mini_batches * self.recipe.train.epochs > 1 or self._judges_whole
        found = {"old_logprobs"} if before else set()
        return found | {"reference_logprobs"} if self.reference is not None else found

    @property
    def _judges_whole(self) -> bool:
        """Whether the log-probs of all samples decide what is left out of an update."""
        return self._choose is not None or bool(self.recipe.algorithm.reject)

    def _with_passes(self, batch: Batch, columns: Mapping[str, Bools]) -> Batch:
        """The batch with `columns`; those that it lacks are computed by their roles, each for some samples:
        name -> bool [S]."""
        passes: dict[str, Callable[[Batch], Floats]] = {"old_logprobs": self.actor.logprobs}
        if self.critic is not None:
            passes["values"] = self.critic.values
        if self.reference is not None:
            passes["reference_logprobs"] = self.reference.logprobs
        role_of = {"values": "critic", "old_logprobs": "actor", "reference_logprobs": "reference"}
        calls = {  # in one order in every process: `columns` may come from a set
            role_of[name]: partial(scattered, batch, columns[name], compute)
            for name, compute in passes.items()
            if name in columns and name not in batch.tokens
        }
        names = {role: name for name, role in role_of.items()}
        return batch.with_tokens(**{names[role]: found for role, found in self._at_once(calls).items()})

    def _at_once(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Make one call for each role; return the results by role. Pools of workers work at the same time, the roles
        of one pool one after the other."""
        queues: dict[str, dict[str, Callable[[], T]]] = {}
        for role, call in calls.items():
            queues.setdefault(self._pools.get(role, ""), {})[role] = call
        if len(queues) < 2:
            return _in_turn(calls)
        threads = DaemonThreads("roles", len(queues))
        try:
            futures = [threads.submit(_in_turn, queue) for queue in queues.values()]
            return {role: found for future in futures for role, found in future.result().items()}
        finally:
            threads.shutdown(wait=False)

    def _update_actor(self, batch: Batch, rate: float, metrics: MicroBatchMetrics) -> Floats | None:
        """Fix the weights by the whole update, drop samples without a gradient, and update the actor. Return the
        log-probs of that pass [T], 0 where none was computed; None where the actor does not give them."""
        useful = self._useful(batch)
        part = weighted(batch, self.recipe).select(np.flatnonzero(useful))
        if not len(part):
            return None
        if self._adaptive:
            part = part.with_samples(kl_coef=np.full(len(part), self.kl_coef, np.float32))
        found = self.actor.update(part, rate)
        metrics.add(found, int(part.rollouts[-1]) + 1)
        logprobs = found.columns.get("logprobs")
        return None if logprobs is None else scattered(batch, useful, lambda _: logprobs)

    def _chosen(self, batch: Batch, number: int) -> Batch:
        """The batch of update `number` (0, 1, ...) of the step with what is decided over all of its tokens, as
        token columns, float32 [T]: `chosen` by the loss, and `policy_factor`, 0 on those of low entropy."""
        algorithm = self.recipe.algorithm
        if self._choose is not None and "old_logprobs" in batch.tokens:
            moved = number > 0
            logprobs = (
                scattered(batch, batch.sampled > 0, self.actor.logprobs) if moved else batch.tokens["old_logprobs"]
            )
            rng = np.random.default_rng((self.recipe.train.seed, self.steps, number))
            batch = batch.with_tokens(chosen=chosen(batch, logprobs, self._choose, rng, algorithm))
        if "entropy" in batch.tokens:
            batch = batch.with_tokens(policy_factor=of_high_entropy(batch, algorithm.top_entropy))
        return batch

    def _followed(self, batch: Batch, metrics: Mapping[str, float]) -> float:
        """The coefficient of the KL after a step: up to a fifth larger or smaller for every `kl_horizon`
        samples, as the KL per token is above or below its target."""
        algorithm = self.recipe.algorithm
        assert algorithm.kl_target is not None
        found = metrics.get("train/kl")
        if "kl_penalty" in batch.tokens:
            tokens = max(1, int(batch.sampled.sum()))
            found = float(batch.tokens["kl_penalty"].sum(dtype=np.float64)) / self.kl_coef / tokens
        if found is None:  # nothing was trained
            return self.kl_coef
        error = min(0.2, max(-0.2, found / algorithm.kl_target - 1))
        return self.kl_coef * (1 + error * len(first_of_rollouts(batch)) / algorithm.kl_horizon)

    def _critic_rate(self) -> float:
        assert self.recipe.critic is not None
        return self._rate(self.recipe.critic.lr)

    def _rate(self, peak: float) -> float:
        train = self.recipe.train
        return learning_rate(
            self.steps, train.steps, peak, train.schedule, train.warmup_steps, train.min_lr_ratio, train.cycles
        )

    def _useful(self, batch: Batch) -> Bools:
        """Which samples can have a gradient, bool [S]."""
        others = learned_by(batch, "imitate") | learned_by(batch, "distill")
        return self._moved_by_policy(batch) | (others & (batch.sampled > 0))

    def _moved_by_policy(self, batch: Batch) -> Bools:
        """To which samples the policy loss with its KL and entropy terms can give a gradient, bool [S]."""
        algorithm = self.recipe.algorithm
        there = learned_by(batch, "policy") & (sampled_of_samples(batch) > 0)
        pulled = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        if pulled or algorithm.entropy_coef > 0 or not self._vanishes:
            return there
        return carries_gradient(batch) & there

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


def _in_turn(calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    return {role: call() for role, call in calls.items()}


def learned(trajectories: Sequence[Trajectory], batch: Batch, trained: Bools, logprobs: Floats | None) -> list[Learned]:
    """What an update made of each trajectory of `batch`, which has `advantages`.

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
    """A token column [T] of the rollout whose paths are the samples first:end of the batch, in its own order."""
    if column is None or "began" not in batch.tokens:
        return None if column is None else column[batch.span(first)]
    whole = np.zeros(len(t.ids), np.float32)
    span = slice(int(batch.offsets[first]), int(batch.offsets[end]))
    mask = batch.tokens["loss_mask"][span].astype(bool)
    whole[batch.tokens["began"][span][mask]] = column[span][mask]
    return whole
