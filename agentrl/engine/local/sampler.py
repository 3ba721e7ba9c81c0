"""Choosing the next token of every row at once, by a number that depends on the row's seed and position alone."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

U64 = np.uint64
_GOLDEN = U64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Choice:
    """How each of N rows samples; every array is [N]."""

    key: npt.NDArray[np.uint64]
    """The hashed seed."""
    position: npt.NDArray[np.int64]
    """The position of the token to be sampled."""
    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_p: npt.NDArray[np.float32]
    """1: off."""
    top_k: npt.NDArray[np.int64]
    """0: off."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every bit of x reaches every bit of the result."""
    x = (x ^ (x >> U64(30))) * _MIX1
    x = (x ^ (x >> U64(27))) * _MIX2
    return x ^ (x >> U64(31))


def key_of(seed: int) -> int:
    """Return 64 mixed bits of a seed of any size."""
    return int(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], U64) + _GOLDEN)[0])


def uniforms(key: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """One number in [0, 1 - 2^-23] a row, a function of (key, position) alone."""
    bits = _mix(key + position.astype(U64) * _GOLDEN)
    return (bits >> U64(41)).astype(np.float32) * np.float32(2.0**-23)


def sample(logits: Tensor, choice: Choice) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """logits [N, vocab] float32 -> (token, log-prob) [N] each.

    The log-prob is of softmax(logits / temperature) before top-k and top-p, and of softmax(logits) where greedy.
    """
    greedy = choice.temperature <= 0
    if (choice.temperature != 1).any():
        scale = np.where(greedy, np.float32(1), 1 / np.where(greedy, np.float32(1), choice.temperature))
        logits = logits * torch.from_numpy(scale.astype(np.float32)).to(logits.device)[:, None]
    p = torch.softmax(logits, -1)
    u = torch.from_numpy(uniforms(choice.key, choice.position)).to(logits.device)[:, None]
    tokens = _inverse_cdf(p, u)[:, 0] if not greedy.all() else logits.argmax(-1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), tokens)
    cut = ~greedy & ((choice.top_p < 1) | (choice.top_k > 0))
    if cut.any():
        rows = torch.from_numpy(np.flatnonzero(cut)).to(logits.device)
        tokens[rows] = _truncated(p[rows], u[rows], choice.top_p[cut], choice.top_k[cut])
    logprobs = p.gather(1, tokens[:, None])[:, 0].log_()
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


def _inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """p [N, V] not negative, u [N, 1] in [0, 1) -> the first index whose cumulated p exceeds u times the total.

    A GPU adds up in parts, in the type that it is given: in float32 their sums round apart, and tokens of probability 0
    would be drawn where two parts meet. A CPU adds in float64 whatever it returns.
    """
    cdf = p.cumsum(-1, dtype=None if p.is_cpu else torch.float64)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=p.shape[-1] - 1)


def _truncated(p: Tensor, u: Tensor, top_p: npt.NDArray[np.float32], top_k: npt.NDArray[np.int64]) -> Tensor:
    """Sample from the top_k likeliest, then from the fewest of those that hold top_p of their mass."""
    k = np.where(top_k > 0, np.minimum(top_k, p.shape[-1]), p.shape[-1])
    ranked, order = torch.topk(p, int(k.max()), dim=-1)
    outside = torch.arange(ranked.shape[-1], device=p.device) >= torch.from_numpy(k).to(p.device)[:, None]
    ranked = ranked.masked_fill(outside, 0)
    before = ranked.cumsum(-1) - ranked
    limit = torch.from_numpy(top_p).to(p.device)[:, None] * ranked.sum(-1, keepdim=True)
    beyond = before >= limit
    beyond[:, 0] = False
    return order.gather(1, _inverse_cdf(ranked.masked_fill(beyond, 0), u))[:, 0]
