"""`BlockRunner`: Qwen2, Qwen3 and Llama models in our own forward, with decoding rows and prompt chunks in one pass."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.local.attention import Bucket, attend
from agentrl.engine.local.cache import CachedRunner, machine_bytes
from agentrl.engine.local.compiled_step import MULTIPLE, Alike, CompiledStep
from agentrl.engine.local.native import Native, native
from agentrl.engine.local.runner import Bools, Chunk, Ints, Work
from agentrl.models import block
from agentrl.models.panels import PanelDense, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COPY_BELOW = 200_000_000
"""Number of parameters below which a model is decoded from a fused copy of its weights, which takes 1 ms per million
parameters for every update."""

PACKED_SHARE = 8
"""A larger model, and any in bfloat16, is decoded from a copy laid out for this CPU, where that gains (`layout_of`) and
the copy takes at most this part of the machine's memory; else from the weights themselves."""

SCORES_AT_ONCE = 1 << 22
"""Maximum number of attention scores of chunks held at once; a single chunk with more uses torch's fused attention."""


class BlockRunner(CachedRunner):
    """A `Runner` for models that `models.block` supports. Not reentrant: the cache belongs to one step at a time."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model
        self.shape = block.shape_of(model)
        # q and k are both rotated by it, so with this factor their product is the scaled score
        self.rope = block.Rope(model, factor=self.shape.head_dim**-0.25)
        self.device = model.model.embed_tokens.weight.device
        dtype = model.model.embed_tokens.weight.dtype
        self.token_bytes = 0
        self.share(1)
        self._vocabulary = len(model.lm_head.weight)
        self._fits = self.device.type == "cpu" and dtype == torch.float32 and self.shape.head_dim % MULTIPLE == 0
        self._weights: block.Weights | None = None
        self._compiled: CompiledStep | None = None
        self._alike = Alike()

    def resize(self, slots: int, columns: int) -> None:
        super().resize(slots, columns)
        self._alike.resize(slots)

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        super().copy(source, target, columns)
        self._alike.copied(source, target, columns)

    def share(self, processes: int) -> None:
        """Choose the form of the weights that a step reads, of which each process has its own."""
        head = self.model.lm_head.weight
        small = sum(p.numel() for p in self.model.parameters()) < COPY_BELOW
        room = processes * PACKED_SHARE * _packed_bytes(self.model) <= machine_bytes()
        layout = layout_of(head) if room and not (small and head.dtype == torch.float32) else None
        self.packs, self.copies = layout is not None, small and layout is None
        self._dtype = torch.float32 if layout is not None and layout[0] is PanelDense else head.dtype
        s = self.shape
        self.token_bytes = 2 * s.layers * s.kv_heads * s.head_dim * self._dtype.itemsize

    @property
    def batch_invariant(self) -> bool:
        return self._native() is not None

    @property
    def any_slots(self) -> bool:
        return self._native() is not None

    def _native(self) -> Native | None:
        """The functions that compute a step, where they can."""
        return native() if self.copies and self._fits else None

    def clear(self) -> None:
        super().clear()
        self.refresh()

    def refresh(self) -> None:
        self._weights = self._compiled = None

    def forward(self, work: Work) -> Tensor:
        if (self._weights is None and self._compiled is None) or not self.cache.keys:
            self._prepare()
        return self._plain_step(work) if self._compiled is None else self._compiled_step(self._compiled, work)

    @torch.inference_mode()
    def _prepare(self) -> None:
        """Make sure that the weights are in the form that a step reads, and that the cache is allocated."""
        if self._weights is None and self._compiled is None:
            found = self._native()
            interleave = self.copies and found is None
            weights = block.weights_of(self.model, copy=self.copies, interleave=interleave, pack=self.packs)
            if found is None:
                self._weights = weights
            else:
                self._compiled = CompiledStep(found, weights, self.rope)
        like = torch.empty(1, self.shape.kv_heads, self.shape.head_dim, dtype=self._dtype, device=self.device)
        for i in range(self.shape.layers):
            self.cache.layer(i, like, like)

    def _compiled_step(self, step: CompiledStep, work: Work) -> Tensor:
        """Compute the rows that decode and the tokens of the chunks, by numpy and one call of C: with few rows, an
        operation of torch takes as long as a row does."""
        n, slots, own = len(work.ids), work.slots, np.flatnonzero(work.active)
        m = len(own)
        fed, ids, positions, last = _tokens_of(work.chunks)
        tokens = np.empty((6, m + len(ids)), np.int64)
        tokens[0, :m], tokens[0, m:] = work.ids[own], ids
        tokens[1, :m], tokens[1, m:] = own if slots is None else slots[own], fed
        tokens[2, :m], tokens[2, m:] = work.positions[own], positions
        tokens[3], tokens[4] = self._alike.of(tokens[1], tokens[2])
        tokens[5, :m], tokens[5, m:] = own, -1
        tokens[5, m + last] = np.arange(n, n + len(last))
        logits = torch.empty(n + len(last), self._vocabulary)  # those of the others are not read
        step(self.cache, tokens, logits)
        return logits

    @torch.inference_mode()
    def _plain_step(self, work: Work) -> Tensor:
        """Compute a step by `block.hidden`, for any dtype, with weights shared or copied."""
        assert self._weights is not None
        slots, ids, positions, last = _tokens_of(work.chunks)
        n, s = len(work.ids), self.shape
        columns = np.concatenate([np.where(work.active, work.positions, self.cache.columns), positions])
        rows, positions = np.concatenate([np.arange(n), slots]), np.concatenate([work.positions, positions])
        pick = self._tensor(np.concatenate([np.arange(n), n + last])) if work.chunks else None
        places = rows * (self.cache.columns + 1) + columns
        if s.kv_heads > 1:
            places = (places + rows * (s.kv_heads - 1) * (self.cache.columns + 1))[:, None]
            places = (places + np.arange(s.kv_heads) * (self.cache.columns + 1)).reshape(-1)
        width = int(work.positions.max()) + 1 if n else 0
        rotation = self.rope.table(int(positions.max()) + 1).index_select(0, self._tensor(positions))[:, None]
        bias, buckets = self._bias(work.positions, work.active, width), list(self._buckets(work.chunks))
        every, target = self._tensor(np.concatenate([work.ids, ids])), self._tensor(places)

        def attention_of(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.layer(i, k, v)
            keys.view(-1, s.head_dim).index_copy_(0, target, k.reshape(-1, s.head_dim))
            values.view(-1, s.head_dim).index_copy_(0, target, v.reshape(-1, s.head_dim))
            return attend(q, keys, values, n, width, bias, buckets)

        x = block.hidden(self._weights, every, rotation, attention_of)
        return self._weights.head(x if pick is None else x[pick]).float()

    def _tensor(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _bias(self, positions: Ints, active: Bools, width: int) -> Tensor | None:
        """The mask of rows, [n, 1, width]: 0 for computed tokens, else -inf; None if all lengths are equal."""
        if int(positions[active].min(initial=width - 1)) + 1 == width:
            return None
        beyond = np.arange(width) > positions[:, None]
        return self._tensor(np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None])

    def _buckets(self, chunks: tuple[Chunk, ...]) -> Iterator[Bucket]:
        """Split the chunks into buckets of consecutive ones with at most SCORES_AT_ONCE padded scores."""
        first = offset = 0
        while first < len(chunks):
            last, queries, width = first, 0, 0
            while last < len(chunks):
                q = max(queries, len(chunks[last].ids))
                w = max(width, chunks[last].start + len(chunks[last].ids))
                if last > first and (last + 1 - first) * self.shape.heads * q * w > SCORES_AT_ONCE:
                    break
                last, queries, width = last + 1, q, w
            bucket = self._bucket(chunks[first:last], offset, queries, width)
            yield bucket
            first, offset = last, bucket.last

    def _bucket(self, chunks: tuple[Chunk, ...], offset: int, queries: int, width: int) -> Bucket:
        lengths = np.array([len(c.ids) for c in chunks], np.int64)
        starts = np.array([c.start for c in chunks], np.int64)
        inside = np.arange(queries) < lengths[:, None]
        unpad = np.flatnonzero(inside.reshape(-1))
        pad = np.zeros(inside.size, np.int64)
        pad[unpad] = np.arange(len(unpad))
        beyond = np.arange(width) > (starts[:, None] + np.arange(queries))[:, :, None]
        mask = np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None]
        slots = np.array([c.slot for c in chunks], np.int64)
        tensors = self._tensor(slots), self._tensor(pad), self._tensor(unpad), self._tensor(mask)
        long = len(chunks) * self.shape.heads * queries * width > SCORES_AT_ONCE
        return Bucket(*tensors, offset, offset + len(unpad), width, long)


def _tokens_of(chunks: tuple[Chunk, ...]) -> tuple[Ints, Ints, Ints, Ints]:
    """All tokens of chunks, one after the other, [N]: their slots, ids and positions; and the index of each chunk's
    last."""
    if not chunks:
        return (np.zeros(0, np.int64),) * 4
    lengths = np.array([len(c.ids) for c in chunks], np.int64)
    slots = np.repeat(np.array([c.slot for c in chunks], np.int64), lengths)
    positions = np.concatenate([np.arange(c.start, c.start + len(c.ids)) for c in chunks])
    return slots, np.concatenate([c.ids for c in chunks]), positions, np.cumsum(lengths) - 1


def _packed_bytes(model: "PreTrainedModel") -> int:
    """The size of a packed copy of the model: all but its embeddings, and its output layer even if tied."""
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    every = sum(p.nbytes for p in model.parameters())
    return int(every if head is embed else every - embed.nbytes)
