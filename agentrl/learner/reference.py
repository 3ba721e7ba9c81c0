"""`Reference`: the frozen policy of a KL term, which is the recipe's model before any training."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from agentrl.compute.batch import Batch
from agentrl.compute.forward import Forward, choose, computed_in
from agentrl.compute.kernels import Further
from agentrl.compute.micro_batches import SINGLE_PROCESS, ProcessGroup, token_column
from agentrl.compute.packing import Packed
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe


class Reference:
    """The tensor work of the reference policy, in one process or as one rank of several.

    forward: computes its log-probs. ranks: the ranks that share the model.
    """

    def __init__(self, recipe: Recipe, forward: Forward, ranks: ProcessGroup = SINGLE_PROCESS) -> None:
        self._tokens, self._temperature = recipe.train.micro_batch_tokens, recipe.rollout.temperature or 1.0
        self._forward, self._ranks, self.model = forward, ranks, forward.model

    @classmethod
    def in_process(cls, recipe: Recipe, model: Any, forward: Forward) -> "Reference":
        """Return the reference of a single process. forward: that of the policy `model`.

        It is the policy without its adapter if it has one, else the recipe's model, loaded again (also when a run is
        resumed). Raises UserError: the model cannot be loaded.
        """
        if lora.layers(model):
            return cls(recipe, WithoutAdapter(model, forward))
        compute, section = computed_in(recipe.model), recipe.model.model_copy(update={"lora": None})
        frozen = load_model(section)[0].requires_grad_(False)
        chosen = choose(frozen, compute)[0]
        if compute is not None:
            narrow(frozen, compute)
        return cls(recipe, chosen)

    def logprobs(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return the log-probs of the sampled tokens, float32 [T], 0 elsewhere."""
        return token_column(
            batch, self._tokens, self._ranks, lambda packed: self._forward(packed, self._temperature)[0]
        )


def narrow(model: Any, compute: torch.dtype) -> None:
    """Convert the matrices that autocast rounds in each pass to `compute`, in place; results stay equal to the bit.

    Embeddings, an output layer tied to them, and norms, which autocast does not round, keep their dtype.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tables:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(compute)


class WithoutAdapter:
    """A `Forward`: that of the policy, with its adapter switched off."""

    def __init__(self, model: Any, forward: Forward) -> None:
        self.model, self._forward = model, forward

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        with lora.switched_off(self.model):
            return self._forward(packed, temperature, further)
