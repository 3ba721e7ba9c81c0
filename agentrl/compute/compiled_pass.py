"""`CompiledPass`: both passes of a small float32 model over a packed row, in one compiled function each.

As operations of torch they take half as long again: between two products each reads and writes all tokens, and the
threads of one wait for another.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.compute.packing import Packed
from agentrl.errors import UserError
from agentrl.models import block
from agentrl.models.autograd import Context
from agentrl.models.block import Rope, Weights
from agentrl.models.compiled import compiled, in_panels, padded_to
from agentrl.models.dense import Dense

SOURCE = Path(__file__).with_name("packed_row.c")
MULTIPLE = 8
"""What the sizes of a head and of the MLP must be a multiple of."""
HEADS_TOGETHER = 48
"""Maximum number of query heads of a key head."""
LEAST = 128
"""Minimum tokens of a thread."""
MATRICES = ("qkv", "out", "gate_up", "down")


class Model(ctypes.Structure):
    """`Model` of packed_row.c."""

    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "size", "inner")),
        ("eps", c_float), ("scale", c_float), *((name, c_void_p) for name in MATRICES),
        *((f"{name}_t", c_void_p) for name in MATRICES), ("qk_gain", c_void_p), ("qkv_bias", c_void_p),
    ]  # fmt: skip


class Row(ctypes.Structure):
    """`Row` of packed_row.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "predictions", "segments", "longest", "threads")),
        *((name, c_void_p) for name in ("predict", "start", "end", "spans", "span_start", "span_end")),
        *((name, c_void_p) for name in ("token_part", "predict_part", "cosines", "sines")),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of packed_row.c; None: they cannot be made. See `compiled`."""
    found = compiled(SOURCE, "small models are trained at two thirds of the speed")
    if found is not None:
        found.gradient_floats.argtypes, found.gradient_floats.restype = [POINTER(Model)], c_int64
        found.memory_floats.argtypes, found.memory_floats.restype = [POINTER(Model), POINTER(Row), c_int], c_int64
        found.pass_forward.argtypes = [POINTER(Model), POINTER(Row), c_void_p, c_int, c_void_p, c_void_p]
        found.pass_backward.argtypes = [POINTER(Model), POINTER(Row), *[c_void_p] * 4]
    return found


class CompiledPass:
    """The passes of one model; see `fits`."""

    def __init__(self, found: ctypes.CDLL, model: Any, rope: Rope) -> None:
        self.library, self.inner, self._rope = found, int(model.config.intermediate_size), rope
        self.columns = int(found.panel_columns())
        self._memory: list[Tensor] = []

    @classmethod
    def of(cls, model: Any, rope: Rope) -> "CompiledPass | None":
        """The passes of a model that `block` computes; None: torch computes it."""
        return cls(found, model, rope) if fits(model) and (found := library()) is not None else None

    def states(self, weights: Weights, packed: Packed) -> Tensor:
        """The hidden states [N, D] of the predicting tokens after the final norm, whose gain is folded into the output
        layer. weights: copied, not interleaved."""
        x = F.embedding(torch.from_numpy(packed.ids), weights.embed)
        given: list[Tensor | None] = []
        for layer in weights.layers:
            given += [_matrix(dense) for dense in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            given += [layer.qk_gain, layer.qkv.bias]
        keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *given))
        apply: Any = _Pass.apply
        found: Tensor = apply(self, weights.shape, _RowOf(packed, weights.shape, self._rope), keep, x, *given)
        return found

    def take(self, floats: int) -> Tensor:
        """Memory of at least `floats`, what was given back before if it is large enough: new memory is cleared by the
        system page by page, which takes as long as some layers."""
        fitting = [index for index, memory in enumerate(self._memory) if len(memory) >= floats]
        if fitting:
            return self._memory.pop(fitting[0])
        self._memory.clear()
        return torch.empty(floats)

    def give_back(self, memory: Tensor) -> None:
        """Keep memory for the next pass."""
        self._memory.append(memory)


def fits(model: Any) -> bool:
    """Whether packed_row.c computes a model of `block`: float32 on a CPU, biases at queries, keys and values alone."""
    s, first = block.shape_of(model), model.model.layers[0]
    linears = (first.self_attn.o_proj, first.mlp.gate_proj, first.mlp.up_proj, first.mlp.down_proj)
    weight = model.lm_head.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and s.head_dim % MULTIPLE == model.config.intermediate_size % MULTIPLE == 0
        and s.heads // s.kv_heads <= HEADS_TOGETHER
        and all(linear.bias is None for linear in linears)
    )


class _RowOf:
    """A packed row as packed_row.c reads it."""

    def __init__(self, packed: Packed, s: block.Shape, rope: Rope) -> None:
        segments, tokens = packed.segments, len(packed.ids)
        start, end = (np.array(of, np.int64) for of in zip(*((x.start, x.end) for x in segments), strict=True))
        spans = np.array([span for x in segments for span in x.prefix], np.int64).reshape(-1, 2)
        reach = np.array([x.reach for x in segments], np.int64)
        keys = np.arange(tokens) + np.repeat(reach - start, end - start) + 1
        threads = max(1, min(torch.get_num_threads(), tokens // LEAST))
        dense = s.hidden * (s.heads + s.kv_heads) * s.head_dim  # of a token, beside its attention
        cost = np.concatenate([[0], np.cumsum(dense + 2 * s.heads * s.head_dim * keys)])
        token_part = np.searchsorted(cost, np.linspace(0, cost[-1], threads + 1))
        rotation = rope(torch.from_numpy(packed.positions))[:, 0]
        self.held = [
            packed.predict, start, end, np.concatenate([[0], np.cumsum([len(x.prefix) for x in segments])]),
            spans[:, 0], spans[:, 1], token_part, np.linspace(0, len(packed.predict), threads + 1).round(),
        ]  # fmt: skip
        self.held = [np.ascontiguousarray(array, np.int64) for array in self.held]
        self.rotation = rotation.real.contiguous(), rotation.imag.contiguous()
        pointers = [*(array.ctypes.data for array in self.held), *(part.data_ptr() for part in self.rotation)]
        self.row = Row(tokens, len(packed.predict), len(segments), int(keys.max()), threads, *pointers)


class _OfPass(Context, Protocol):
    kept: tuple[CompiledPass, block.Shape, _RowOf]
    memory: Tensor | None


class _Pass(torch.autograd.Function):
    """x [P, D], and of each layer qkv, out, gate_up and down [inputs, outputs], the gains of q and k and the bias of
    qkv, or None, to the states of the predicting tokens [N, D]."""

    @staticmethod
    def forward(
        ctx: _OfPass, passes: CompiledPass, s: block.Shape, row: _RowOf, keep: bool, x: Tensor, *given: Tensor | None
    ) -> Tensor:
        model, x = _ModelOf(passes, s, given), x.contiguous()
        memory = passes.take(passes.library.memory_floats(byref(model.model), byref(row.row), keep))
        states = x.new_empty(row.row.predictions, s.hidden)
        addresses = memory.data_ptr(), keep, x.data_ptr(), states.data_ptr()
        _check(passes.library.pass_forward(byref(model.model), byref(row.row), *addresses), row)
        if keep:
            ctx.kept, ctx.memory = (passes, s, row), memory
            ctx.save_for_backward(*given)  # type: ignore[arg-type]  # it takes None, too
        else:
            passes.give_back(memory)
        return states

    @staticmethod
    def backward(ctx: _OfPass, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (passes, s, row), memory = ctx.kept, ctx.memory
        given: Sequence[Tensor | None] = ctx.saved_tensors
        if memory is None:
            raise RuntimeError("a compiled pass has one backward pass: its memory serves another row by now")
        model, d_states = _ModelOf(passes, s, given, transposed=True), gradients[0].contiguous()
        d_x = d_states.new_empty(row.row.tokens, s.hidden)
        sums = d_states.new_zeros(row.row.threads, passes.library.gradient_floats(byref(model.model)))
        addresses = memory.data_ptr(), d_states.data_ptr(), d_x.data_ptr(), sums.data_ptr()
        _check(passes.library.pass_backward(byref(model.model), byref(row.row), *addresses), row)
        ctx.memory = None
        passes.give_back(memory)
        found: list[Tensor | None] = []
        for of_layer in sums.sum(0).chunk(s.layers):
            sizes = [(s.heads + s.kv_heads) * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim]
            matrices = [each.numel() for each in given[: len(MATRICES)] if each is not None]
            parts = of_layer.split([*matrices, *sizes])
            own = given[len(found) : len(found) + len(parts)]
            found += [None if each is None else part.view(each.shape) for part, each in zip(parts, own, strict=True)]
        return None, None, None, None, d_x, *found


class _ModelOf:
    """The matrices of a model as packed_row.c reads them, for the forward pass, or transposed, for the backward
    pass."""

    def __init__(
        self, passes: CompiledPass, s: block.Shape, given: Sequence[Tensor | None], transposed: bool = False
    ) -> None:
        columns, parts = passes.columns, len(MATRICES) + 2
        by_kind = [[given[first + kind] for first in range(0, len(given), parts)] for kind in range(parts)]
        self._held: list[Any] = []
        matrices = [
            self._pointers([in_panels(m if transposed else m.t(), columns) for m in of_layers if m is not None])
            for of_layers in by_kind[: len(MATRICES)]
        ]
        nothing = [None] * len(MATRICES)
        gains, biases = ([each for each in of_layers if each is not None] for of_layers in by_kind[len(MATRICES) :])
        self.model = Model(
            s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, passes.inner,
            s.eps, s.head_dim**-0.5, *([*nothing, *matrices] if transposed else [*matrices, *nothing]),
            self._pointers([gain.detach().contiguous() for gain in gains]) if gains else None,
            self._pointers([padded_to(bias, columns) for bias in biases]) if biases else None,
        )  # fmt: skip

    def _pointers(self, tensors: Sequence[Tensor]) -> int:
        array = (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        self._held += [array, *tensors]
        return addressof(array)


def _matrix(dense: Dense) -> Tensor:
    """The weight [inputs, outputs]."""
    return dense.weights[0] if dense.transposed else dense.weights[0].t()


def _check(failed: int, row: _RowOf) -> None:
    if failed:
        raise UserError(
            f"{row.row.threads} threads cannot be started for an update: lower train.threads, or raise the limits of "
            "processes and memory (ulimit -u, ulimit -v)"
        )
