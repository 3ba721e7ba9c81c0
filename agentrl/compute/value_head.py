"""Values of a packed row: a policy's backbone with an output layer of one row, computed in the ways of forward.py.

The value of a token is that of the state before it is sampled: it is read off the hidden state that predicts it, and
off how sure the policy was of the tokens before it (doubt.py), which no hidden state says in a form that is soon found.
"""

from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.compute.block_forward import FastForward
from agentrl.compute.confidence import COLUMNS
from agentrl.compute.forward import Forward, ModuleForward, SequenceForward, choose, hidden_states
from agentrl.compute.packing import Packed


class ValueModel(nn.Module):
    """The backbone of a causal language model, and an output layer of one row, 0 at first. Its parts have the names of
    a language model's, whose vocabulary is one number; `doubt` is what the policy's doubts add to it.

    lm_head and doubt are of the backbone's type and on its device. The language model that it is made from keeps its
    own head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.config = model.config
        self.model: Any = getattr(model, model.base_model_prefix)
        like = next(self.model.parameters())
        size = model.config.get_text_config().hidden_size
        self.lm_head = nn.Linear(size, 1, device=like.device, dtype=like.dtype)
        self.doubt = nn.Linear(COLUMNS, 1, bias=False, device=like.device, dtype=like.dtype)
        # Adam moves every weight alike: as much is to come of a step of these as of one of all hidden states' weights.
        self.gain = size / COLUMNS
        for parameter in (self.lm_head.weight, self.lm_head.bias, self.doubt.weight):
            nn.init.zeros_(parameter)

    def forward(self, **inputs: Any) -> Any:
        """As a language model's: `logits` [B, L, 1]."""
        return SimpleNamespace(logits=self.of(self.model(**inputs).last_hidden_state))

    def of(self, states: Tensor) -> Tensor:
        """Values of hidden states, in float32: [..., D] to [..., 1]."""
        return nn.functional.linear(states.float(), self.lm_head.weight.float(), self.lm_head.bias.float())

    def of_doubt(self, doubt: Tensor) -> Tensor:
        """What the policy's doubts [N, 2] add to the values, float32 [N]."""
        return nn.functional.linear(doubt.float(), self.gain * self.doubt.weight.float())[:, 0]


class ValueForward(Protocol):
    """A way to compute values, with gradients to the parameters of `model`."""

    model: ValueModel

    def __call__(self, packed: Packed, doubt: Tensor) -> Tensor:
        """float32 [N], one for each of the row's predictions. doubt: float32 [N, 2], as `doubt.py` has it."""
        ...


class FastValues:
    """By our own forward."""

    def __init__(self, model: ValueModel) -> None:
        self.model, self._forward = model, FastForward(model)

    def __call__(self, packed: Packed, doubt: Tensor) -> Tensor:
        states, head = self._forward.states(packed)
        return nn.functional.linear(states, head, self.model.lm_head.bias)[:, 0] + self.model.of_doubt(doubt)


class ModuleValues:
    """By the module with its attention replaced. compute: as ModuleForward's."""

    def __init__(self, model: ValueModel, compute: torch.dtype | None = None) -> None:
        self.model, self.compute = model, compute

    def __call__(self, packed: Packed, doubt: Tensor) -> Tensor:
        backbone, device = self.model.model, self.model.lm_head.weight.device
        states = hidden_states(backbone, backbone, packed, device, self.compute)
        read = self.model.of(states.index_select(0, torch.from_numpy(packed.predict).to(device)))[:, 0]
        return read + self.model.of_doubt(doubt)


class SequenceValues(SequenceForward):
    """By the module as it is, one sequence after another."""

    def __call__(self, packed: Packed, doubt: Tensor) -> Tensor:  # type: ignore[override]  # computes something else
        device = next(self.model.parameters()).device
        values, first = [torch.zeros(0, device=device)], 0
        segments = [segment for segment in packed.segments if segment.predictions]
        nothing = self._idle(packed, len(segments), device)  # first: afterwards the ranks would meet in other calls
        for segment in segments:
            own = slice(first, first + segment.predictions)
            values.append(self._logits(packed, segment, packed.predict[own])[:, 0])
            first += segment.predictions
        return torch.cat(values) + nothing + self.model.of_doubt(doubt)  # type: ignore[operator]  # a ValueModel


def value_forward(
    model: PreTrainedModel, compute: torch.dtype | None = None, checkpointing: bool = False
) -> tuple[ValueForward, str]:
    """A value model on the backbone of `model`, in the way that is fastest and exact for that, and a line for people.

    The options are those of `forward.choose`, which tries `model` itself: its output layer still tells tokens apart.
    """
    way, description = choose(model, compute, checkpointing)
    return as_values(way, ValueModel(model)), description


def as_values(way: Forward, model: ValueModel) -> ValueForward:
    """`model` computed in the way that was chosen for the language model with the same backbone."""
    if isinstance(way, FastForward):
        return FastValues(model)
    if isinstance(way, ModuleForward):
        return ModuleValues(model, way.compute)
    if isinstance(way, SequenceForward):
        return SequenceValues(model, way.compute, way.most)  # type: ignore[return-value]  # its model is `model`
    raise TypeError(f"no way to compute values as {type(way).__name__} computes log-probs")
