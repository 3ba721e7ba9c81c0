"""`Critic`: the tensor work of the value model, in one process or as one rank of several, as `Actor` is the policy's.

The weights in the loss are fixed by the whole update before anything is split, so that micro-batches and ranks add up
to exactly the gradient of the whole.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo.loss import value_loss
from agentrl.compute.batch import Batch
from agentrl.compute.confidence import doubt
from agentrl.compute.forward import computed_in
from agentrl.compute.micro_batches import EMPTY, aligned_micro_batches, column_at, token_column
from agentrl.compute.packing import Packed
from agentrl.compute.ranks import SINGLE_PROCESS, ProcessGroup
from agentrl.compute.value_head import ValueForward, value_forward
from agentrl.learner.optimizer import Optimizer
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import CriticSection, ModelSection, Recipe


class Critic:
    """Trains a value model in place by the recipe's `critic`. `description` says in a line how it computes values.

    forward: how values are computed (None: the model is loaded here, whole). Where the policy is trained by an adapter
    the critic has one of the same shape on its own backbone, and trains that and its output layer.
    """

    def __init__(
        self,
        recipe: Recipe,
        forward: ValueForward | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        description: str = "",
    ) -> None:
        if recipe.critic is None:
            raise ValueError("the recipe has no critic")
        self.recipe, self.section, self.ranks = recipe, recipe.critic, ranks
        if forward is None:
            forward, description = load_critic(recipe)
        self.forward, self.model, self.description = forward, forward.model.eval(), description
        train = recipe.train
        self.optimizer = Optimizer(self.model.named_parameters(), train.betas, train.weight_decay, train.max_grad_norm)

    @property
    def trained(self) -> int:
        """Parameters that are trained, over all ranks."""
        return sum(p.numel() for p in self.optimizer.parameters)

    @property
    def updates(self) -> int:
        """Updates that changed the weights, or began to."""
        return self.optimizer.begun

    def values(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Of the state before each sampled token, float32 [T], 0 elsewhere."""
        told = batch.with_tokens(doubt=doubt(batch))
        return token_column(
            batch, self.recipe.train.micro_batch_tokens, self.ranks, lambda packed: self._of(packed, told)
        )

    def update(self, batch: Batch, rate: float) -> "CriticMeter":
        """One optimizer update at learning rate `rate` by this rank's share of it; returns what was measured.

        Token columns: `weight` (in the loss), `values` (when the step began) and `returns`.
        """
        meter, batch = CriticMeter(), batch.with_tokens(doubt=doubt(batch))
        for packed in aligned_micro_batches(batch, self.recipe.train.micro_batch_tokens, self.ranks):
            with lora.dropping_out(self.model):
                loss = self._loss(packed, batch, meter)
            (loss * self.ranks.size).backward()
        meter.updated(self.optimizer.step(rate), rate)
        return meter

    def _of(self, packed: Packed, batch: Batch) -> Tensor:
        """The row's values, float32 [N]; `batch` has the column `doubt`."""
        return self.forward(packed, column_at(batch, "doubt", packed, self.model.lm_head.weight.device))

    def _loss(self, packed: Packed, batch: Batch, meter: "CriticMeter") -> Tensor:
        """This micro-batch's share of the update's loss."""
        values = self._of(packed, batch)
        if packed is EMPTY:
            return values.sum()
        old, returns, weight = (
            column_at(batch, name, packed, values.device) for name in ("values", "returns", "weight")
        )
        terms = value_loss(values, old, returns, self.section.clip)
        loss = (weight * terms.loss).sum()
        meter.micro_batch(loss, values, old, returns, terms.metrics["clip_fraction"])
        return loss


class CriticMeter:
    """What updates of the critic measured, summed over tokens so that it does not depend on how they were split.

    critic/value_mean and clip_fraction are of the updates' own values; explained_variance, 1 - Var(R - V) / Var(R) over
    the tokens, is of those when the step began: 1 foresees everything, 0 no more than the mean return does, which is
    all there is where the returns are equal.
    """

    def __init__(self) -> None:
        self.loss = self.rate = 0.0
        self.norms: list[float] = []
        self.sums = np.zeros(7)  # tokens, values, clipped, returns, their squares, errors, their squares

    def micro_batch(self, loss: Tensor, values: Tensor, old: Tensor, returns: Tensor, clipped: Tensor) -> None:
        """loss: its share of the update's; the others [N]."""
        self.loss += float(loss.detach())
        r, error = returns.double(), (returns - old).double()
        columns = (torch.ones_like(r), values.detach().double(), clipped.double(), r, r**2, error, error**2)
        self.sums += torch.stack([c.sum() for c in columns]).cpu().numpy()

    def updated(self, norm: float, rate: float) -> None:
        """One optimizer update was made at learning rate `rate`, or thrown away when `norm` is not finite."""
        self.norms.append(norm)
        self.rate = rate

    def merge(self, others: Sequence["CriticMeter"]) -> "CriticMeter":
        """What all ranks measured in one update, each in its share; the norm is that of the whole on every one."""
        for other in others:
            self._sum(other)
        return self

    def add(self, other: "CriticMeter") -> None:
        """Another update of the same step."""
        self._sum(other)
        self.norms += other.norms
        self.rate = other.rate

    def _sum(self, other: "CriticMeter") -> None:
        self.loss += other.loss
        self.sums = self.sums + other.sums

    def result(self) -> dict[str, float]:
        """The step's metrics by the names of metrics.jsonl; means over its tokens and updates."""
        finite = [n for n in self.norms if math.isfinite(n)]
        value, clipped, mean, square, error, error_square = (self.sums[1:] / max(1.0, self.sums[0])).tolist()
        variance = square - mean**2
        return {
            "critic/loss": self.loss / max(1, len(self.norms)),
            "critic/grad_norm": sum(finite) / max(1, len(finite)),
            "critic/lr": self.rate,
            "critic/value_mean": value,
            "critic/return_mean": mean,
            "critic/clip_fraction": clipped,
            "critic/explained_variance": 1 - (error_square - error**2) / variance if variance > 1e-12 else 0.0,
        }


def critic_model(recipe: Recipe) -> ModelSection:
    """What the critic's backbone is loaded by: the policy's section, at the path that the recipe's `critic` names. Its
    adapter, where there is one, begins anew."""
    section, own = recipe.model, recipe.critic or CriticSection()
    changes: dict[str, Any] = {"path": own.path or section.path}
    if section.lora is not None:
        changes["lora"] = section.lora.model_copy(update={"start": None})
    return section.model_copy(update=changes)


def load_critic(recipe: Recipe) -> tuple[ValueForward, str]:
    """The recipe's value model, whole in this process, and a line that says how it computes. Raises UserError."""
    section = critic_model(recipe)
    model = load_model(section, recipe.train.seed, headless=True)[0]
    return value_forward(model, computed_in(section), section.checkpointing)
