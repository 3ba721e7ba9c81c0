"""Sequence parallelism: several ranks compute one packed row, each a slice of its tokens (Ulysses, arXiv:2309.14509).

Embeddings, norms and MLPs see P / s tokens on each of s ranks. Around attention the ranks exchange tokens for heads, so
that each attends over the whole row with H / s heads, by the layout of a single process. Log-probs equal those of a
single process, and so does the sum of the parameters' gradients over the ranks.
"""

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from agentrl.compute.forward import ModuleForward, axes_of
from agentrl.compute.hf_attention import Unsupported, replaced_attention
from agentrl.compute.kernels import Further, token_logprobs
from agentrl.compute.packing import Packed
from agentrl.compute.tree_attention import Layout, attend, make_layout
from agentrl.compute.value_head import ModuleValues, ValueModel
from agentrl.errors import UserError
from agentrl.models.autograd import Context
from agentrl.models.shape import heads_fault
from agentrl.models.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Sharing:
    """The part of one rank of `group` in the computation of `model`, a transformer with attention heads.

    vision: of a model that sees; a rank computes the images that stand in its own slice. Raises UserError if the number
    of ranks does not divide the number of heads.
    """

    def __init__(
        self, model: "PreTrainedModel", base: Any, group: dist.ProcessGroup, vision: Vision | None = None
    ) -> None:
        self.model, self.base, self.vision = model, base, vision
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        if (why := heads_fault(model.config, self.ranks)) is not None:
            raise UserError(why)

    def states(self, packed: Packed, device: torch.device) -> tuple[Tensor, np.ndarray]:
        """The hidden states of `base` for the predicting tokens in this rank's slice, [n, D], and their indices
        among the row's predictions, [n]."""
        width = -(-len(packed.ids) // self.ranks)
        start, end = self.rank * width, (self.rank + 1) * width
        layout = make_layout(packed.segments, device)
        said = self._said(packed, start, width, device)
        text = self.base if self.vision is None else self.base.language_model
        with replaced_attention(self.model, lambda q, k, v, scale: self._attend(q, k, v, layout, scale)):
            states = text(use_cache=False, **said).last_hidden_state[0]
        own = np.flatnonzero((packed.predict >= start) & (packed.predict < end))
        return states.index_select(0, torch.from_numpy(packed.predict[own] - start).to(device)), own

    def _said(self, packed: Packed, start: int, width: int, device: torch.device) -> dict[str, object]:
        """The arguments of the transformer that say this rank's slice."""
        ids = _slice(packed.ids, start, width)
        if self.vision is None:
            positions = _slice(packed.positions, start, width).to(device)[None]
            return {"input_ids": ids.to(device)[None], "position_ids": positions}
        axes = torch.stack([_slice(axis, start, width) for axis in axes_of(self.vision, packed)])
        positions = self.vision.position_ids(axes[:, None].numpy())
        return {"position_ids": positions, **self.vision.embedded(ids[None].numpy())}

    def gathered(self, found: Tensor, own: np.ndarray, count: int) -> Tensor:
        """The values of all ranks, [k, count]; only those of this rank have a gradient. found: this rank's
        values [k, n], at the indices `own`."""
        everyone = torch.zeros(len(found), count, dtype=found.dtype, device=found.device)
        indices = torch.from_numpy(own).to(found.device)
        everyone.index_copy_(1, indices, found.detach())
        dist.all_reduce(everyone, group=self.group)
        return everyone.index_copy(1, indices, found)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """Attend over the whole row: query [W, H, D], key and value [W, G, D] of this rank's slice to [W, H * D]."""
        copies = math.lcm(key.shape[1], self.ranks) // key.shape[1]  # so that every rank gets the keys of its queries
        keys_values = [x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value)]
        by_rank = [x.unflatten(1, (self.ranks, -1)) for x in (query, *keys_values)]
        sizes = [x.shape[2] for x in by_rank]
        row = self._exchange(torch.cat(by_rank, 2).transpose(0, 1)).flatten(0, 1)
        q, k, v = row[: layout.tokens].split(sizes, 1)
        mixed = attend(q, k, v, layout, scale)
        padded = F.pad(mixed, (0, 0, 0, len(row) - layout.tokens))
        heads = self._exchange(padded.unflatten(0, (self.ranks, -1)))
        return heads.transpose(0, 1).flatten(1)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `parts` [s, ...] to rank i; return the parts that the ranks send to this one, in their
        order."""
        exchanged: Tensor = _AllToAll.apply(parts, self.group)
        return exchanged


class SequenceParallelForward(ModuleForward):
    """A `Forward` that the ranks of `group` call with equal arguments.

    Each rank returns all log-probs and entropies [N], with gradients only for those that its own tokens predict. So a
    loss of them is equal on all ranks, and its gradients must be summed over the ranks of the group. vision: of a model
    that sees.

    Raises UserError if the number of ranks does not divide the number of attention heads.
    """

    def __init__(self, model: "PreTrainedModel", group: dist.ProcessGroup, vision: Vision | None = None) -> None:
        super().__init__(model)
        self.vision = vision
        self._sharing = _Sharing(model, self.base, group, vision)

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        if further is not None:
            raise Unsupported("ranks that share sequences give log-probs of the sampled tokens alone")
        device = self.head.weight.device
        states, own = self._sharing.states(packed, device)
        target = torch.from_numpy(packed.target[own]).to(device)
        chosen = states.to(self.head.weight.dtype)
        masks = packed.masks.take(own) if packed.masks is not None else None
        found = torch.stack(token_logprobs(chosen, self.head.weight, self.head.bias, target, temperature, masks))
        logprobs, entropies = self._sharing.gathered(found, own, len(packed.predict))
        return logprobs, entropies


class SequenceParallelValues(ModuleValues):
    """A `ValueForward` for the ranks of `group`: each returns all values [N], with gradients only for its own tokens.

    Raises as `SequenceParallelForward` does.
    """

    def __init__(self, model: ValueModel, group: dist.ProcessGroup, vision: Vision | None = None) -> None:
        super().__init__(model)
        self.vision = vision
        self._sharing = _Sharing(model.model, model.model, group, vision)

    def __call__(self, packed: Packed, features: Tensor) -> Tensor:
        device = self.model.lm_head.weight.device
        states, own = self._sharing.states(packed, device)
        own_features = features[torch.from_numpy(own).to(device)]  # the other ranks have the gradient of theirs
        values = self.model.of_states(states)[:, 0] + self.model.of_features(own_features)
        return self._sharing.gathered(values[None], own, len(packed.predict))[0]


class _OfGroup(Context, Protocol):
    group: dist.ProcessGroup


class _AllToAll(torch.autograd.Function):
    """All-to-all over the first dimension, [s, ...] to [s, ...]; its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: _OfGroup, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: _OfGroup, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def _slice(column: np.ndarray, start: int, width: int) -> Tensor:
    """`width` entries from `start` on, padded with zeros behind the end."""
    part = column[start : start + width]
    return torch.from_numpy(np.pad(part, (0, width - len(part))))
