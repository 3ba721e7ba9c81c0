"""`fused_step`: one step of a small float32 model, compiled once by TorchScript to run without the interpreter.

It repeats the computation of `block.hidden`, which it cannot call: TorchScript supports neither closures nor classes
such as `Dense`. A step has about two hundred operations of a few microseconds each; called from Python, it takes a
third longer with 64 rows, and twice as long with the few rows at the end of a rollout. TorchScript is deprecated: if it
cannot compile the function, the same function runs as Python.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.engine.local.attention import Bucket, attend
from agentrl.models import block

if torch.backends.mkldnn.is_available():

    def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
else:

    def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class Fused(NamedTuple):
    """`block.Weights` as plain lists with one entry per layer, as TorchScript needs them."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Size D of a head."""
    transposed: bool
    """Whether matrices are stored as [in, out], for `mm`; else [out, in]."""
    eps: Tensor
    """float32 [1]: the epsilon of RMSNorm."""
    embed: Tensor
    """float32 [vocab, hidden]: the token embeddings."""
    head: Tensor
    """The output matrix, from hidden to vocab."""
    qkv: list[Tensor]
    """From hidden to (heads + 2 * kv_heads) * D: query, key and value."""
    out: list[Tensor]
    """The output matrix of attention, from heads * D to hidden."""
    gate: list[Tensor]
    """The gate matrix of the MLP."""
    up: list[Tensor]
    """The up matrix of the MLP."""
    down: list[Tensor]
    """The down matrix of the MLP."""
    qk_gain: list[Tensor]
    """The gains of the RMSNorm of queries and keys; empty if the model has none."""
    bias: list[list[Tensor | None]]
    """The biases of qkv, out, gate, up and down, each [out] or None."""


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return _linear(x, weight, bias)
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> None:
    if transposed and bias is None:
        residual.addmm_(x, weight)
    else:
        residual.add_(_product(x, weight, bias, transposed))


def _inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    norm = torch.norm(x, 2, [-1], True)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _step(
    w: Fused, keys: list[Tensor], values: list[Tensor], ids: Tensor, rotation: Tensor, target: Tensor, n: int,
    width: int, bias: Tensor | None, buckets: list[Bucket], pick: Tensor | None,
) -> Tensor:  # fmt: skip
    """The logits of all tokens, [N, vocab], or of the tokens at indices `pick`.

    ids: [N], n rows and then the chunks. rotation: complex [N, 1, D / 2]. target: [N * kv_heads], indices of their keys
    and values in the flattened cache. The other arguments: see `attention.attend`.
    """
    both = w.heads + w.kv_heads
    x = F.embedding(ids, w.embed)
    for i in range(len(w.qkv)):
        b = w.bias[i]
        y = _product(x * _inverse_rms(x, w.eps), w.qkv[i], b[0], w.transposed).view(-1, both + w.kv_heads, w.head_dim)
        qk = y[:, :both]
        if len(w.qk_gain) > 0:
            qk.mul_(_inverse_rms(qk, w.eps)).mul_(w.qk_gain[i])
        pairs = torch.view_as_complex(qk.unflatten(-1, [w.head_dim // 2, 2]))
        qk = torch.view_as_real(pairs * rotation).flatten(-2)
        keys[i].view(-1, w.head_dim).index_copy_(0, target, qk[:, w.heads :].reshape(-1, w.head_dim))
        values[i].view(-1, w.head_dim).index_copy_(0, target, y[:, both:].reshape(-1, w.head_dim))
        o = attend(qk[:, : w.heads], keys[i], values[i], n, width, bias, buckets)
        _add_product(x, o, w.out[i], b[1], w.transposed)
        h = x * _inverse_rms(x, w.eps)
        gate = _product(h, w.gate[i], b[2], w.transposed)
        up = _product(h, w.up[i], b[3], w.transposed)
        _add_product(x, F.silu(gate, True).mul_(up), w.down[i], b[4], w.transposed)
    if pick is not None:
        x = x.index_select(0, pick)
    return _product(x * _inverse_rms(x, w.eps), w.head, None, w.transposed)


_compiled: Callable[..., Tensor] | None = None


def fused_step() -> Callable[..., Tensor]:
    """`_step`, compiled if TorchScript can compile it (0.5 s, once per process)."""
    global _compiled
    if _compiled is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _compiled = torch.jit.script(_step)
            except (RuntimeError, TypeError, NotImplementedError, AttributeError):
                _compiled = _step
    return _compiled


def fuse(weights: block.Weights) -> Fused:
    """`weights` (copied and interleaved) as the lists that `_step` reads, which share their memory."""
    s, layers = weights.shape, weights.layers
    halves = [layer.gate_up.halves() for layer in layers]
    biases: list[Any] = [
        [layer.qkv.bias, layer.out.bias, *layer.gate_up.bias_halves(), layer.down.bias] for layer in layers
    ]
    return Fused(
        s.heads, s.kv_heads, s.head_dim, weights.head.transposed,
        torch.full((1,), s.eps), weights.embed.detach(), weights.head.weights[0],
        [layer.qkv.weights[0] for layer in layers], [layer.out.weights[0] for layer in layers],
        [gate for gate, _ in halves], [up for _, up in halves], [layer.down.weights[0] for layer in layers],
        [layer.qk_gain for layer in layers if layer.qk_gain is not None], biases,
    )  # fmt: skip
