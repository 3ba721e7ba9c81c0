"""The decoder of Qwen2, Qwen3, Llama and Mistral models on flat tokens, for the engine and the packed training step.

Invariant: `hidden(weights_of(model), ...)` equals the module's own forward up to rounding, with gradients to the
module's parameters. The caller provides the attention, since it knows which tokens attend to which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.models.dense import Dense
from agentrl.models.lora import is_adapted, weight_of
from agentrl.models.panels import PanelDense, layout_of

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, heads, D], k [N, kv_heads, D], v [N, kv_heads, D]) -> [N, heads * D]; scores times D ** -0.5."""

Make = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Dense]
"""(weights, biases) -> one map of them."""

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of FAMILIES."""

    layers: int
    """Number of blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Width of a head."""
    eps: float
    """Epsilon of every RMS norm."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block. The gain of a norm may be folded into the product after it."""

    qkv: Dense
    """Projection of q, k and v: hidden -> (heads + 2 kv_heads) x head_dim."""
    out: Dense
    """Output projection of the attention: heads x head_dim -> hidden."""
    gate_up: Dense
    """Projection of gate and up: hidden -> 2 F."""
    down: Dense
    """Output projection of the MLP: F -> hidden."""
    attention_gain: Tensor | None
    """Gain [hidden] of the norm before the attention; None: it is folded into `qkv`."""
    mlp_gain: Tensor | None
    """Gain [hidden] of the norm before the MLP; None: it is folded into `gate_up`."""
    qk_gain: Tensor | None
    """Gains [heads + kv_heads, head_dim] of the norms of q and k; None: the family has none."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model."""

    shape: Shape
    """Sizes of the model."""
    embed: Tensor
    """Embeddings [vocabulary, hidden]."""
    layers: tuple[Layer, ...]
    """The blocks, in order."""
    final_gain: Tensor | None
    """Gain [hidden] of the final norm; None: it is folded into `head`."""
    head: Dense
    """Output layer: hidden -> vocabulary."""
    dtype: torch.dtype
    """The type of what is computed between the matrices."""
    interleaved: bool
    """Whether the two halves that RoPE rotates alternate in q and k, so that a rotation is one complex product."""


def unsupported(model: Any) -> str | None:
    """Why this decoder cannot compute `model`, in a few words; None: it can."""
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        return f"architecture {family!r} is none of {', '.join(FAMILIES)}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"hidden_act is {config.hidden_act!r}, not silu"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (family == "mistral" and getattr(config, "sliding_window", None)):
        return "some layers attend in a sliding window"
    if getattr(config, "rope_parameters", {}).get("rope_type", "default") in ("dynamic", "longrope"):
        return "its RoPE frequencies depend on the length"
    linears = [m for name, m in model.named_modules() if name.endswith("_proj") or name == "lm_head"]
    plain = (type(getattr(m, "base_layer", m) if is_adapted(m) else m).forward is nn.Linear.forward for m in linears)
    if not all(plain):
        return "a projection is not a plain nn.Linear (quantized, or a foreign adapter)"
    if any(map(is_adapted, linears)) and model.model.embed_tokens.weight.dtype != torch.float32:
        return "in half precision a merged adapter is rounded"
    return None


def shape_of(model: Any) -> Shape:
    """The sizes of a transformers model of FAMILIES."""
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.rms_norm_eps,
    )


def weights_of(model: Any, copy: bool = True, interleave: bool = False, pack: bool = False) -> Weights:
    """The weights of `model` in the form that `hidden` reads.

    copy: concatenate q|k|v and gate|up, fold the norms' gains, lay the matrices out for speed. Costs one copy of the
    model and pays for small ones; under autograd the copies carry gradients back to the parameters, so build them anew
    for every update. Without copy everything is by reference. interleave: see `Weights` (needs copy). pack: matrices as
    `layout_of` says, without gradients; the gains stay apart, since folding them would round once more.
    """
    if (interleave and not copy) or (pack and copy):
        raise ValueError("interleave needs copy, and pack copies by itself")
    shape, inner = shape_of(model), model.model
    head, gain = model.lm_head.weight, inner.norm.weight
    plain: Make = partial(Dense, copy=copy)
    one, pair = (layout_of(head) if pack else None) or (plain, plain)
    layers = tuple(_layer(block, shape, copy, interleave, one, pair) for block in inner.layers)
    if copy:
        head, gain = head * gain, None
    embed = inner.embed_tokens.weight
    dtype = torch.float32 if one is PanelDense else embed.dtype
    return Weights(shape, embed, layers, gain, one([head], ()), dtype, interleave)


def _layer(block: Any, s: Shape, copy: bool, interleave: bool, dense: Make, gate: Make) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_proj, mlp.up_proj]
    gains = [block.input_layernorm.weight, block.post_attention_layernorm.weight]
    qkv_weights, qkv_biases = [weight_of(m) for m in qkv], [m.bias for m in qkv]
    gate_up_weights = [weight_of(m) for m in gate_up]
    if copy:
        qkv_weights = [w * gains[0] for w in qkv_weights]
        gate_up_weights = [w * gains[1] for w in gate_up_weights]
    if interleave:
        qkv_weights[:2] = [_interleave(w, s.head_dim) for w in qkv_weights[:2]]
        qkv_biases[:2] = [b if b is None else _interleave(b, s.head_dim) for b in qkv_biases[:2]]
    return Layer(
        dense(qkv_weights, qkv_biases),
        dense([weight_of(attention.o_proj)], [attention.o_proj.bias]),
        gate(gate_up_weights, [m.bias for m in gate_up]),
        dense([weight_of(mlp.down_proj)], [mlp.down_proj.bias]),
        None if copy else gains[0],
        None if copy else gains[1],
        _qk_gain(attention, s, interleave),
    )


def _qk_gain(attention: Any, s: Shape, interleave: bool) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    gains = [attention.q_norm.weight, attention.k_norm.weight]
    if interleave:
        gains = [_interleave(g, s.head_dim) for g in gains]
    return torch.cat([gains[0].expand(s.heads, -1), gains[1].expand(s.kv_heads, -1)])


def _interleave(w: Tensor, head_dim: int) -> Tensor:
    """The rows of each head in the order (0, D/2, 1, D/2 + 1, ...)."""
    heads = w.view(-1, 2, head_dim // 2, *w.shape[1:])
    return heads.transpose(1, 2).reshape(w.shape)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """X / rms(x) over the last dimension, computed in float32, times gain ([D], or one [H, D] by heads)."""
    if torch.is_grad_enabled() or x.dtype != torch.float32:
        y = F.rms_norm(x, (x.shape[-1],), None if gain is None or gain.dim() > 1 else gain, eps)
        return y if gain is None or gain.dim() == 1 else y * gain
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass; F.rms_norm makes four on a CPU
    y = x * norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return y if gain is None else y.mul_(gain)


class Rope:
    """Rotary position embeddings (arXiv:2104.09864) of a model, by the frequencies of its own module, so that every
    static scaling is exact. factor: multiplies the rotations."""

    def __init__(self, model: Any, factor: float = 1.0) -> None:
        rotary: Any = model.model.rotary_emb
        self._frequencies = rotary.inv_freq.detach().float()
        self._scaling = factor * float(getattr(rotary, "attention_scaling", 1.0))
        self._table = torch.empty(0, len(self._frequencies), dtype=torch.complex64)

    def __call__(self, positions: Tensor) -> Tensor:
        """The rotations of positions [N]: e^(i position frequency), times the attention scaling and `factor`,
        complex64 [N, 1, D / 2]."""
        angles = torch.outer(positions.float(), self._frequencies.to(positions.device))
        return torch.polar(torch.full_like(angles, self._scaling), angles)[:, None]

    def table(self, positions: int) -> Tensor:
        """The rotations of at least the first `positions` positions, complex64 [n, D / 2]; kept, grown by
        doubling."""
        if len(self._table) < positions:
            grown = max(positions, 2 * len(self._table), 256)
            self._table = self(torch.arange(grown, device=self._frequencies.device))[:, 0]
        return self._table


def rotate(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [N, heads, D] by `rotation`, complex64 [N, 1, D / 2]; return float32."""
    if interleaved:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2)
    cos, sin = rotation.real, rotation.imag
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [N, F] of gate_up [N, 2 F] (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions of `hidden` that the caller may replace: the training forward has its own gradients."""

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor] = rms_norm
    """(x [..., D], gain [D] or [H, D] or None, eps) -> [..., D]"""

    swiglu: Callable[[Tensor], Tensor] = swiglu
    """gate_up [N, 2 F] -> silu(gate) * up [N, F]"""


def hidden(
    weights: Weights, ids: Tensor, rotation: Tensor, attend: Attend,
    kernels: Kernels = Kernels(), predict: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The hidden states [N, hidden] after the final norm of the tokens `ids` [N] (int64).

    rotation: `Rope` of the positions, complex64 [N, 1, D / 2]. predict: indices [M] of the tokens whose states are
    returned (None: all); the others are not computed beyond the last attention. Logits are `weights.head` of the
    states; the final gain is folded into it if the weights are copied.
    """
    s, rms_norm, swiglu = weights.shape, kernels.rms_norm, kernels.swiglu
    x = F.embedding(ids, weights.embed).to(weights.dtype)
    for i, layer in enumerate(weights.layers):
        y = layer.qkv(rms_norm(x, layer.attention_gain, s.eps)).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        qk, v = y[:, : s.heads + s.kv_heads], y[:, s.heads + s.kv_heads :]
        if layer.qk_gain is not None:
            qk = rms_norm(qk, layer.qk_gain, s.eps)
        qk = rotate(qk, rotation, weights.interleaved).to(x.dtype)
        attended = attend(i, qk[:, : s.heads], qk[:, s.heads :], v)
        if predict is not None and i == s.layers - 1:
            x, attended = x.index_select(0, predict), attended.index_select(0, predict)
        x = layer.out.plus(x, attended)
        x = layer.down.plus(x, layer.gate_up.gated(rms_norm(x, layer.mlp_gain, s.eps), swiglu))
    return rms_norm(x, weights.final_gain, s.eps)
