"""`PanelDense`: matrices of a large model in the panels of `panels.c`, in float32 or in bfloat16."""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.models.compiled import compiled, in_panels, padded_to
from agentrl.models.dense import Dense, PackedDense, PackedGate, packs

SOURCE = Path(__file__).with_name("panels.c")


class Panels:
    """The functions of a compiled panels.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._product = library.panel_product
        self._product.argtypes = [c_int64] * 4 + [c_int] + [c_void_p] * 4 + [c_int]
        self._product.restype = None
        self._columns = int(library.panel_columns())

    def lay_out(self, matrix: Tensor) -> Tensor:
        """A copy of matrix [outputs, inputs], float32 or bfloat16, in panels; in bfloat16 columns of their two halves
        alternate."""
        panels = in_panels(matrix, self._columns)
        if matrix.dtype == torch.bfloat16:
            panels = panels.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous().flatten(-2)
        return panels

    def pad(self, bias: Tensor) -> Tensor:
        """The bias [outputs] of such a matrix, as float32."""
        return padded_to(bias.float(), self._columns)

    def product(self, x: Tensor, panels: Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
        """y [N, outputs] = x [N, inputs] times a matrix that was laid out, plus its bias; add: plus what y was.
        x and y are float32 and contiguous."""
        assert x.dtype == y.dtype == torch.float32
        self._product(
            torch.get_num_threads(), *x.shape, y.shape[1], panels.dtype == torch.bfloat16, x.data_ptr(),
            panels.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), add,
        )  # fmt: skip


@functools.cache
def native_panels() -> Panels | None:
    """The functions; None: they cannot be made. See `compiled`."""
    library = compiled(SOURCE, "large models are sampled more slowly, in bfloat16 several times")
    return None if library is None else Panels(library)


class PanelDense(Dense):
    """`Dense` for inference on a CPU: float32 inputs and outputs, weights copied into panels, in their own type.

    A bfloat16 weight becomes a float32 as it is read, which costs a processor without bfloat16 little: torch takes ten
    times as long there. As each product of few rows reads all weights, half the bytes take half the time.
    """

    __slots__ = ("_panels", "outputs")

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> None:
        panels = native_panels()
        assert panels is not None
        self._panels, self.transposed = panels, False
        self.outputs = sum(len(w) for w in weights)
        self.weights = [panels.lay_out(torch.cat(list(weights)) if len(weights) > 1 else weights[0])]
        given = [b for b in biases if b is not None]
        self.bias = panels.pad(torch.cat(given)) if given else None

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self.outputs)
        self._panels.product(x.contiguous(), self.weights[0], self.bias, y, add=False)
        return y

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        y = residual.clone(memory_format=torch.contiguous_format)
        self._panels.product(x.contiguous(), self.weights[0], self.bias, y, add=True)
        return y


def layout_of(weight: Tensor) -> tuple[type[Dense], type[Dense]] | None:
    """How a matrix like `weight`, and gate and up as one, are laid out for products of few rows; None: those gain
    nothing. By the type of the processor alone: in panels where it has no bfloat16, and in float32 on AMD's without
    AVX-512, where MKL takes up to four times as long for few rows, and oneDNN up to twice."""
    if weight.device.type != "cpu":
        return None
    backends: Any = torch.backends
    packed, narrow = packs(weight), backends.cpu.get_cpu_capability() == "AVX2"
    gains = not packed if weight.dtype == torch.bfloat16 else packed and narrow
    if gains and native_panels() is not None:
        return PanelDense, PanelDense
    return (PackedDense, PackedGate) if packed else None
