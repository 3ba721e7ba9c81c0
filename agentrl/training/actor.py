"""`Actor`: the worker that trains the policy. The loop calls it and does not know where it runs.

An update's loss is the sum over its sampled tokens of weight x loss, the weights fixed before anything is split:
micro-batches add up to exactly the gradient of the whole. Samples whose advantage is 0 count in those weights; where
they carry no gradient they are not computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo import advantages, losses
from agentrl.algo.aggregation import token_weights
from agentrl.algo.loss import k3
from agentrl.algo.off_policy import OffPolicy, importance_weights
from agentrl.algo.terms import Samples, Tokens
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory import Group
from agentrl.training.batch import Batch
from agentrl.training.forward import choose
from agentrl.training.meter import Meter
from agentrl.training.optimizer import Optimizer, learning_rate
from agentrl.training.packing import Packed, micro_batches

Floats = npt.NDArray[np.float32]


class Actor:
    """Trains `model` in place by `recipe`. `description` says in a line how it computes log-probs."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.recipe, self.model = recipe, model.eval()
        self.forward, self.description = choose(model)
        self.advantage = advantages.get(recipe.algorithm.advantage)
        self.loss = losses.get(recipe.algorithm.loss)
        train = recipe.train
        self.optimizer = Optimizer(model.parameters(), train.betas, train.weight_decay, train.max_grad_norm)
        self.temperature = recipe.rollout.temperature or 1.0
        self.off_policy = off_policy_of(recipe)
        self.steps = 0  # updates of the loop so far
        self._reference = self._load_reference() if recipe.algorithm.kl_coef > 0 else None

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step: advantages, old log-probs, reference, update. Returns the metrics of `update`."""
        return self.update(self.with_advantages(Batch.from_groups(groups)))

    def with_advantages(self, batch: Batch) -> Batch:
        """With the token column `advantages`, and the sample column `advantage`."""
        columns = batch.samples
        samples = Samples(
            torch.from_numpy(columns["reward"]), torch.from_numpy(columns["group"]), torch.from_numpy(batch.sampled)
        )
        found: Floats = (
            self.advantage(samples, self.recipe.algorithm).float().numpy() if len(batch) else np.zeros(0, np.float32)
        )
        return batch.with_samples(advantage=found).with_tokens(advantages=batch.spread(found))

    def logprobs(self, batch: Batch) -> Floats:
        """Of the sampled tokens under the current weights, float32 [T], 0 elsewhere."""
        return self._logprobs(self.forward, batch)

    def reference_logprobs(self, batch: Batch) -> Floats:
        """Likewise under the frozen reference. Raises RuntimeError when the recipe keeps none (`kl_coef` is 0)."""
        if self._reference is None:
            raise RuntimeError("algorithm.kl_coef is 0, so no reference is kept")
        return self._logprobs(self._reference, batch)

    def update(self, batch: Batch) -> dict[str, float]:
        """One step of the loop: mini-batches x epochs of optimizer updates on `batch`, which has `advantages`.

        With one update the old log-probs are those of the pass that is differentiated: they cost no pass of their own.
        Metrics, under train/: loss, grad_norm, lr, entropy, clip fractions and what else the loss measures, kl (with a
        reference), tokens and samples (computed); mismatch/..., against the engine's log-probs (see `Meter`).
        """
        train = self.recipe.train
        rate = learning_rate(self.steps, train.steps, train.lr, train.schedule, train.warmup_steps)
        meter = Meter(corrected=self.off_policy != OffPolicy.NONE)
        useful = self._useful(batch)
        if train.mini_batches * train.epochs > 1 and useful.any():
            batch = batch.with_tokens(old_logprobs=self._scatter(batch, useful, self.logprobs))
        if self._reference is not None:
            batch = batch.with_tokens(reference_logprobs=self._scatter(batch, useful, self.reference_logprobs))
        for part in self._mini_batches(batch):
            self._one_update(part, rate, meter)
        self.steps += 1
        return {**meter.result(rate), "train/parameters": sum(p.numel() for p in self.optimizer.parameters)}

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on, besides the model's weights."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; the model's weights are loaded already."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["rng"])

    def _load_reference(self) -> Any:
        """The model that the recipe names, as it was before any training (also when a run is resumed); where an adapter
        is trained it is the same model without it."""
        if lora.layers(self.model):
            return self._without_adapter
        reference = load_model(self.recipe.model)[0].requires_grad_(False)
        return choose(reference)[0]

    def _without_adapter(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        with lora.switched_off(self.model):
            return self.forward(packed, temperature)

    def _logprobs(self, forward: Any, batch: Batch) -> Floats:
        found = np.zeros(int(batch.offsets[-1]), np.float32)
        with torch.no_grad():
            for packed in micro_batches(batch, self.recipe.train.micro_batch_tokens):
                found[packed.source] = forward(packed, self.temperature)[0].cpu().numpy()
        return found

    def _scatter(self, batch: Batch, useful: npt.NDArray[np.bool_], compute: Any) -> Floats:
        """compute(the useful samples) as a token column of the whole batch, 0 for the others."""
        found = np.zeros(int(batch.offsets[-1]), np.float32)
        found[np.repeat(useful, batch.lengths)] = compute(batch.select(np.flatnonzero(useful)))
        return found

    def _useful(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Which samples can carry a gradient, bool [S]."""
        algorithm = self.recipe.algorithm
        everything = algorithm.kl_coef > 0 or algorithm.entropy_coef > 0
        if everything or not getattr(self.loss, "vanishes_with_advantage", False):
            return batch.sampled > 0
        useful: npt.NDArray[np.bool_] = (batch.samples["advantage"] != 0) & (batch.sampled > 0)
        return useful

    def _mini_batches(self, batch: Batch) -> Iterator[Batch]:
        """Every epoch in a new order of groups, seeded by the step."""
        train = self.recipe.train
        if train.mini_batches == 1:
            yield from (batch for _ in range(train.epochs))
            return
        rng = np.random.default_rng((train.seed, self.steps))
        for _ in range(train.epochs):
            place = rng.permutation(int(batch.samples["group"].max(initial=-1)) + 1)
            order = np.argsort(place[batch.samples["group"]], kind="stable")
            yield from (part for part in batch.select(order).split(train.mini_batches) if len(part))

    def _one_update(self, batch: Batch, rate: float, meter: Meter) -> None:
        """Accumulate the gradient of every micro-batch, then one optimizer step."""
        weights = token_weights(batch.sampled, self.recipe.algorithm.aggregation)
        weighed = batch.with_tokens(weight=batch.spread(weights)).select(np.flatnonzero(self._useful(batch)))
        meter.samples += len(weighed)
        if not len(weighed):
            return
        for packed in micro_batches(weighed, self.recipe.train.micro_batch_tokens):
            with lora.dropping_out(self.model):
                loss = self._loss(packed, weighed, meter)
            loss.backward()
        meter.updated(self.optimizer.step(rate))

    def _loss(self, packed: Packed, batch: Batch, meter: Meter) -> Tensor:
        """This micro-batch's share of the update's loss."""
        algorithm = self.recipe.algorithm
        logprobs, entropy = self.forward(packed, self.temperature)

        def column(name: str) -> Tensor:
            return torch.from_numpy(batch.tokens[name][packed.source]).to(logprobs.device)

        old = column("old_logprobs") if "old_logprobs" in batch.tokens else logprobs.detach()
        terms = self.loss(Tokens(logprobs, old, column("advantages")), algorithm)
        engine = column("logprobs")
        sample = torch.from_numpy(np.searchsorted(batch.offsets, packed.source, side="right")).to(logprobs.device)
        factor = importance_weights(old, engine, sample, self.off_policy, self.recipe.algorithm.off_policy_cap)
        each, measured = terms.loss * factor, {**terms.metrics, "entropy": entropy.detach()}
        if "reference_logprobs" in batch.tokens:
            kl = k3(logprobs, column("reference_logprobs"))
            each = each + algorithm.kl_coef * kl
            measured["kl"] = kl.detach()
        if algorithm.entropy_coef:
            each = each - algorithm.entropy_coef * entropy
        loss = (column("weight") * each).sum()
        meter.micro_batch(len(packed.ids), loss, measured, old - engine, factor)
        return loss


def off_policy_of(recipe: Recipe) -> str:
    """How the recipe weighs tokens that others sampled, `auto` resolved."""
    chosen = recipe.algorithm.off_policy
    if chosen != "auto":
        return chosen
    apart = recipe.engine.name != "local" or recipe.rollout.overlap != "none"
    return OffPolicy.TOKEN_TIS if apart else OffPolicy.NONE
