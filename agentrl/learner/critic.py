"""`Critic`: the tensor work of the value model, in one process or as one rank of several.

As for `Actor`, the weights in the loss are fixed before the batch is split, so that the gradients of micro-batches and
ranks add up to exactly that of the whole batch.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentrl.algo.loss import value_loss
from agentrl.compute.batch import Batch
from agentrl.compute.forward import computed_in
from agentrl.compute.micro_batches import EMPTY, SINGLE_PROCESS, ProcessGroup, column_at, token_column
from agentrl.compute.packing import Packed
from agentrl.compute.value_head import ValueForward, confidence_features, value_forward
from agentrl.learner.actor import TrainedRole
from agentrl.learner.metrics import MicroBatchMetrics, value_columns
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import CriticSection
from agentrl.recipe.sections.model import ModelSection


class Critic(TrainedRole):
    """Trains a value model in place by the recipe's `critic`.

    forward: computes values; None loads the whole model in this process. ranks: the ranks that share the model.
    description: how `forward` computes, in one line. If the policy is trained by an adapter, the critic has one of the
    same shape on its own backbone, and trains that and its output layer.
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
        if forward is None:
            forward, description = load_critic(recipe)
        super().__init__(recipe, forward.model, ranks)
        self.section, self.forward, self.description = recipe.critic, forward, description

    def values(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The value of the state before each sampled token, float32 [T], 0 elsewhere."""
        batch = batch.with_tokens(confidence=confidence_features(batch))
        return token_column(
            batch, self.recipe.train.micro_batch_tokens, self.ranks, lambda packed: self._packed_values(packed, batch)
        )

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update at learning rate `rate` from this rank's part of the batch; return its metrics.

        It reads the token columns `weight` (in the loss), `values` (of the beginning of the step) and `returns`.
        """
        return self._updated(batch.with_tokens(confidence=confidence_features(batch)), rate)

    def _packed_values(self, packed: Packed, batch: Batch) -> Tensor:
        """The values of the packed row's predictions, float32 [N]; `batch` has the column `confidence`."""
        return self.forward(packed, column_at(batch, "confidence", packed, self.model.lm_head.weight.device))

    def _loss(self, packed: Packed, batch: Batch, metrics: MicroBatchMetrics) -> Tensor:
        values = self._packed_values(packed, batch)
        if packed is EMPTY:
            return values.sum()
        old, returns, weight = (
            column_at(batch, name, packed, values.device) for name in ("values", "returns", "weight")
        )
        terms = value_loss(values, old, returns, self.section.clip)
        loss = (weight * terms.loss).sum()
        metrics.micro_batch(len(packed.ids), loss, value_columns(values, old, returns, terms.metrics["clip_fraction"]))
        return loss


def critic_model(recipe: Recipe) -> ModelSection:
    """The section by which the critic's backbone is loaded: that of the policy, with the path that the recipe's
    `critic` names, and with a new adapter if the policy has one."""
    section, own = recipe.model, recipe.critic or CriticSection()
    changes: dict[str, Any] = {"path": own.path or section.path}
    if section.lora is not None:
        changes["lora"] = section.lora.model_copy(update={"start": None})
    return section.model_copy(update=changes)


def load_critic(recipe: Recipe) -> tuple[ValueForward, str]:
    """Load the recipe's value model whole into this process; return its forward and one line about it.

    Raises UserError: the model cannot be loaded.
    """
    section = critic_model(recipe)
    model = load_model(section, recipe.train.seed, headless=True)[0]
    offload = "activations" in recipe.cluster.offload
    return value_forward(model, computed_in(section), section.checkpointing, offload, section.compile)
