"""Attention of one step over a slot cache: rows that decode one token each, and chunks of prompts.

q is already scaled, so scores are plain products. Keys and values of the step's tokens are already in the cache.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Bucket(NamedTuple):
    """R chunks that are attended together, padded to a rectangle of [R, Q] queries."""

    slots: Tensor
    """int64 [R]: the slot of each chunk."""
    pad: Tensor
    """int64 [R * Q]: for each query of the rectangle, the index of its token among the bucket's tokens."""
    unpad: Tensor
    """int64 [last - first]: for each of the bucket's tokens, its index in the flattened rectangle."""
    mask: Tensor
    """float32 [R, 1, Q, width]: 0 where a query may attend, else -inf."""
    first: int
    """Index of the bucket's first token among the chunk tokens of the step."""
    last: int
    """Index after the bucket's last token."""
    width: int
    """Number of cache columns that are attended to."""
    long: bool
    """Whether there are too many scores to hold at once, so that torch's fused attention is used."""


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, width: int, bias: Tensor | None) -> Tensor:
    """The attention of one token for each of the slots 0..n-1, [n, heads * D].

    q: [n, heads, D]. keys, values: [slots, kv_heads, columns, D], of which the first `width` columns are read. bias:
    [n, 1, width], 0 or -inf, if rows have different lengths; else None.
    """
    n, heads, size = q.shape
    kv = keys.shape[1]
    k = keys.view(-1, keys.shape[2], size)[: n * kv, :width]
    v = values.view(-1, values.shape[2], size)[: n * kv, :width]
    scores = torch.bmm(q.reshape(n * kv, heads // kv, size), k.transpose(1, 2))
    if bias is not None:
        scores.view(n, heads, width).add_(bias)
    if scores.dtype != torch.float32:
        return torch.bmm(torch.softmax(scores.float(), -1).to(q.dtype), v).view(n, -1)
    return torch.bmm(torch.softmax(scores, -1), v).view(n, -1)


def chunk_attention(q: Tensor, keys: Tensor, values: Tensor, b: Bucket) -> Tensor:
    """The attention of a bucket's tokens, [tokens, heads * D].

    q: [tokens, heads, D]. keys, values: [slots, kv_heads, columns, D].
    """
    heads, size = q.shape[1], q.shape[2]
    r, kv = len(b.slots), keys.shape[1]
    k = keys[:, :, : b.width].index_select(0, b.slots)
    v = values[:, :, : b.width].index_select(0, b.slots)
    queries = q.index_select(0, b.pad).view(r, -1, heads, size).transpose(1, 2)
    if b.long:
        mask = b.mask.to(q.dtype)
        o = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
    else:
        grouped = queries.reshape(r, kv, -1, size)  # heads that share keys are concatenated
        scores = torch.matmul(grouped, k.transpose(-1, -2)).view(r, heads, -1, b.width).float().add_(b.mask)
        probs = torch.softmax(scores, -1).to(q.dtype).view(r, kv, -1, b.width)
        o = torch.matmul(probs, v).view(r, heads, -1, size)
    return o.transpose(1, 2).reshape(-1, heads * size).index_select(0, b.unpad)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, n: int, width: int, bias: Tensor | None, buckets: list[Bucket]
) -> Tensor:
    """The attention of all tokens of a step, n rows and then the chunks: [n + chunk tokens, heads * D].

    q: [n + chunk tokens, heads, D]. The other arguments: see `decode_attention` and `chunk_attention`.
    """
    if len(buckets) == 0:
        return decode_attention(q, keys, values, width, bias)
    parts: list[Tensor] = []
    if n > 0:
        parts.append(decode_attention(q[:n], keys, values, width, bias))
    for b in buckets:
        parts.append(chunk_attention(q[n + b.first : n + b.last], keys, values, b))
    return torch.cat(parts)
