"""`BlockForward`: the training forward of Qwen2, Qwen3, Llama and Mistral models by our own decoder block."""

from typing import Any

import torch
from torch import Tensor, nn

from agentrl.compute.kernels import Further, rms_norm, swiglu, token_logprobs
from agentrl.compute.packing import Packed
from agentrl.compute.tree_attention import attend, make_layout
from agentrl.models import block
from agentrl.models.block import Rope, Weights, weights_of
from agentrl.models.lora import has_dropout, layers

KERNELS = block.Kernels(rms_norm, swiglu)
SMALL = 50_000_000
"""Number of parameters up to which joined and folded copies of the weights, made anew in each pass, are faster."""


class BlockForward:
    """A `Forward` on the parameters of a model that it supports (see `unsupported`); built once a run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rope = Rope(model)
        self.copies = sum(p.numel() for p in model.parameters()) <= SMALL

    @staticmethod
    def unsupported(model: nn.Module) -> str | None:
        """Return why it cannot run this model, in a few words; None: it can."""
        if next(model.parameters()).dtype != torch.float32:
            return "its weights are not float32"
        if adapted := layers(model):
            if has_dropout(model):
                return "its adapter has dropout"
            if sum(p.numel() for p in model.parameters()) > SMALL:
                return f"it would merge the adapters of {len(adapted)} layers in each pass"
        return block.unsupported(model)

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        """Return log-probs and entropies (nats) of the packed row's predictions, float32 [N] each, and `further`."""
        states, head = self.states(packed)
        found = token_logprobs(states, head, None, torch.from_numpy(packed.target).to(head.device), temperature)
        return found if further is None else (*found, further(states, head, None))

    def states(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return the hidden states [N, D] of the predicting tokens, and the matrix [V, D] of the output layer; either
        may include the gain of the final norm."""
        weights = weights_of(self.model, copy=self.copies, interleave=self.copies)
        device = weights.embed.device
        rotation = self.rope(torch.from_numpy(packed.positions).to(device))
        ids, predict = (torch.from_numpy(indices).to(device) for indices in (packed.ids, packed.predict))
        layout, scale = make_layout(packed.segments, device), weights.shape.head_dim**-0.5

        def attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, layout, scale)

        return block.hidden(weights, ids, rotation, attention, KERNELS, predict), _head(weights)


def _head(weights: Weights) -> Tensor:
    """Return the matrix [V, D] that maps hidden states to logits."""
    return weights.head.weights[0].t() if weights.head.transposed else weights.head.weights[0]
