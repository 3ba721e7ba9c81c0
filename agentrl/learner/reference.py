"""`Reference`: the frozen policy that a KL term compares with: the model that the recipe names, before any training."""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentrl.compute.batch import Batch
from agentrl.compute.forward import Forward, choose
from agentrl.compute.micro_batches import SINGLE_PROCESS, ProcessGroup, token_column
from agentrl.compute.packing import Packed
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe


class Reference:
    """`forward`: how its log-probs are computed."""

    def __init__(self, recipe: Recipe, forward: Forward, ranks: ProcessGroup = SINGLE_PROCESS) -> None:
        self._tokens, self._temperature = recipe.train.micro_batch_tokens, recipe.rollout.temperature or 1.0
        self._forward, self._ranks, self.model = forward, ranks, forward.model

    @classmethod
    def alone(cls, recipe: Recipe, model: Any, forward: Forward) -> "Reference":
        """Return the reference of one process: the policy `model` without its adapter where it has one, else the
        recipe's model, loaded again (also when a run is resumed). forward: the policy's."""
        if lora.layers(model):
            return cls(recipe, WithoutAdapter(model, forward))
        frozen = load_model(recipe.model.frozen)[0].requires_grad_(False)
        return cls(recipe, choose(frozen)[0])

    def logprobs(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the log-probs of the sampled tokens, float32 [T], 0 elsewhere."""
        return token_column(
            batch, self._tokens, self._ranks, lambda packed: self._forward(packed, self._temperature)[0]
        )


class WithoutAdapter:
    """The policy's forward with the adapter switched off."""

    def __init__(self, model: Any, forward: Forward) -> None:
        self.model, self._forward = model, forward

    def __call__(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        with lora.switched_off(self.model):
            return self._forward(packed, temperature)
