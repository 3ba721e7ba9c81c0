"""Values of a packed row, by the backbone of a language model and an output layer of one row.

The value of a token is that of the state before it is sampled. It is computed from the hidden state that predicts the
token, and from confidence features: how likely the tokens sampled so far were under the policy. Errors of a policy are
mostly unlikely tokens, and returns depend on them more than on anything else that a small critic learns in few steps:
for the first policy of the calculator recipe, these two features explain 27 % of the variance of returns after 128
samples, of 39 % that can be explained at all; the backbone alone explains 6 % after 2,000.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentrl.compute.batch import Batch
from agentrl.compute.forward import (
    BlockForward,
    Forward,
    ModuleForward,
    SequenceForward,
    SequenceRunner,
    choose,
    hidden_states,
    vision_of,
)
from agentrl.compute.packing import Packed
from agentrl.models.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIDENCE_FEATURES = 2
"""Number of columns of `confidence_features`."""

_STORED_NAME = "doubt"
"""The name under which checkpoints hold the weights of the confidence features, since 0.1."""


def confidence_features(batch: Batch) -> npt.NDArray[np.float32]:
    """How likely the sampled tokens before each trained token of its sample were, float32 [T, 2], each in 0..1.

    The columns are 1 - min p and min p - prod p over the tokens sampled before it on its path, whether or not they are
    trained there; both are 0 before the first one, and where nothing is trained. p is the engine's probability,
    exp(`logprobs`), which is 1 for tokens that were not sampled. The token itself does not count, so that the value
    remains a baseline.
    """
    features = np.zeros((int(batch.offsets[-1]), CONFIDENCE_FEATURES), np.float32)
    logprobs = np.minimum(batch.tokens["logprobs"].astype(np.float64), 0.0)
    for sample in range(len(batch)):
        span = batch.span(sample)
        before = logprobs[span][:-1]
        least, product = np.exp(np.minimum.accumulate(before)), np.exp(np.cumsum(before))
        features[span][1:] = np.stack([1 - least, least - product], 1)
    features[batch.tokens["loss_mask"] == 0] = 0
    return features


class ValueModel(nn.Module):
    """The backbone of a causal language model, with an output layer of one row whose weights start at 0.

    Its modules are named as in a language model with a vocabulary of one. `lm_head` and `confidence` have the dtype and
    device of the backbone. The original language model keeps its own output layer.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.config, self.image_input = model.config, getattr(model, "image_input", None)
        self.model: Any = getattr(model, model.base_model_prefix)
        like = next(self.model.parameters())
        size = model.config.get_text_config().hidden_size
        self.lm_head = nn.Linear(size, 1, device=like.device, dtype=like.dtype)
        confidence = nn.Linear(CONFIDENCE_FEATURES, 1, bias=False, device=like.device, dtype=like.dtype)
        self.add_module(_STORED_NAME, confidence)
        # Adam changes every weight by as much: so a step of these counts as much as one of all hidden states' weights.
        self.gain = size / CONFIDENCE_FEATURES
        for parameter in (self.lm_head.weight, self.lm_head.bias, confidence.weight):
            nn.init.zeros_(parameter)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.lm_head.weight.device

    @property
    def confidence(self) -> nn.Linear:
        """The layer from confidence features to a value, without bias."""
        layer = self.get_submodule(_STORED_NAME)
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, **inputs: object) -> SimpleNamespace:
        """An object like a language model's output, with `logits` [B, L, 1]."""
        return SimpleNamespace(logits=self.of_states(self.model(**inputs).last_hidden_state))

    def of_states(self, states: Tensor) -> Tensor:
        """The values of hidden states, computed in float32: [..., D] to [..., 1]."""
        return nn.functional.linear(states.float(), self.lm_head.weight.float(), self.lm_head.bias.float())

    def of_features(self, features: Tensor) -> Tensor:
        """What confidence features [N, 2] add to the values, float32 [N]."""
        return nn.functional.linear(features.float(), self.gain * self.confidence.weight.float())[:, 0]


class ValueForward(Protocol):
    """Computes values, with gradients to the parameters of `model`."""

    model: ValueModel
    """The value model."""

    def __call__(self, packed: Packed, features: Tensor) -> Tensor:
        """One value for each prediction of the row, float32 [N].

        features: float32 [N, 2], the `confidence_features` of the predicted tokens.
        """


class BlockValues:
    """A `ValueForward` by our own decoder block."""

    def __init__(self, model: ValueModel) -> None:
        self.model, self._forward = model, BlockForward(model)

    def __call__(self, packed: Packed, features: Tensor) -> Tensor:
        states, head = self._forward.states(packed)
        return nn.functional.linear(states, head, self.model.lm_head.bias)[:, 0] + self.model.of_features(features)


class ModuleValues:
    """A `ValueForward` by the module with its attention replaced. compute, max_over_ranks: see `ModuleForward`."""

    def __init__(
        self, model: ValueModel, compute: torch.dtype | None = None, max_over_ranks: Callable[[int], int] | None = None
    ) -> None:
        self.model, self.compute, self.vision = model, compute, vision_of(model, max_over_ranks)

    def __call__(self, packed: Packed, features: Tensor) -> Tensor:
        model, device = self.model, self.model.device
        states = hidden_states(model.model, model.model, packed, device, self.compute, self.vision)
        predicting = states.index_select(0, torch.from_numpy(packed.predict).to(device))
        return model.of_states(predicting)[:, 0] + model.of_features(features)


class SequenceValues(SequenceRunner[ValueModel]):
    """A `ValueForward` by the unchanged module, one sequence after another."""

    def __call__(self, packed: Packed, features: Tensor) -> Tensor:
        idle = self.idle_passes(packed)
        values = [logits[:, 0] for _, logits in self.logits(packed)]
        return torch.cat([idle.new_zeros(0), *values]) + idle + self.model.of_features(features)

    def _seen(self, vision: Vision, ids: np.ndarray) -> Tensor:
        return self.model.of_states(vision.states(ids))


def value_forward(
    model: "PreTrainedModel",
    compute: torch.dtype | None = None,
    checkpointing: bool = False,
    offload: bool = False,
    compiled: bool = False,
) -> tuple[ValueForward, str]:
    """The fastest exact `ValueForward` of a new value model on the backbone of `model`, and one line about it.

    The options are those of `forward.choose`, which compares implementations on `model` itself, since the new output
    layer returns 0 for every state.
    """
    forward, description = choose(model, compute, checkpointing, offload, compiled)
    return as_values(forward, ValueModel(model)), description


def as_values(forward: Forward, model: ValueModel) -> ValueForward:
    """The `ValueForward` of `model` that corresponds to `forward`, chosen for the language model with its
    backbone.

    Raises TypeError for another kind of forward.
    """
    if isinstance(forward, BlockForward):
        return BlockValues(model)
    if isinstance(forward, ModuleForward):
        return ModuleValues(model, forward.compute)
    if isinstance(forward, SequenceForward):
        return SequenceValues(model, forward.compute, forward.max_over_ranks)
    raise TypeError(f"cannot compute values as {type(forward).__name__} computes log-probs")
