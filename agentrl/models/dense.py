"""`Dense`: y = x W^T + b by the fastest matrix product of this machine, with or without gradients.

The choice depends on the machine only, not on measured times, so that two runs of one recipe round alike.
"""

import functools
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.models.autograd import Context

ZEN_5 = 26
"""The processor family, as /proc/cpuinfo has it."""


@functools.cache
def prefers_onednn() -> bool:
    """Whether float32 products should use oneDNN: of AMD's processors that compute 512 bits at once (Zen 5 on), MKL
    uses half the width.

    On others MKL is as fast for many rows and up to ten times as fast for few (Zen 4 takes two steps for 512 bits), and
    oneDNN keeps up to a megabyte for each shape that it met: hundreds of megabytes in a run, whose packed rows all
    differ in length.
    """
    backends: Any = torch.backends
    if not (backends.mkl.is_available() and backends.mkldnn.is_available()):
        return False
    text = cpu_name()
    family = re.search(r"cpu family\s*:\s*(\d+)", text)
    wide = family is not None and int(family[1]) >= ZEN_5
    return "AuthenticAMD" in text and wide and "AVX512" in backends.cpu.get_cpu_capability()


def packs(weight: Tensor) -> bool:
    """Whether products of few rows with `weight` gain from `PackedDense`: in bfloat16 on a CPU that computes in it
    (AMX, AVX-512), in float32 on AMD's processors, where MKL takes up to four times as long for 1 to 16 rows."""
    backends: Any = torch.backends
    if weight.device.type != "cpu" or not backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return "AuthenticAMD" in cpu_name()
    return weight.dtype == torch.bfloat16 and cpu_has_bfloat16()


def cpu_has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 (AMX, AVX-512); on others, torch's products take up to ten times as long
    in it as in float32."""
    backends: Any = torch.backends
    return bool(backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_name() -> str:
    """The first processor as /proc/cpuinfo has it; elsewhere its name, or nothing."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")[:4096]
    except OSError:  # not Linux
        return platform.processor()


class _OneDnnLinear(torch.autograd.Function):
    """x [N, in], w [out, in] -> [N, out], both passes through oneDNN."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _onednn(x, w, None)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        g = grads[0].contiguous()
        gx = _onednn(g, w.t().contiguous(), None) if ctx.needs_input_grad[0] else None
        gw = _onednn(g.t().contiguous(), x.t().contiguous(), None) if ctx.needs_input_grad[1] else None
        return gx, gw


def _onednn(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X W^T + b [N, out] of x [N, in] and weight [out, in]; differentiable."""
    if not (x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and prefers_onednn()):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _onednn(x.contiguous(), weight, bias)
    apply: Any = _OneDnnLinear.apply
    y: Tensor = apply(x.contiguous(), weight)
    return y if bias is None else y + bias


class Dense:
    """Several linear maps of one input as one, with outputs concatenated.

    weights: [out_i, in] each. biases: [out_i] each, or all None. copy: concatenate the weights (as [in, out] for MKL,
    which is up to twice as fast for few rows), with gradients to the originals. Without copy, weights are held by
    reference and applied one by one.
    """

    __slots__ = ("bias", "transposed", "weights")

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (), copy: bool = True) -> None:
        given = [b for b in biases if b is not None]
        self.bias = torch.cat(given) if given else None
        self.transposed = copy and not (weights[0].dtype == torch.float32 and prefers_onednn())
        joined = [torch.cat(list(weights)) if len(weights) > 1 else weights[0]] if copy else list(weights)
        self.weights = [w.t().contiguous() for w in joined] if self.transposed else joined

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs [N, sum of out_i] of x [N, in]."""
        if self.transposed:
            w = self.weights[0]
            return torch.mm(x, w) if self.bias is None else torch.addmm(self.bias, x, w)
        if len(self.weights) == 1:
            return linear(x, self.weights[0], self.bias)
        y = torch.cat([linear(x, w) for w in self.weights], -1)
        return y if self.bias is None else y + self.bias

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual [N, out] + self(x)."""
        if self.transposed and self.bias is None:
            return torch.addmm(residual, x, self.weights[0])
        return residual + self(x)

    def gated(self, x: Tensor, swiglu: Callable[[Tensor], Tensor]) -> Tensor:
        """swiglu(self(x)): silu of the first half of the outputs times the second."""
        return swiglu(self(x))

    def halves(self) -> tuple[Tensor, Tensor]:
        """The weight of the first and of the second half of the outputs, as views."""
        first, second = self.weights[0].chunk(2, 1 if self.transposed else 0)
        return first, second

    def bias_halves(self) -> tuple[Tensor | None, Tensor | None]:
        """The bias of the first and of the second half of the outputs, as views; None without a bias."""
        if self.bias is None:
            return None, None
        first, second = self.bias.chunk(2)
        return first, second


PACKED_ROWS = 64
"""Rows for which oneDNN chooses the layout; it serves 1 to 512 as well, while that for 1 row is slow for many."""


class PackedDense(Dense):
    """`Dense` for inference: weights copied into the tiles that oneDNN computes with.

    From the weights of a module, oneDNN arranges these tiles anew in every product, which for the few rows of a
    decoding step takes about as long as the product itself. What is done to a result (adding the residual, silu,
    multiplying by the other half) is done before it is rounded.
    """

    __slots__ = ()

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> None:
        given = [b.detach() for b in biases if b is not None]
        self.bias = torch.cat(given) if given else None
        self.transposed, self.weights = False, [_packed(torch.cat(list(weights)) if len(weights) > 1 else weights[0])]

    def __call__(self, x: Tensor) -> Tensor:
        return _onednn(x, self.weights[0], self.bias)

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        return _onednn_with("add", residual, x, self.weights[0], self.bias)


class PackedGate(PackedDense):
    """Gate and up of an MLP, packed apart, so that `gated` leaves nothing to be done after two products."""

    __slots__ = ("biases",)

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.bias, self.biases = None, [None if b is None else b.detach() for b in biases]
        self.transposed, self.weights = False, [_packed(w) for w in weights]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([_onednn(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)], -1)

    def gated(self, x: Tensor, swiglu: Callable[[Tensor], Tensor]) -> Tensor:
        gate = torch.ops.mkldnn._linear_pointwise(x, self.weights[0], self.biases[0], "swish", [], "")
        return _onednn_with("mul", gate, x, self.weights[1], self.biases[1])


def _packed(weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_ROWS)
    return out


def _onednn_with(what: str, other: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`other` plus (what: add) or times (mul) the product."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, w, bias, what)
    return out
