"""Attention of a step over a slot cache: rows that decode one token each, and chunks of prompts.

Written in the subset of Python that TorchScript compiles, because `step` is compiled; used uncompiled as well. q
arrives scaled, so scores are plain products. Keys and values of the step's own tokens are in the cache already.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Bucket(NamedTuple):
    """Chunks attended together, padded to a rectangle of [R, Q] queries that see the first `width` columns.

    first, last: their span among the step's chunk tokens. pad [R * Q] and unpad [last - first] go to the rectangle and
    back. mask [R, 1, Q, width]: 0 or -inf. long: too many scores to hold at once, so the fused kernel serves.
    """

    slots: Tensor
    pad: Tensor
    unpad: Tensor
    mask: Tensor
    first: int
    last: int
    width: int
    long: bool


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, width: int, bias: Tensor | None) -> Tensor:
    """q [n, heads, D] of slots 0..n; keys, values [slots, kv_heads, columns, D] -> [n, heads * D].

    bias [n, 1, width]: 0 or -inf, where rows are of different lengths.
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
    """q [tokens, heads, D] of the bucket -> [tokens, heads * D]."""
    heads, size = q.shape[1], q.shape[2]
    r, kv = len(b.slots), keys.shape[1]
    k = keys[:, :, : b.width].index_select(0, b.slots)
    v = values[:, :, : b.width].index_select(0, b.slots)
    queries = q.index_select(0, b.pad).view(r, -1, heads, size).transpose(1, 2)
    if b.long:
        mask = b.mask.to(q.dtype)
        o = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
    else:
        grouped = queries.reshape(r, kv, -1, size)  # heads that share keys, one below the other
        scores = torch.matmul(grouped, k.transpose(-1, -2)).view(r, heads, -1, b.width).float().add_(b.mask)
        probs = torch.softmax(scores, -1).to(q.dtype).view(r, kv, -1, b.width)
        o = torch.matmul(probs, v).view(r, heads, -1, size)
    return o.transpose(1, 2).reshape(-1, heads * size).index_select(0, b.unpad)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, n: int, width: int, bias: Tensor | None, buckets: list[Bucket]
) -> Tensor:
    """q [n + chunk tokens, heads, D] -> [n + chunk tokens, heads * D]."""
    if len(buckets) == 0:
        return decode_attention(q, keys, values, width, bias)
    parts: list[Tensor] = []
    if n > 0:
        parts.append(decode_attention(q[:n], keys, values, width, bias))
    for b in buckets:
        parts.append(chunk_attention(q[n + b.first : n + b.last], keys, values, b))
    return torch.cat(parts)
