"""`Actor`: the tensor work of the policy, in one process or as one rank of several.

It receives its rank's part of a batch whose weights in the loss are fixed already, so that the gradients of
micro-batches and ranks add up to exactly that of the whole batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo import losses
from agentrl.algo.loss import kl_estimate, kl_estimator
from agentrl.algo.off_policy import OffPolicy, importance_weights
from agentrl.algo.terms import LossTerms, Tokens
from agentrl.compute.batch import Batch
from agentrl.compute.forward import Forward, choose, computed_in
from agentrl.compute.micro_batches import (
    EMPTY,
    SINGLE_PROCESS,
    ProcessGroup,
    aligned_micro_batches,
    column_at,
    token_column,
)
from agentrl.compute.packing import Packed
from agentrl.errors import UserError, call_plugin
from agentrl.learner.metrics import MicroBatchMetrics, mismatch_columns
from agentrl.learner.optimizer import MuonAdamW, Optimizer
from agentrl.models import lora
from agentrl.recipe.schema import AlgorithmSection, Recipe


class Actor:
    """Trains `model` in place by `recipe`.

    forward: computes log-probs; None chooses the fastest exact implementation for a model that is whole in this
    process. ranks: the ranks that share the model. description: how `forward` computes, in one line.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        forward: Forward | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        description: str = "",
    ) -> None:
        self.recipe, self.model, self.ranks = recipe, model.eval(), ranks
        if forward is None:
            forward, description = choose(
                model, computed_in(recipe.model), recipe.model.checkpointing, recipe.cluster.offload.activations
            )
        self.forward, self.description = forward, description
        self.loss = losses.bound(recipe.algorithm.loss)
        self.optimizer: Optimizer | MuonAdamW = self._adamw(recipe.train.weight_decay)
        self.temperature = recipe.rollout.temperature or 1.0
        self.off_policy = off_policy_of(recipe)

    def _adamw(self, weight_decay: float) -> Optimizer:
        train, offload = self.recipe.train, self.recipe.cluster.offload.optimizer
        return Optimizer(self.model.named_parameters(), train.betas, weight_decay, train.max_grad_norm, offload)

    def begin_stage(self, weight_decay: float, muon: float | None = None) -> None:
        """Go on with a new optimizer. muon: learning rate of Muon over AdamW's, where Muon trains the matrices of the
        blocks; the model is then whole in this process."""
        begun, train = self.optimizer.begun, self.recipe.train
        if muon is None:
            self.optimizer = self._adamw(weight_decay)
        else:
            self.optimizer = MuonAdamW(self.model, muon, train.betas, weight_decay, train.max_grad_norm)
        self.optimizer.begun = begun

    @property
    def trained(self) -> int:
        """Number of trained parameters, over all ranks."""
        return sum(p.numel() for p in self.optimizer.parameters)

    @property
    def updates(self) -> int:
        """Number of optimizer updates that changed the weights, or began to."""
        return self.optimizer.begun

    def logprobs(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the log-probs of the sampled tokens under the current weights, float32 [T], 0 elsewhere."""
        tokens = self.recipe.train.micro_batch_tokens
        return token_column(batch, tokens, self.ranks, lambda packed: self.forward(packed, self.temperature)[0])

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update at learning rate `rate` from this rank's part of the batch; return its metrics.

        It reads the token columns `weight` (in the loss), `advantages`, `logprobs` (the engine's) and, if there are
        any, `reference_logprobs` and `old_logprobs`. Without the latter, log-probs of the differentiated pass are the
        old ones, and the column `logprobs` of the metrics.
        """
        metrics = MicroBatchMetrics()
        for packed in aligned_micro_batches(batch, self.recipe.train.micro_batch_tokens, self.ranks):
            with lora.dropping_out(self.model):
                loss = self._loss(packed, batch, metrics)
            (loss * self.ranks.size).backward()
        metrics.updated(self.optimizer.step(rate), rate)
        if "old_logprobs" not in batch.tokens:
            metrics.keep_logprobs(int(batch.offsets[-1]))
        return metrics

    def _loss(self, packed: Packed, batch: Batch, metrics: MicroBatchMetrics) -> Tensor:
        """Return the loss of a micro-batch, a summand of the update's, and add its metrics to `metrics`."""
        algorithm = self.recipe.algorithm
        logprobs, entropy = self.forward(packed, self.temperature)
        if packed is EMPTY:
            return logprobs.sum()
        device = logprobs.device
        engine = column_at(batch, "logprobs", packed, device)
        if "old_logprobs" in batch.tokens:
            old = column_at(batch, "old_logprobs", packed, device)
        else:
            old = logprobs.detach()
            metrics.predicted(packed.source, old)
        path = np.searchsorted(batch.offsets, packed.source, side="right") - 1
        sample = torch.from_numpy(batch.rollouts[path]).to(device)
        terms = loss_terms(
            self.loss, Tokens(logprobs, old, column_at(batch, "advantages", packed, device), sample), algorithm
        )
        factor = importance_weights(old, engine, sample, self.off_policy, algorithm.off_policy_cap)
        each, measured = terms.loss * factor, {**terms.metrics, "entropy": entropy.detach()}
        if "reference_logprobs" in batch.tokens:
            reference = column_at(batch, "reference_logprobs", packed, device)
            pulls = algorithm.kl_in == "loss"
            kl = kl_estimate(logprobs, reference, kl_estimator(algorithm) if pulls else "k3")
            each = each + algorithm.kl_coef * kl if pulls else each
            measured["kl"] = kl.detach()
        if algorithm.entropy_coef:
            each = each - algorithm.entropy_coef * entropy
        loss = (column_at(batch, "weight", packed, device) * each).sum()
        mismatch = mismatch_columns(old - engine, factor, corrected=self.off_policy != OffPolicy.NONE)
        columns = {**{f"train/{name}": column for name, column in measured.items()}, **mismatch}
        largest = {"mismatch/logprob_max": mismatch["mismatch/logprob_mean"]}
        metrics.micro_batch(len(packed.ids), loss, columns, largest)
        return loss


def loss_terms(loss: Any, tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Call a loss of the registry `algo.losses`, and check its result. config: the recipe's `algorithm`.

    Raises UserError: the loss raised, or returned another type or shape. Whether the result is finite is not checked
    here, since that would synchronize with the device: see `Optimizer.step`.
    """
    whose = f"algorithm.loss {config.loss.name!r}"
    found = call_plugin(whose, loss, tokens, config)
    if not isinstance(found, LossTerms):
        raise UserError(f"{whose} gave {type(found).__name__}, not LossTerms")
    if not isinstance(found.metrics, Mapping):
        raise UserError(f"{whose} gave metrics of type {type(found.metrics).__name__}, not a map")
    for name, each in {"a loss": found.loss, **{f"the metric {key!r}": m for key, m in found.metrics.items()}}.items():
        if not isinstance(each, Tensor) or each.shape != tokens.logprobs.shape:
            got = f"of shape {list(each.shape)}" if isinstance(each, Tensor) else f"of type {type(each).__name__}"
            raise UserError(f"{whose} gave {name} {got}, not a tensor [{len(tokens.logprobs)}], one for every token")
    if not found.loss.is_floating_point():
        raise UserError(f"{whose} gave a loss of {found.loss.dtype}, not of floating point")
    return found


def off_policy_of(recipe: Recipe) -> str:
    """Return the recipe's `algorithm.off_policy`, with `auto` resolved."""
    chosen = recipe.algorithm.off_policy
    if chosen != "auto":
        return chosen
    apart = recipe.engine.name != "local" or recipe.rollout.overlap != "none" or recipe.model.mixed
    return OffPolicy.TOKEN_TIS if apart else OffPolicy.NONE
