"""One packed row computed by several ranks, each with a slice of its tokens (Ulysses, arXiv:2309.14509).

Embeddings, norms and MLPs see P / s tokens a rank. Around attention the ranks exchange tokens for heads, so that each
attends over the whole row with H / s of the heads, by the same plan as one process would. What one process would
compute is what the ranks compute: log-probs are equal, and the parameters' gradients add up over the ranks.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.compute.forward import ModuleForward
from agentrl.compute.hf_attention import attending
from agentrl.compute.kernels import token_logprobs
from agentrl.compute.packing import Packed
from agentrl.compute.tree_attention import Layout, attend, plan
from agentrl.compute.value_head import ModuleValues, ValueModel
from agentrl.errors import UserError


class _Sharing:
    """This rank's part of what the ranks of `group` compute together; `model` is a transformer with attention heads.

    Raises UserError when those cannot be dealt out evenly.
    """

    def __init__(self, model: PreTrainedModel, base: Any, group: dist.ProcessGroup) -> None:
        self.model, self.base = model, base
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        heads: int = model.config.get_text_config().num_attention_heads
        if heads % self.ranks:
            raise UserError(
                f"cluster.sequence_parallel: {self.ranks} workers cannot share {heads} attention heads evenly;"
                f" choose one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
            )

    def states(self, packed: Packed, device: torch.device) -> tuple[Tensor, np.ndarray]:
        """What `base` makes of the tokens that predict, as far as they lie in this rank's slice, [n, D], and which of
        the row's predictions those are."""
        width = -(-len(packed.ids) // self.ranks)
        start, end = self.rank * width, (self.rank + 1) * width
        layout = plan(packed.segments, device)
        with attending(self.model, lambda q, k, v, scale: self._attend(q, k, v, layout, scale)):
            states = self.base(
                input_ids=_slice(packed.ids, start, width).to(device)[None],
                position_ids=_slice(packed.positions, start, width).to(device)[None],
                use_cache=False,
            ).last_hidden_state[0]
        own = np.flatnonzero((packed.predict >= start) & (packed.predict < end))
        return states.index_select(0, torch.from_numpy(packed.predict[own] - start).to(device)), own

    def gathered(self, found: Tensor, own: np.ndarray, count: int) -> Tensor:
        """found [k, n]: this rank's, which are number `own` of `count`; [k, count] with those of all ranks, which have
        no gradient."""
        everyone = torch.zeros(len(found), count, dtype=found.dtype, device=found.device)
        places = torch.from_numpy(own).to(found.device)
        everyone.index_copy_(1, places, found.detach())
        dist.all_reduce(everyone, group=self.group)
        return everyone.index_copy(1, places, found)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """query [W, H, D], key and value [W, G, D] of this rank's slice to [W, H * D]: attention over the whole row."""
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
        """parts [s, ...]: part i goes to rank i; back come the parts that the ranks have for this one, in their
        order."""
        exchanged: Tensor = _AllToAll.apply(parts, self.group)
        return exchanged


class SequenceParallelForward(ModuleForward):
    """A `Forward` that the ranks of `group` call with equal arguments.

    Every rank gets all log-probs and entropies [N], with a gradient for those alone that its own tokens predict. So a
    loss of them is the same on every rank, and its gradients must be added up over the ranks of the group.

    Raises UserError when the model's attention heads cannot be dealt out evenly.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self._sharing = _Sharing(model, self.base, group)

    def __call__(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        device = self.head.weight.device
        states, own = self._sharing.states(packed, device)
        target = torch.from_numpy(packed.target[own]).to(device)
        chosen = states.to(self.head.weight.dtype)
        found = torch.stack(token_logprobs(chosen, self.head.weight, self.head.bias, target, temperature))
        logprobs, entropies = self._sharing.gathered(found, own, len(packed.predict))
        return logprobs, entropies


class SequenceParallelValues(ModuleValues):
    """A `ValueForward` likewise: every rank gets all values [N], with a gradient for those of its own tokens."""

    def __init__(self, model: ValueModel, group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self._sharing = _Sharing(model.model, model.model, group)

    def __call__(self, packed: Packed, features: Tensor) -> Tensor:
        device = self.model.lm_head.weight.device
        states, own = self._sharing.states(packed, device)
        own_features = features[torch.from_numpy(own).to(device)]  # the other ranks have the gradient of theirs
        values = self.model.of_states(states)[:, 0] + self.model.of_features(own_features)
        return self._sharing.gathered(values[None], own, len(packed.predict))[0]


class _AllToAll(torch.autograd.Function):
    """[s, ...] to [s, ...]; its transpose, which carries the gradient back, is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def _slice(column: np.ndarray, start: int, width: int) -> Tensor:
    """width entries from `start` on, zeros behind the end."""
    part = column[start : start + width]
    return torch.from_numpy(np.pad(part, (0, width - len(part))))
