"""Attention over a packed row whose sequences share prefixes, without a mask of all pairs of tokens.

On a CPU, segments of similar length form a bucket, which is one batched product, prefixes included. Padding exists only
in the scores of a bucket; no padded token reaches a layer. Short buckets have a hand-derived forward and backward pass
(1.5 times faster than flash attention on a CPU), long ones use scaled_dot_product_attention.

On a CUDA device one kernel computes the whole row: flex_attention over the blocks of the mask where samples share a
beginning, flash attention over sequences of any length where none do (half precision alone). A kernel is used once it
agrees with the buckets on a small row, gradients included; otherwise the buckets are used, and a line of the log says
why.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.compute.packing import Segment, Span, indices
from agentrl.models.autograd import Context

log = logging.getLogger(__name__)

SHORT = 512
"""Number of keys up to which a bucket keeps its probabilities for the backward pass."""
STEP = 1024
"""Queries of a long bucket with prefixes that are computed at once, so that the mask stays small."""
HALVED = 256
"""Length from which a short segment without a prefix is split in two, the first half being the prefix of the second: a
quarter less work."""
GROUPED = ("cpu",)
"""Devices whose fused kernels take a mask and fewer key heads than query heads. On a GPU only the kernel that holds all
scores does, for which memory does not suffice at 8192 keys: there, keys are repeated for the query heads."""
BLOCK = 128
"""Tokens of a block of the mask of flex_attention."""
FEW_HEADS = 4
"""Number of key heads up to which flex_attention gets a copy of the keys for every query head. Its backward pass takes
one program for each block of keys and key head; those of a shared prompt see the queries of all answers, and the others
wait for them. On an H200, 14 query and 2 key heads of 64, a prompt of 512 tokens with 8 answers of 1024: forward and
backward pass 1.54 ms in place of 2.48."""
KINDS = 64
"""Maximum kinds of tensors that flex_attention is compiled for in one process."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference of a kernel from the buckets, as a share of the largest value; TF32 is within it."""
FILL = 0.8
"""Minimum length of a segment in a bucket, as a share of the longest."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """B segments of at most A tokens, after prefixes of at most R tokens; K = R + A."""

    own: Tensor
    """int64 [B, A]: packed indices of the segments' tokens; padding repeats a token of the segment."""
    keys: Tensor
    """int64 [B, K]: packed indices of the prefixes' and the segments' tokens, padded likewise."""
    seen: Tensor
    """bool [B or 1, R]: which keys of the prefixes are not padding."""
    padding: Tensor | None
    """bool [B, A]: which entries of `own` are padding; None if all segments have A tokens."""

    def mask(self, start: int, end: int) -> Tensor:
        """The mask of queries start .. end - 1 over R + end keys: float [B or 1, end - start, R + end], 0 or
        -inf."""
        steps = torch.arange(end, device=self.own.device)
        causal = (steps[start:, None] >= steps).expand(len(self.seen), -1, -1)
        allowed = torch.cat([self.seen[:, None].expand(-1, end - start, -1), causal], -1)
        return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, float("-inf"))


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A `Layout` of buckets."""

    buckets: tuple[Bucket, ...]
    """The buckets of the row, which hold every packed token once."""
    back: Tensor
    """int64 [P]: the index of each packed token in the concatenation of the buckets."""
    _by_heads: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _masks: list[Tensor] = field(default_factory=list)

    @property
    def masks(self) -> list[Tensor]:
        """The whole mask of every bucket, [B or 1, A, K], computed once for all layers; for short buckets."""
        if not self._masks:
            self._masks.extend(b.mask(0, b.own.shape[1]) for b in self.buckets)
        return self._masks

    @property
    def longest(self) -> int:
        """Largest number of keys of a query."""
        return max(b.keys.shape[1] for b in self.buckets)

    @property
    def tokens(self) -> int:
        """Number of packed tokens, P."""
        return len(self.back)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See the function `attend`."""
        tokens, groups = key.shape[:2]
        if self.longest > SHORT or query.dtype != torch.float32 or query.is_cuda:
            return _long(query, key, value, self, scale)
        rows = tokens * groups
        short: Tensor = _Short.apply(
            query.reshape(rows, -1), key.reshape(rows, -1), value.reshape(rows, -1), self, groups, scale
        )
        return short

    def by_heads(self, heads: int) -> list[tuple[Tensor, Tensor]]:
        """`own` [B * heads * A] and `keys` [B * heads * K] of every bucket as rows of a [P * heads, ...]
        tensor."""
        if heads not in self._by_heads:
            self._by_heads[heads] = [(_rows(b.own, heads), _rows(b.keys, heads)) for b in self.buckets]
        return self._by_heads[heads]


class Layout(Protocol):
    """How the tokens of one packed row attend, prepared once for all layers."""

    @property
    def tokens(self) -> int:
        """Number of packed tokens, P."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See the function `attend`."""


def make_layout(segments: Sequence[Segment], device: torch.device | str = "cpu") -> Layout:
    """The layout of a packed row for a device: `RowLayout` on CUDA, else `BucketLayout`."""
    if torch.device(device).type == "cuda":
        return RowLayout(tuple(segments), torch.device(device))
    return bucket_layout(segments, device)


def bucket_layout(segments: Sequence[Segment], device: torch.device | str = "cpu") -> BucketLayout:
    """Sort segments into buckets. Takes O(tokens), once a packed row, for all layers."""
    real = [s for s in segments if _length(s)]
    if max(s.reach + _length(s) for s in real) <= SHORT:
        real = [half for s in real for half in _halves(s)]
    order = sorted(real, key=lambda s: (s.reach > 0, _length(s)), reverse=True)
    buckets: list[Bucket] = []
    packed: list[Tensor] = []
    bucketed: list[Tensor] = []
    offset = 0
    for members in _runs(order):
        width = _length(members[0])
        buckets.append(_bucket(members, width, device))
        for row, segment in enumerate(members):
            first = offset + row * width
            packed.append(torch.arange(segment.start, segment.end))
            bucketed.append(torch.arange(first, first + _length(segment)))
        offset += len(members) * width
    back = torch.empty(sum(len(p) for p in packed), dtype=torch.long)
    back[torch.cat(packed)] = torch.cat(bucketed)
    return BucketLayout(tuple(buckets), back.to(device))


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attend over a packed row: query [P, H, D], key and value [P, G, D] to [P, H * D].

    The H / G query heads of a key head are neighbours.
    """
    return layout.attend(query, key, value, scale)


def _long(query: Tensor, key: Tensor, value: Tensor, layout: BucketLayout, scale: float) -> Tensor:
    outputs: list[Tensor] = []
    parts: list[Tensor] = []
    repeats = query.shape[1] // key.shape[1] if query.device.type not in GROUPED else 1
    for bucket in layout.buckets:
        q, k, v = query[bucket.own], key[bucket.keys], value[bucket.keys]
        reach, width = bucket.seen.shape[1], bucket.own.shape[1]
        step = STEP if reach else width
        for start in range(0, width, step):
            end = min(start + step, width)
            mask = bucket.mask(start, end)[:, None].to(query.dtype) if reach else None
            attended = F.scaled_dot_product_attention(
                q[:, start:end].transpose(1, 2),
                _for_heads(k[:, : reach + end].transpose(1, 2), repeats),
                _for_heads(v[:, : reach + end].transpose(1, 2), repeats),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=repeats == 1 and query.shape[1] != key.shape[1],
            )
            parts.append(attended.transpose(1, 2).flatten(2))
        outputs.append(torch.cat(parts, 1).flatten(0, 1))
        parts.clear()
    return torch.cat(outputs).index_select(0, layout.back)


def _for_heads(states: Tensor, repeats: int) -> Tensor:
    """Repeat keys or values [..., G, X, D] or [P, G, D] for every query head: G becomes G * repeats."""
    return states if repeats == 1 else states.repeat_interleave(repeats, 1)


class _OfBuckets(Context, Protocol):
    layout: BucketLayout
    groups: int
    scale: float
    shapes: tuple[torch.Size, torch.Size, torch.Size]


class _Short(torch.autograd.Function):
    """Attention over short buckets: query [P * G, (H / G) * D], key and value [P * G, D] to [P, H * D].

    Rows are tokens x key heads.
    """

    @staticmethod
    def forward(
        ctx: _OfBuckets, query: Tensor, key: Tensor, value: Tensor, layout: BucketLayout, groups: int, scale: float
    ) -> Tensor:
        outputs: list[Tensor] = []
        kept: list[Tensor] = []
        for bucket, mask, (own, keys) in zip(layout.buckets, layout.masks, layout.by_heads(groups), strict=True):
            rows, length = bucket.own.shape
            q, k, v = _gather(query, key, value, own, keys, rows * groups)
            scores = torch.bmm(q.mul_(scale), k.transpose(1, 2))
            scores.view(rows, groups, length, -1, k.shape[1]).add_(mask[:, None, :, None])
            weights = scores.softmax(-1)
            attended = torch.bmm(weights, v).view(rows, groups, length, -1)
            outputs.append(attended.transpose(1, 2).reshape(rows * length, -1))
            kept += (q, k, v, weights)
        ctx.layout, ctx.groups, ctx.scale = layout, groups, scale
        ctx.save_for_backward(*kept)  # so that activation checkpointing can do without them
        ctx.shapes = (query.shape, key.shape, value.shape)
        return torch.cat(outputs).index_select(0, layout.back)

    @staticmethod
    def backward(ctx: _OfBuckets, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        groups, size = ctx.groups, ctx.shapes[1][1]
        d_out_all = gradients[0].reshape(ctx.shapes[0])
        by_own: list[list[Tensor]] = [[], [], []]
        by_prefix: list[tuple[Tensor, Tensor, Tensor]] = []
        saved = iter(ctx.saved_tensors)
        for bucket, (own, keys) in zip(ctx.layout.buckets, ctx.layout.by_heads(groups), strict=True):
            rows, length = bucket.own.shape
            q, k, v, weights = islice(saved, 4)
            d_out = d_out_all.index_select(0, own).view(q.shape)
            if bucket.padding is not None:
                d_out.view(rows, groups, length, -1).masked_fill_(bucket.padding[:, None, :, None], 0.0)
            d_weights = torch.bmm(d_out, v.transpose(1, 2))
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, torch.float32)
            d_keys, d_values = torch.bmm(d_scores.transpose(1, 2), q), torch.bmm(weights.transpose(1, 2), d_out)
            reach = k.shape[1] - length
            for parts, d_own in zip(
                by_own, (torch.bmm(d_scores, k).mul_(ctx.scale), d_keys[:, reach:], d_values[:, reach:]), strict=True
            ):
                parts.append(d_own.reshape(rows, groups, length, -1).transpose(1, 2).reshape(rows * length, -1))
            if reach:
                shared = keys.view(rows * groups, -1)[:, :reach].reshape(-1)
                by_prefix.append((shared, d_keys[:, :reach].reshape(-1, size), d_values[:, :reach].reshape(-1, size)))
        d_query, d_key, d_value = (
            torch.cat(parts).index_select(0, ctx.layout.back).view(shape)
            for parts, shape in zip(by_own, ctx.shapes, strict=True)
        )
        for shared, d_keys, d_values in by_prefix:
            d_key.index_add_(0, shared, d_keys)
            d_value.index_add_(0, shared, d_values)
        return d_query, d_key, d_value, None, None, None


def _gather(
    query: Tensor, key: Tensor, value: Tensor, own: Tensor, keys: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A bucket's queries [batch, A * H / G, D], keys and values [batch, K, D]."""
    size = key.shape[1]
    q = query.index_select(0, own).view(batch, -1, size)
    return q, key.index_select(0, keys).view(batch, -1, size), value.index_select(0, keys).view(batch, -1, size)


def _length(s: Segment) -> int:
    return s.end - s.start


def _halves(s: Segment) -> tuple[Segment, ...]:
    if s.prefix or _length(s) < HALVED:
        return (s,)
    middle = (s.start + s.end) // 2
    return Segment(s.start, middle), Segment(middle, s.end, ((s.start, middle),))


def _runs(order: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield runs of segments that are at least FILL of the first one's length, the longest, and all have a prefix or
    none."""
    run: list[Segment] = []
    for segment in order:
        if run and (_length(segment) < FILL * _length(run[0]) or bool(segment.prefix) != bool(run[0].prefix)):
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _bucket(members: Sequence[Segment], width: int, device: torch.device | str) -> Bucket:
    start, length = _column([s.start for s in members]), _column([_length(s) for s in members])
    prefix = _column([s.reach for s in members])
    steps = torch.arange(width)
    own = start + torch.minimum(steps, length - 1)
    reach = int(prefix.max())
    keys = torch.cat([_behind([s.prefix for s in members], reach), own], 1)
    seen = (torch.arange(reach) < prefix) if int(prefix.min()) < reach else torch.ones(1, reach, dtype=torch.bool)
    padding = (steps >= length).to(device) if int(length.min()) < width else None
    return Bucket(own.to(device), keys.to(device), seen.to(device), padding)


def _behind(prefixes: Sequence[tuple[Span, ...]], reach: int) -> Tensor:
    """The packed tokens of each prefix, filled up to `reach` with some token: int64 [B, reach]."""
    rows: dict[tuple[Span, ...], np.ndarray] = {}
    for prefix in prefixes:
        if prefix not in rows:
            found = indices(prefix)
            rows[prefix] = np.zeros(reach, np.int64)
            rows[prefix][: len(found)] = found
    return torch.from_numpy(np.stack([rows[prefix] for prefix in prefixes]))


def _column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values)[:, None]


def _rows(indices: Tensor, heads: int) -> Tensor:
    """The rows of a [P * heads, ...] tensor for packed indices [B, X]: [B * heads * X]."""
    spread = indices[:, None] * heads + torch.arange(heads, device=indices.device)[:, None]
    return spread.reshape(-1)


Kernel = Callable[[Tensor, Tensor, Tensor, "RowLayout", float], Tensor]
"""(query [P, H, D], key [P, G, D], value [P, G, D], row, scale) -> [P, H, D]"""


@dataclass(frozen=True)
class RowLayout:
    """A `Layout` for kernels that compute a whole row. What a kernel needs is computed when it is first used."""

    segments: tuple[Segment, ...]
    """The segments of the row, in their order."""
    device: torch.device
    """The device of the tensors."""

    @property
    def tokens(self) -> int:
        """Number of packed tokens, P."""
        return max(s.end for s in self.segments)

    @property
    def shared(self) -> bool:
        """Whether any segment has a prefix."""
        return any(s.prefix for s in self.segments)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See the function `attend`."""
        kernel = kernel_for(self.shared, query, key)
        if kernel is None:
            return self.buckets.attend(query, key, value, scale)
        return kernel(query, key, value, self, scale).flatten(1)

    @cached_property
    def buckets(self) -> BucketLayout:
        """The same row in buckets, for tensors that no kernel serves."""
        return bucket_layout(self.segments, self.device)

    @cached_property
    def ends(self) -> tuple[Tensor, int]:
        """The starts of the sequences and the end of the last, int32 [sequences + 1], and the length of the longest."""
        lengths = np.array([s.end - s.start for s in self.segments if s.end > s.start])
        return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(self.device), int(lengths.max())

    @cached_property
    def mask(self) -> BlockMask:
        """The mask of the row padded to whole blocks; the padding is a sequence of its own."""
        return block_mask(self.segments, self.tokens, self.device)


def kernel_for(shared: bool, query: Tensor, key: Tensor) -> Kernel | None:
    """The first kernel that works for such tensors; None: none does. shared: whether a segment has a prefix."""
    kernels: list[Kernel] = [by_flex] if shared or query.dtype == torch.float32 else [by_flash, by_flex]
    about = (str(query.device), query.dtype, query.shape[1], *key.shape[1:])
    return next((kernel for kernel in kernels if kernel_fault(kernel, *about) is None), None)


def by_flex(query: Tensor, key: Tensor, value: Tensor, row: RowLayout, scale: float) -> Tensor:
    """A `Kernel` for all prefix trees, by flex_attention (arXiv:2412.05496)."""
    if query.device.type not in GROUPED and key.shape[1] <= FEW_HEADS:
        key, value = (_for_heads(x, query.shape[1] // x.shape[1]) for x in (key, value))
    more = padded(len(query)) - len(query)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)).transpose(0, 1)[None] for x in (query, key, value))
    same = query.shape[1] == key.shape[1]
    options: dict[str, object] = {"block_mask": row.mask, "scale": scale, "enable_gqa": not same}
    if query.is_cuda:  # the compiler cannot know that the row was padded to whole blocks, and would check every bound
        options["kernel_options"] = {"IS_DIVISIBLE": True}
    mixed = _flex(query.device.type)(q, k, v, **options)
    found = mixed[0].transpose(0, 1)[: len(query)]
    return found


def by_flash(query: Tensor, key: Tensor, value: Tensor, row: RowLayout, scale: float) -> Tensor:
    """A `Kernel` for rows without prefixes, by flash attention (arXiv:2307.08691)."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = row.ends
    more: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            more["enable_gqa"] = True
        else:  # torch before 2.13
            key, value = (_for_heads(x, query.shape[1] // x.shape[1]) for x in (key, value))
    found: Any = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), **more)
    out: Tensor = found
    return out


def _flex(device: str) -> Callable[..., Tensor]:
    """flex_attention, compiled on CUDA. Uncompiled it holds all scores in memory, which is for small tests only.

    Each dtype and shape of heads is compiled separately, with and without gradients. After eight kinds torch would run
    it uncompiled, for which no GPU has the memory; so the limit is raised. It is set in each call because each thread
    has its own, and recomputed layers run in autograd's.
    """
    if device != "cuda":
        return flex_attention
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, KINDS)
    return _compiled()


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def padded(tokens: int) -> int:
    """The number of tokens, rounded up to whole blocks; at least two, since one would be compiled separately."""
    return max(2, -(-tokens // BLOCK)) * BLOCK


def subtree_ends(segments: Sequence[Segment], tokens: int) -> np.ndarray:
    """For each token the end of what continues it, int32 [padded(tokens)]: since the row is depth-first, a query sees
    a key iff key <= query < end[key]. The padding is a sequence of its own."""
    end = np.full(padded(tokens), padded(tokens), np.int32)
    for s in segments:
        for first, last in (*s.prefix, (s.start, s.end)):
            end[first:last] = s.end
    return end


def mask_of(ends: np.ndarray, device: torch.device) -> Callable[..., Tensor]:
    """The mask as flex_attention wants it: whether a query sees a key."""
    end = torch.from_numpy(ends).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return sees


def block_mask(segments: Sequence[Segment], tokens: int, device: torch.device) -> BlockMask:
    """Which blocks hold anything to see, and which nothing else: counted from the segments, without a P x P mask."""
    ends = subtree_ends(segments, tokens)
    pairs = visible(ends)
    whole = pairs == BLOCK * BLOCK
    some = (pairs > 0) & ~whole
    (partly, which), (fully, whole_ones) = (_listed(blocks, device) for blocks in (some, whole))
    return BlockMask.from_kv_blocks(
        partly,
        which,
        fully,
        whole_ones,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_of(ends, device),
        seq_lengths=(padded(tokens), padded(tokens)),
    )


def visible(ends: np.ndarray) -> np.ndarray:
    """How many pairs of a query and a key that it sees each pair of blocks holds: int64 [blocks, blocks]."""
    blocks = len(ends) // BLOCK
    pairs = np.zeros((blocks, blocks), np.int64)
    edges = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ends)]
    for start, stop in pairwise(edges):  # keys that the same queries see, and each other
        first, own = _overlap(start, stop)
        after, behind = _overlap(stop, int(ends[start]))
        here, there = slice(first, first + len(own)), slice(after, after + len(behind))
        pairs[there, here] += np.outer(behind, own)
        pairs[here, here] += np.tril(np.outer(own, own), -1) + np.diag(own * (own + 1) // 2)
    return pairs


def _overlap(start: int, end: int) -> tuple[int, np.ndarray]:
    """The first block that start .. end - 1 overlaps, and the number of these tokens in it and in each block
    after it."""
    if end <= start:
        return 0, np.zeros(0, np.int64)
    edges = np.arange(start // BLOCK, -(-end // BLOCK) + 1) * BLOCK
    return start // BLOCK, np.diff(np.clip(edges, start, end))


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """For a bool matrix of blocks [queries, keys], the number of set entries in each row, and the indices of
    all entries, the set ones first: int32 [1, 1, ...]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(1, dtype=np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def kernel_fault(kernel: Kernel, device: str, dtype: torch.dtype, heads: int, groups: int, size: int) -> str | None:
    """Why `kernel` cannot serve tensors of this kind; None: it can. Each kind is tested once a process."""
    try:
        off = _difference(kernel, torch.device(device), dtype, heads, groups, size)
        fault = None if off <= TOLERANCE[dtype] else f"it is off by {off:.2g}"
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise what they like; the buckets serve then
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    if fault is not None:
        log.warning("attention over packed rows does without %s: %s", kernel.__name__, fault)
        _FAULTS[torch.device(device).type, kernel.__name__] = fault
    return fault


_FAULTS: dict[tuple[str, str], str] = {}
"""(type of device, kernel) -> why the kernel does not serve some tensors there."""


def faults(device: torch.device) -> str:
    """Which kernels do not serve on this type of device, and why, in a line; empty if `by_flex` does, which computes
    every row."""
    if (device.type, by_flex.__name__) not in _FAULTS:
        return ""
    return "; ".join(f"{name} does not run here: {why}" for (kind, name), why in _FAULTS.items() if kind == device.type)


def _difference(kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> float:
    """The largest difference of output and gradients from those of the buckets, as a share of the largest
    value."""
    lone = [Segment(0, 150), Segment(150, 157), Segment(157, 300)]
    root, branch = (0, 140), (150, 230)
    tree = [Segment(*root), Segment(140, 150, (root,)), Segment(*branch, (root,)), Segment(230, 260, (root, branch))]
    forest = [*tree, Segment(260, 290, (root, branch)), Segment(290, 300)]
    row = RowLayout(tuple(lone if kernel is by_flash else forest), device)
    given = torch.Generator(device).manual_seed(0)
    own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # not those of a layer around us
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), own_hooks:
        joined = (300, heads + 2 * groups, size)  # as a layer makes them: views of one tensor
        leaf = torch.randn(joined, generator=given, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(300, heads * size, generator=given, device=device, dtype=dtype)
        parts = [heads, groups, groups]
        query, key, value = leaf.split(parts, 1)
        outputs = (
            kernel(query, key, value, row, size**-0.5).flatten(1),
            row.buckets.attend(query, key, value, size**-0.5),
        )
        found, wanted = ([out.detach(), *torch.autograd.grad(out, leaf, weight)[0].split(parts, 1)] for out in outputs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
