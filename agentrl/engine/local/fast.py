"""`BlockRunner`: Qwen2, Qwen3 and Llama models through our own forward, decoding rows and prompt chunks in one pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.engine.local import block
from agentrl.engine.local.cache import SlotCache
from agentrl.engine.local.runner import Bools, Chunk, Ints, Work

COPY_BELOW = 200_000_000
"""Parameters. A smaller model is decoded from its own fused copy of the weights (a millisecond a million parameters for
every update); from there on products are large enough that a copy gains less than the memory it takes."""

SCORES_AT_ONCE = 1 << 22
"""Attention scores of chunks that are held at once; a single longer chunk goes through the fused CPU kernel."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Chunks attended together, padded to [R, Q] queries over `width` columns.

    first, last: their span among the chunk tokens. pad [R * Q] and unpad [last - first] go to the rectangle and back.
    mask [R, 1, Q, width]: 0 or -inf.
    """

    first: int
    last: int
    slots: Tensor
    pad: Tensor
    unpad: Tensor
    mask: Tensor
    width: int


class BlockRunner:
    """See `Runner`. The cache belongs to one step at a time: not reentrant."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shape = block.shape_of(model)
        self.rope = block.Rope(model)
        self.cache = SlotCache()
        self.device = model.model.embed_tokens.weight.device
        dtype = model.model.embed_tokens.weight.dtype
        self.token_bytes = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * dtype.itemsize
        self.copies = sum(p.numel() for p in model.parameters()) < COPY_BELOW
        self._weights: block.Weights | None = None

    @property
    def slots(self) -> int:
        return self.cache.slots

    @property
    def columns(self) -> int:
        return self.cache.columns

    def resize(self, slots: int, columns: int) -> None:
        self.cache.resize(slots, columns)

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        with torch.inference_mode():
            self.cache.copy(source, target, columns)

    def clear(self) -> None:
        self.cache.clear()
        self._weights = None

    def refresh(self) -> None:
        self._weights = None

    @torch.inference_mode()
    def forward(self, work: Work) -> Tensor:
        if self._weights is None:
            self._weights = block.weights_of(self.model, copy=self.copies, interleave=self.copies)
        n, chunks = len(work.ids), work.chunks
        lengths = np.array([len(c.ids) for c in chunks], np.int64)
        ids = np.concatenate([work.ids, *(c.ids for c in chunks)]) if chunks else work.ids
        positions = np.concatenate([work.positions, *(c.start + np.arange(len(c.ids)) for c in chunks)])
        longest = int(positions.max()) + 1
        # q and k are both turned, so this factor makes their product the scaled score
        turn = self.rope.table(longest)[self._tensor(positions)][:, None] * self.shape.head_dim**-0.25
        x = block.hidden(self._weights, self._tensor(ids), turn, self._attend(work, positions, lengths))
        if chunks:
            x = x[self._tensor(np.concatenate([np.arange(n), n + np.cumsum(lengths) - 1]))]
        return self._weights.head(x).float()

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _attend(self, work: Work, positions: Ints, lengths: Ints) -> block.Attend:
        n, s, cache = len(work.ids), self.shape, self.cache
        rows = np.concatenate([np.arange(n), np.repeat([c.slot for c in work.chunks], lengths).astype(np.int64)])
        columns = positions.copy()
        columns[:n][~work.active] = cache.columns
        heads = rows[:, None] * s.kv_heads + np.arange(s.kv_heads)
        target = self._tensor((heads * (cache.columns + 1) + columns[:, None]).reshape(-1))
        decode = self._decode(work.positions, work.active) if n else None
        buckets = list(self._buckets(work.chunks))

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.layer(i, k, v)
            keys.view(-1, s.head_dim).index_copy_(0, target, k.reshape(-1, s.head_dim))
            values.view(-1, s.head_dim).index_copy_(0, target, v.reshape(-1, s.head_dim))
            if not buckets and decode is not None:
                return decode(keys, values, q)
            parts = [decode(keys, values, q[:n])] if decode is not None else []
            parts += [self._chunk_attention(b, keys, values, q[n + b.first : n + b.last]) for b in buckets]
            return torch.cat(parts)

        return attend

    def _decode(self, positions: Ints, active: Bools) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """One query a row over its own columns; rows of different lengths are told apart by a bias."""
        n, s = len(positions), self.shape
        width = int(positions.max()) + 1
        bias: Tensor | None = None
        if active.any() and int(positions[active].min()) + 1 < width:
            hidden = torch.arange(width) > torch.from_numpy(positions)[:, None]
            bias = torch.zeros(n, 1, width).masked_fill_(hidden[:, None], -torch.inf).to(self.device)

        def attention(keys: Tensor, values: Tensor, q: Tensor) -> Tensor:
            k = keys.view(-1, keys.shape[2], s.head_dim)[: n * s.kv_heads, :width]
            v = values.view(-1, values.shape[2], s.head_dim)[: n * s.kv_heads, :width]
            scores = torch.bmm(q.reshape(n * s.kv_heads, -1, s.head_dim), k.transpose(1, 2))
            if bias is not None:
                scores.view(n, s.heads, width).add_(bias)
            probs = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
            return torch.bmm(probs, v).view(n, -1)

        return attention

    def _buckets(self, chunks: tuple[Chunk, ...]) -> Any:
        """Runs of chunks whose padded scores fit together."""
        first = 0
        while first < len(chunks):
            last, queries, width = first, 0, 0
            while last < len(chunks):
                q = max(queries, len(chunks[last].ids))
                w = max(width, chunks[last].start + len(chunks[last].ids))
                if last > first and (last + 1 - first) * self.shape.heads * q * w > SCORES_AT_ONCE:
                    break
                last, queries, width = last + 1, q, w
            offset = sum(len(c.ids) for c in chunks[:first])
            yield self._bucket(chunks[first:last], offset, queries, width)
            first = last

    def _bucket(self, chunks: tuple[Chunk, ...], offset: int, queries: int, width: int) -> _Bucket:
        lengths = np.array([len(c.ids) for c in chunks], np.int64)
        starts = np.array([c.start for c in chunks], np.int64)
        inside = np.arange(queries) < lengths[:, None]
        unpad = np.flatnonzero(inside.reshape(-1))
        pad = np.zeros(inside.size, np.int64)
        pad[unpad] = np.arange(len(unpad))
        hidden = np.arange(width) > (starts[:, None] + np.arange(queries))[:, :, None]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None]
        slots = self._tensor(np.array([c.slot for c in chunks], np.int64))
        tensors = (slots, self._tensor(pad), self._tensor(unpad), self._tensor(mask))
        return _Bucket(offset, offset + len(unpad), *tensors, width)

    def _chunk_attention(self, b: _Bucket, keys: Tensor, values: Tensor, q: Tensor) -> Tensor:
        """q [tokens, heads, D] of the bucket -> [tokens, heads * D]."""
        s, r = self.shape, len(b.slots)
        k = keys[:, :, : b.width].index_select(0, b.slots)
        v = values[:, :, : b.width].index_select(0, b.slots)
        queries = q.index_select(0, b.pad).view(r, -1, s.heads, s.head_dim).transpose(1, 2)
        if r * s.heads * queries.shape[2] * b.width > SCORES_AT_ONCE:
            mask = b.mask.to(q.dtype)
            o = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
        else:
            grouped = queries.reshape(r, s.kv_heads, -1, s.head_dim)  # heads that share keys, one below the other
            scores = (grouped @ k.transpose(-1, -2)).view(r, s.heads, -1, b.width).float().add_(b.mask)
            o = (scores.softmax(-1).to(q.dtype).view(r, s.kv_heads, -1, b.width) @ v).view(queries.shape)
        return o.transpose(1, 2).reshape(-1, s.heads * s.head_dim).index_select(0, b.unpad)
