"""`Actor`: the tensor work of the policy, in one process or as one rank of several. What it is given is a share of a
batch whose weights in the loss are fixed already, so that micro-batches and ranks add up to exactly the gradient of
the whole.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo import losses
from agentrl.algo.loss import k3
from agentrl.algo.off_policy import OffPolicy, importance_weights
from agentrl.algo.terms import Tokens
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe
from agentrl.training.batch import Batch
from agentrl.training.forward import Forward, choose
from agentrl.training.meter import Meter
from agentrl.training.optimizer import Optimizer
from agentrl.training.packing import Packed, Segment, micro_batches
from agentrl.training.ranks import ALONE, Ranks

Floats = npt.NDArray[np.float32]
_NONE = np.zeros(0, np.int64)
EMPTY = Packed(np.zeros(1, np.int64), np.zeros(1, np.int64), (Segment(0, 1),), _NONE, _NONE, _NONE)
"""A pass that computes one token and predicts none: for a rank that has fewer passes than its peers."""


class Actor:
    """Trains `model` in place by `recipe`. `description` says in a line how it computes log-probs.

    forward: how log-probs are computed (None: the fastest exact way for a model that is whole here). reference:
    likewise for the frozen reference (None: loaded here where `kl_coef` wants one, or the model without its adapter).
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        forward: Forward | None = None,
        reference: Forward | None = None,
        ranks: Ranks = ALONE,
        description: str = "",
    ) -> None:
        self.recipe, self.model, self.ranks = recipe, model.eval(), ranks
        self.forward, self.description = (forward, description) if forward is not None else choose(model)
        self.loss = losses.get(recipe.algorithm.loss)
        train = recipe.train
        self.optimizer = Optimizer(model.parameters(), train.betas, train.weight_decay, train.max_grad_norm)
        self.temperature = recipe.rollout.temperature or 1.0
        self.off_policy = off_policy_of(recipe)
        self._reference = reference or (self._find_reference() if recipe.algorithm.kl_coef > 0 else None)

    @property
    def trained(self) -> int:
        """Parameters that are trained, over all ranks."""
        return sum(p.numel() for p in self.optimizer.parameters)

    def logprobs(self, batch: Batch) -> Floats:
        """Of the sampled tokens under the current weights, float32 [T], 0 elsewhere."""
        return self._logprobs(self.forward, batch)

    def reference_logprobs(self, batch: Batch) -> Floats:
        """Likewise under the frozen reference. Raises RuntimeError when the recipe keeps none (`kl_coef` is 0)."""
        if self._reference is None:
            raise RuntimeError("algorithm.kl_coef is 0, so no reference is kept")
        return self._logprobs(self._reference, batch)

    def update(self, batch: Batch, rate: float) -> Meter:
        """One optimizer update at learning rate `rate` by this rank's share of it; returns what was measured.

        Token columns: `weight` (in the loss), `advantages`, `logprobs` of the engine, and, where there are any,
        `old_logprobs` (else those of the pass that is differentiated) and `reference_logprobs`.
        """
        meter = Meter(corrected=self.off_policy != OffPolicy.NONE)
        for packed in self._passes(batch):
            with lora.dropping_out(self.model):
                loss = self._loss(packed, batch, meter)
            (loss * self.ranks.size).backward()
        meter.updated(self.optimizer.step(rate))
        return meter

    def _find_reference(self) -> Forward:
        """The model that the recipe names, as it was before any training (also when a run is resumed); where an adapter
        is trained it is the same model without it."""
        if lora.layers(self.model):
            return self._without_adapter
        reference = load_model(self.recipe.model)[0].requires_grad_(False)
        return choose(reference)[0]

    def _without_adapter(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        with lora.switched_off(self.model):
            return self.forward(packed, temperature)

    def _passes(self, batch: Batch) -> Iterator[Packed]:
        """The batch in micro-batches, as many as the rank with the most has."""
        parts = list(micro_batches(batch, self.recipe.train.micro_batch_tokens))
        yield from parts
        yield from [EMPTY] * (self.ranks.most(len(parts)) - len(parts))

    def _logprobs(self, forward: Forward, batch: Batch) -> Floats:
        found = np.zeros(int(batch.offsets[-1]), np.float32)
        with torch.no_grad():
            for packed in self._passes(batch):
                found[packed.source] = forward(packed, self.temperature)[0].cpu().numpy()
        return found

    def _loss(self, packed: Packed, batch: Batch, meter: Meter) -> Tensor:
        """This micro-batch's share of the update's loss."""
        algorithm = self.recipe.algorithm
        logprobs, entropy = self.forward(packed, self.temperature)
        if packed is EMPTY:
            return logprobs.sum()

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
