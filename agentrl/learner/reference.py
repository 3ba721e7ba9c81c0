"""`Reference`: the policy of a KL term that is not trained: the recipe's model before any training, or one that follows
the policy (`algorithm.reference`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentrl.compute.batch import Batch
from agentrl.compute.forward import Forward, ModuleForward, choose, computed_in
from agentrl.compute.kernels import Further
from agentrl.compute.micro_batches import SINGLE_PROCESS, ProcessGroup, token_column
from agentrl.compute.packing import Packed
from agentrl.learner.optimizer import local
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reference:
    """The tensor work of the reference policy, in one process or as one rank of several.

    forward: computes its log-probs. ranks: the ranks that share the model. policy: the model that it follows, sharded
    alike, if the recipe says that it does.
    """

    def __init__(
        self, recipe: Recipe, forward: Forward, ranks: ProcessGroup = SINGLE_PROCESS, policy: Any = None
    ) -> None:
        self._tokens, self._temperature = recipe.train.micro_batch_tokens, recipe.rollout.temperature or 1.0
        self._forward, self._ranks, self.model = forward, ranks, forward.model
        moves = recipe.algorithm.reference
        self.state = None if moves is None else Following(self.model, policy, averaged=moves.ema is not None)
        """What is saved of it; None if it never moves."""

    @classmethod
    def in_process(cls, recipe: Recipe, model: "PreTrainedModel", forward: Forward) -> "Reference":
        """The reference of a single process. forward: that of the policy `model`.

        It is the policy without its adapter if it has one, else the recipe's model, loaded again (also when a run is
        resumed). Raises UserError: the model cannot be loaded.
        """
        if lora.layers(model):
            return cls(recipe, WithoutAdapter(model, forward))
        compute, section = computed_in(recipe.model), recipe.model.model_copy(update={"lora": None})
        frozen = load_model(section, light=True)[0].requires_grad_(False)
        chosen = choose(frozen, compute)[0]
        moves = recipe.algorithm.reference
        if compute is not None and (moves is None or moves.ema is None):  # an average is one of float32
            narrow(frozen, compute)
        return cls(recipe, chosen, policy=model)

    def follow(self, keep: float) -> None:
        """Make the weights keep * themselves + (1 - keep) * the policy's; with 0, a copy of the policy's."""
        assert self.state is not None
        self.state.follow(keep)
        computation = getattr(self._forward, "computation", self._forward)  # of FSDP2's root
        if isinstance(computation, ModuleForward) and computation.vision is not None:
            computation.vision.refresh()

    def logprobs(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The log-probs of the sampled tokens, float32 [T], 0 elsewhere."""
        return token_column(
            batch, self._tokens, self._ranks, lambda packed: self._forward(packed, self._temperature)[0]
        )


class Following:
    """The weights of a frozen model that follow those of a policy, and their state (it is a `RoleState`).

    averaged: keep float32 masters of weights of lower precision, in which small moves would be rounded away.
    Raises ValueError: a shard of the policy has another shape.
    """

    def __init__(self, model: "PreTrainedModel", policy: Any, averaged: bool) -> None:
        self.model = model
        self._names = [name for name, _ in model.named_parameters()]
        self._weights, self._policy = list(model.parameters()), list(policy.parameters())
        self._masters = [p.detach().float() if averaged and p.dtype != torch.float32 else p for p in self._weights]
        for name, own, theirs in zip(self._names, self._weights, self._policy, strict=True):
            if local(own).shape != local(theirs).shape:
                raise ValueError(f"the reference's {name} is sharded or shaped in another way than the policy's")

    @property
    def optimizer(self) -> "Following":
        """What moves the weights: this itself."""
        return self

    @torch.no_grad()
    def follow(self, keep: float) -> None:
        """See `Reference.follow`. Each rank moves its own shards."""
        for master, theirs in zip(self._masters, self._policy, strict=True):
            own, new = local(master), local(theirs)
            if keep:
                own.mul_(keep).add_(new, alpha=1 - keep)
            else:
                own.copy_(new)
        self._publish()

    def named_state(self) -> dict[str, Tensor]:
        """`master.<parameter>` for each weight, not copies."""
        return {f"master.{name}": master for name, master in zip(self._names, self._masters, strict=True)}

    @torch.no_grad()
    def load_named_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `named_state` returned. Raises KeyError for a missing tensor."""
        for name, tensor in self.named_state().items():
            if state[name] is not tensor:
                tensor.copy_(state[name])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master:
                local(weight).copy_(local(master))


def narrow(model: "PreTrainedModel", compute: torch.dtype) -> None:
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

    def __init__(self, model: "PreTrainedModel", forward: Forward) -> None:
        self.model, self._forward = model, forward

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[object, ...]:
        with lora.switched_off(self.model):
            return self._forward(packed, temperature, further)
