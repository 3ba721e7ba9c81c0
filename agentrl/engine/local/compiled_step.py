"""`CompiledStep`: one step of a small float32 model in one compiled function.

A step has about two hundred operations of a few microseconds each. As operations of torch they take two to four times
as long as in one function, which keeps what it computes in the processor's cache; with few rows, most of that is the
calls themselves. What a row gets does not depend, to the last bit, on which others are computed with it.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.local.cache import SlotCache
from agentrl.engine.local.native import Model, Native, Tokens
from agentrl.engine.local.runner import Ints
from agentrl.models import block
from agentrl.models.compiled import in_panels, padded_to
from agentrl.models.dense import Dense

MULTIPLE = 8
"""What the size of a head must be a multiple of."""


class Alike:
    """Which slots hold the same keys and values for their first tokens, because they were copied from one another: a
    group's prompt is read once for all its rows."""

    def __init__(self) -> None:
        self._group = np.zeros(0, np.int64)
        self._shared = np.zeros(0, np.int64)
        self._groups = 0

    def resize(self, slots: int) -> None:
        """Count with `slots` slots; those that remain keep what they hold."""
        kept = min(slots, len(self._group))
        group, shared = np.full(slots, -1, np.int64), np.zeros(slots, np.int64)
        group[:kept], shared[:kept] = self._group[:kept], self._shared[:kept]
        self._group, self._shared = group, shared

    def copied(self, source: Sequence[int], target: Sequence[int], columns: int) -> None:
        """The first `columns` tokens of source[j] were copied to target[j], for all j as if at once."""
        held = {slot: (int(self._group[slot]), int(self._shared[slot])) for slot in source}
        for one in set(source).difference(target):
            if columns and held[one][0] < 0:
                held[one] = self._groups, columns
                self._group[one], self._shared[one] = held[one]
                self._groups += 1
        for one, other in zip(source, target, strict=True):
            group, shared = held[one]
            self._group[other], self._shared[other] = (group, shared) if shared <= columns else (-1, 0)

    def of(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """For tokens that are written now, [N]: the group of each one's slot, or -1, and how many tokens it shares."""
        over = slots[positions < self._shared[slots]]
        if len(over):
            self._group[over], self._shared[over] = -1, 0
        return self._group[slots], self._shared[slots]


class CompiledStep:
    """The step of one model. weights: copied, not interleaved, float32, on the CPU; heads of a multiple of MULTIPLE.
    rope: of the same model; its factor makes the product of a query and a key the score."""

    def __init__(self, native: Native, weights: block.Weights, rope: block.Rope) -> None:
        self._native, self._rope = native, rope
        self._columns = native.panel_columns
        self._held: list[object] = []  # what the pointers point to
        s, layers = weights.shape, weights.layers
        head = _matrix(weights.head)
        gate_up = [_matrix(layer.gate_up).chunk(2) for layer in layers]
        biases = [layer.gate_up.bias_halves() for layer in layers]
        self._model = Model(
            s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, len(gate_up[0][0]), len(head), s.eps,
            self._pointer(weights.embed.detach().contiguous()), self._pointer(self._panels(head)),
            *(self._pointers([self._panels(_matrix(d)) for d in ds])
              for ds in ([layer.qkv for layer in layers], [layer.out for layer in layers])),
            *(self._pointers([self._panels(halves[i]) for halves in gate_up]) for i in (0, 1)),
            self._pointers([self._panels(_matrix(layer.down)) for layer in layers]),
            self._gains([layer.qk_gain for layer in layers]),
            *(self._pointers([self._padded(b) for b in bs])
              for bs in ([layer.qkv.bias for layer in layers], [layer.out.bias for layer in layers],
                         [first for first, _ in biases], [second for _, second in biases],
                         [layer.down.bias for layer in layers])),
        )  # fmt: skip
        self._cosines = self._sines = torch.empty(0, s.head_dim // 2)

    def __call__(self, cache: SlotCache, tokens: Ints, logits: Tensor) -> None:
        """Compute a step's tokens, and put the logits of some into `logits` [rows, vocabulary].

        tokens: int64 [6, N], contiguous: the ids; their slots, of which each one's tokens are next to each other and in
        order; their positions; the groups of the slots that hold the same keys and values for their first tokens, which
        are then read once, -1 for none; how many those are; the rows of their logits, -1 for none.
        """
        most, count = int(tokens[2].max()) + 1, tokens.shape[1]
        if len(self._cosines) < most:
            table = self._rope.table(most)
            self._cosines, self._sines = table.real.contiguous(), table.imag.contiguous()
        keys, values = _addresses(cache.keys), _addresses(cache.values)
        first, size = tokens.ctypes.data, tokens.itemsize * count
        self._native.step(self._model, Tokens(
            count, *range(first, first + 6 * size, size), self._cosines.data_ptr(), self._sines.data_ptr(),
            ctypes.addressof(keys), ctypes.addressof(values), cache.columns + 1, logits.data_ptr(),
        ))  # fmt: skip

    def _panels(self, matrix: Tensor) -> Tensor:
        return in_panels(matrix, self._columns)

    def _padded(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else padded_to(bias, self._columns)

    def _gains(self, gains: Sequence[Tensor | None]) -> int | None:
        return None if gains[0] is None else self._pointers([g.detach().contiguous() for g in gains if g is not None])

    def _pointer(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()

    def _pointers(self, tensors: Sequence[Tensor | None]) -> int:
        array = _addresses(tensors)
        self._held.extend([array, *tensors])
        return ctypes.addressof(array)


def _matrix(dense: Dense) -> Tensor:
    """The weight [outputs, inputs]."""
    return (dense.weights[0].t() if dense.transposed else dense.weights[0]).detach()


def _addresses(tensors: Sequence[Tensor | None]) -> "ctypes.Array[c_void_p]":
    return (c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
