"""Attention over a packed forest on a CUDA device: one kernel over the whole row.

Where trees share a prompt it is flex_attention over the blocks of the forest's mask, where none does flash attention
over sequences of any length (half precision alone). A kernel is used once it has shown, on a small forest and with
gradients, that it agrees with the buckets of attention.py; otherwise those serve, and a line of the log says why.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.compute.packing import Segment
from agentrl.compute.tree_attention import Plan, bucketed

log = logging.getLogger(__name__)

BLOCK = 128
KINDS = 64
"""Of tensors that flex_attention may be compiled for in one process."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the largest value; TF32 is within it

Kernel = Callable[[Tensor, Tensor, Tensor, "Row", float], Tensor]


@dataclass(frozen=True)
class Row:
    """A `Layout`: the segments of a packed row, in their order, and what kernels need to know of them, made when one
    asks for it."""

    segments: tuple[Segment, ...]
    device: torch.device

    @property
    def tokens(self) -> int:
        return max(s.end for s in self.segments)

    @property
    def shared(self) -> bool:
        """Whether any segment has a prefix."""
        return any(s.prefix_end > s.prefix_start for s in self.segments)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [P, H, D], key and value [P, G, D] to [P, H * D]."""
        kernel = kernel_for(self.shared, query, key)
        if kernel is None:
            return self.buckets.attend(query, key, value, scale)
        return kernel(query, key, value, self, scale).flatten(1)

    @cached_property
    def buckets(self) -> Plan:
        return bucketed(self.segments, self.device)

    @cached_property
    def ends(self) -> tuple[Tensor, int]:
        """Where sequences begin and the last ends, int32 [sequences + 1], and how long the longest is."""
        lengths = np.array([s.end - s.start for s in self.segments if s.end > s.start])
        return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(self.device), int(lengths.max())

    @cached_property
    def mask(self) -> BlockMask:
        """For the row padded to whole blocks; the padding is a sequence of its own."""
        return block_mask(self.segments, self.tokens, self.device)


def kernel_for(shared: bool, query: Tensor, key: Tensor) -> Kernel | None:
    """The first that has shown to work for such tensors; None: none has."""
    kernels: list[Kernel] = [by_flex] if shared or query.dtype == torch.float32 else [by_flash, by_flex]
    about = (str(query.device), query.dtype, query.shape[1], *key.shape[1:])
    return next((kernel for kernel in kernels if _fault(kernel, *about) is None), None)


def by_flex(query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float) -> Tensor:
    """query [P, H, D], key and value [P, G, D] to [P, H, D], any forest (arXiv:2412.05496)."""
    more = padded(len(query)) - len(query)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)).transpose(0, 1)[None] for x in (query, key, value))
    same = query.shape[1] == key.shape[1]
    mixed: Any = _flex(query.device.type)(q, k, v, block_mask=row.mask, scale=scale, enable_gqa=not same)
    found: Tensor = mixed[0].transpose(0, 1)[: len(query)]
    return found


def by_flash(query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float) -> Tensor:
    """Likewise, where no segment has a prefix (arXiv:2307.08691)."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = row.ends
    more: dict[str, Any] = {} if query.shape[1] == key.shape[1] else {"enable_gqa": True}
    found: Any = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), **more)
    out: Tensor = found
    return out


@functools.cache
def _flex(device: str) -> Any:
    """Compiled where that pays; as it is, it makes all scores, which serves small tests alone.

    Each type and shape of heads is compiled by itself, with and without gradients, and torch gives up after eight: it
    would go on uncompiled, which no GPU has the memory for. So it may compile more, and must not go on without.
    """
    if device != "cuda":
        return flex_attention
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, KINDS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def padded(tokens: int) -> int:
    """Whole blocks that hold so many tokens. Two at least: a row of one would be compiled by itself."""
    return max(2, -(-tokens // BLOCK)) * BLOCK


def bounds(segments: Sequence[Segment], tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each token, int32 [padded(tokens)]: where its segment begins, and where its prefix begins and ends."""
    start, prefix_start, prefix_end = (np.zeros(padded(tokens), np.int32) for _ in range(3))
    start[tokens:] = tokens
    for s in segments:
        start[s.start : s.end] = s.start
        prefix_start[s.start : s.end], prefix_end[s.start : s.end] = s.prefix_start, s.prefix_end
    return start, prefix_start, prefix_end


def mask_of(segments: Sequence[Segment], tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """The mask as flex_attention wants it: whether a query sees a key."""
    start, prefix_start, prefix_end = (torch.from_numpy(column).to(device) for column in bounds(segments, tokens))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= start[query]) & (key <= query)
        return own | ((key >= prefix_start[query]) & (key < prefix_end[query]))

    return sees


def block_mask(segments: Sequence[Segment], tokens: int, device: torch.device) -> BlockMask:
    """Which blocks hold anything to see, and which nothing else: counted from the segments, without a P x P mask."""
    pairs = visible(segments, tokens)
    whole = pairs == BLOCK * BLOCK
    some = (pairs > 0) & ~whole
    (partly, which), (fully, whole_ones) = (_listed(blocks, device) for blocks in (some, whole))
    return BlockMask.from_kv_blocks(
        partly,
        which,
        fully,
        whole_ones,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_of(segments, tokens, device),
        seq_lengths=(padded(tokens), padded(tokens)),
    )


def visible(segments: Sequence[Segment], tokens: int) -> np.ndarray:
    """How many pairs of a query and a key that it sees each pair of blocks holds: int64 [blocks, blocks]."""
    blocks = padded(tokens) // BLOCK
    pairs = np.zeros((blocks, blocks), np.int64)
    for s in (*segments, Segment(tokens, blocks * BLOCK)):
        first, own = _overlap(s.start, s.end)
        behind, prefix = _overlap(s.prefix_start, s.prefix_end)
        here, there = slice(first, first + len(own)), slice(behind, behind + len(prefix))
        pairs[here, there] += np.outer(own, prefix)
        pairs[here, here] += np.tril(np.outer(own, own), -1) + np.diag(own * (own + 1) // 2)
    return pairs


def _overlap(start: int, end: int) -> tuple[int, np.ndarray]:
    """The first block that start .. end - 1 touches, and how many of these tokens lie in it and in the following."""
    if end <= start:
        return 0, np.zeros(0, np.int64)
    edges = np.arange(start // BLOCK, -(-end // BLOCK) + 1) * BLOCK
    return start // BLOCK, np.diff(np.clip(edges, start, end))


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a bool [queries, keys]: how many are set in a row, and which, these first; int32 [1, 1, ...]."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(1, dtype=np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def _fault(kernel: Kernel, device: str, dtype: torch.dtype, heads: int, groups: int, size: int) -> str | None:
    """Why `kernel` cannot serve tensors of this kind, found out once."""
    try:
        off = _difference(kernel, torch.device(device), dtype, heads, groups, size)
        fault = None if off <= TOLERANCE[dtype] else f"it is off by {off:.2g}"
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise what they like; the buckets serve then
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    if fault is not None:
        log.warning("attention over packed rows runs in buckets, not %s: %s", kernel.__name__, fault)
    return fault


def _difference(kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> float:
    """How far output and gradients are from those of the buckets, in shares of their largest value."""
    lone = [Segment(0, 150), Segment(150, 157), Segment(157, 300)]
    prefix_trees = [Segment(0, 140), Segment(140, 150, 0, 140), Segment(150, 290, 0, 140), Segment(290, 300)]
    row = Row(tuple(lone if kernel is by_flash else prefix_trees), device)
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
