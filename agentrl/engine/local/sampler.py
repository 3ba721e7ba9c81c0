"""Sampling of the next token of all rows at once, by random numbers that depend only on a row's seed and position."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.engine.local.native import native

U64 = np.uint64
_GOLDEN = U64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Choice:
    """The sampling parameters of N rows; every array is [N]."""

    key: npt.NDArray[np.uint64]
    """The hashed seed."""
    position: npt.NDArray[np.int64]
    """The position of the token to sample."""
    temperature: npt.NDArray[np.float32]
    """0: always the likeliest token."""
    top_p: npt.NDArray[np.float32]
    """Share of probability to sample from; 1: all."""
    top_k: npt.NDArray[np.int64]
    """Number of likeliest tokens to sample from; 0: all."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014): every bit of x affects every bit of the result."""
    x = (x ^ (x >> U64(30))) * _MIX1
    x = (x ^ (x >> U64(27))) * _MIX2
    return x ^ (x >> U64(31))


def key_of(seed: int) -> int:
    """A 64-bit hash of a seed's lowest 64 bits."""
    return int(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], U64) + _GOLDEN)[0])


def uniforms(key: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """One number in [0, 1 - 2^-23] per row, float32 [N], a function of (key, position) only."""
    bits = _mix(key + position.astype(U64) * _GOLDEN)
    return (bits >> U64(41)).astype(np.float32) * np.float32(2.0**-23)


def sample(logits: Tensor, choice: Choice) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sample one token per row; return the tokens, int64 [N], and their natural log-probs, float32 [N].

    logits: float32 [N, vocab]. The log-prob is that under softmax(logits / temperature), before top-k and top-p, and
    under softmax(logits) at temperature 0.
    """
    compiled = native() if logits.is_cpu and logits.dtype == torch.float32 else None
    pick = _by_torch if compiled is None else compiled.sample
    tokens, logprobs = pick(logits, choice.temperature, choice.key, choice.position)
    cut = (choice.top_p < 1) | (choice.top_k > 0)
    if cut.any() and len(rows := np.flatnonzero(cut & (choice.temperature > 0))):
        index = torch.from_numpy(rows).to(logits.device)
        inverse = torch.from_numpy(1 / choice.temperature[rows]).to(logits.device)
        log_p = (logits[index] * inverse[:, None]).log_softmax(-1)
        u = torch.from_numpy(uniforms(choice.key[rows], choice.position[rows])).to(logits.device)
        chosen = _truncated(log_p.exp(), u[:, None], choice.top_p[rows], choice.top_k[rows])
        tokens[rows] = chosen.cpu().numpy()
        logprobs[rows] = log_p.gather(1, chosen[:, None])[:, 0].cpu().numpy()
    return tokens, logprobs


def _by_torch(
    logits: Tensor,
    temperature: npt.NDArray[np.float32],
    key: npt.NDArray[np.uint64],
    position: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """What `Native.sample` does, on any device."""
    greedy = torch.from_numpy(temperature <= 0).to(logits.device)
    scale = torch.from_numpy(1 / np.where(temperature > 0, temperature, np.float32(1))).to(logits.device)
    u = torch.from_numpy(uniforms(key, position)).to(logits.device)
    p = torch.softmax(logits * scale[:, None], -1)
    tokens = torch.where(greedy, logits.argmax(-1), _inverse_cdf(p, u[:, None])[:, 0])
    return tokens.cpu().numpy(), p.gather(1, tokens[:, None])[:, 0].log_().cpu().numpy()


def constrained(logits: Tensor, allowed: Mapping[int, npt.NDArray[np.uint8] | None]) -> Tensor:
    """Logits [N, vocab] that are -inf at what some rows do not allow. allowed: by rows, a bit for each token; None: all
    of them."""
    held = {row: bits for row, bits in allowed.items() if bits is not None}
    if not held:
        return logits
    bits = np.stack([np.unpackbits(one, bitorder="little")[: logits.shape[-1]] for one in held.values()])
    rows = torch.tensor(list(held), device=logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(forbidden, -torch.inf))


def _inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative p exceeds u times the total, [N, 1].

    p: [N, V], not negative. u: [N, 1], in [0, 1). A GPU computes the cumulative sum in blocks, in the given type: in
    float32, rounding at the boundary of two blocks could select a token of probability 0, so float64 is used. A CPU
    accumulates in float64 whatever the type of the result.
    """
    cdf = p.cumsum(-1, dtype=None if p.is_cpu else torch.float64)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=p.shape[-1] - 1)


def _truncated(p: Tensor, u: Tensor, top_p: npt.NDArray[np.float32], top_k: npt.NDArray[np.int64]) -> Tensor:
    """Sample from the top_k likeliest tokens, limited to the fewest of them that hold top_p of their probability."""
    k = np.where(top_k > 0, np.minimum(top_k, p.shape[-1]), p.shape[-1])
    ranked, order = torch.topk(p, int(k.max()), dim=-1)
    outside = torch.arange(ranked.shape[-1], device=p.device) >= torch.from_numpy(k).to(p.device)[:, None]
    ranked = ranked.masked_fill(outside, 0)
    before = ranked.cumsum(-1) - ranked
    limit = torch.from_numpy(top_p).to(p.device)[:, None] * ranked.sum(-1, keepdim=True)
    beyond = before >= limit
    beyond[:, 0] = False
    return order.gather(1, _inverse_cdf(ranked.masked_fill(beyond, 0), u))[:, 0]
