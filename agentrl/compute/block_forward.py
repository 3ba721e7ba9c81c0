"""Our own training forward for the Qwen2/Qwen3/Llama block, on the module's own parameters."""

import torch
from torch import Tensor, nn

from agentrl.compute.kernels import rms_norm, swiglu, token_logprobs
from agentrl.compute.packing import Packed
from agentrl.compute.tree_attention import attend, plan
from agentrl.models import block
from agentrl.models.block import Rope, Weights, unsupported, weights_of
from agentrl.models.lora import has_dropout, layers

KERNELS = block.Kernels(rms_norm, swiglu)
SMALL = 50_000_000  # parameters: up to here joined and folded copies of the weights, made anew each pass, pay


class BlockForward:
    """Our own forward pass; built once per run for a model that `fits`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rope = Rope(model)
        self.copies = sum(p.numel() for p in model.parameters()) <= SMALL

    @staticmethod
    def fits(model: nn.Module) -> str | None:
        """Return why it cannot run this model, or None."""
        if next(model.parameters()).dtype != torch.float32:
            return "its weights are not float32"
        if adapted := layers(model):
            if has_dropout(model):
                return "its adapter has dropout"
            if sum(p.numel() for p in model.parameters()) > SMALL:
                return f"it would merge the adapters of {len(adapted)} layers in each pass"
        return unsupported(model)

    def __call__(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the packed row's predictions, float32 [N] each."""
        states, head = self.states(packed)
        return token_logprobs(states, head, None, torch.from_numpy(packed.target).to(head.device), temperature)

    def states(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return hidden states [N, D] of the tokens that predict, and the output layer's matrix [V, D]:
        the final norm's gain may be in the one or in the other."""
        weights = weights_of(self.model, copy=self.copies, interleave=self.copies)
        device = weights.embed.device
        rotation = self.rope(torch.from_numpy(packed.positions).to(device))
        ids, predict = (torch.from_numpy(indices).to(device) for indices in (packed.ids, packed.predict))
        layout, scale = plan(packed.segments, device), weights.shape.head_dim**-0.5

        def mix(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, layout, scale)

        return block.hidden(weights, ids, rotation, mix, KERNELS, predict), _head(weights)


def _head(weights: Weights) -> Tensor:
    """The matrix [V, D] that maps hidden states to logits."""
    return weights.head.weights[0].t() if weights.head.transposed else weights.head.weights[0]
