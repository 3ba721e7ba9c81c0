"""`Native`: the functions of `step.c`. Without a compiler, torch computes the same."""

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentrl.engine.base import EngineError
from agentrl.models.compiled import compiled

SOURCE = Path(__file__).with_name("step.c")
Floats = npt.NDArray[np.float32]


class Model(ctypes.Structure):
    """`Model` of step.c."""

    _fields_ = [
        ("layers", c_int64), ("hidden", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("size", c_int64),
        ("inner", c_int64), ("vocabulary", c_int64), ("eps", c_float), ("embed", c_void_p), ("head", c_void_p),
        ("qkv", c_void_p), ("out", c_void_p), ("gate", c_void_p), ("up", c_void_p), ("down", c_void_p),
        ("qk_gain", c_void_p), ("qkv_bias", c_void_p), ("out_bias", c_void_p), ("gate_bias", c_void_p),
        ("up_bias", c_void_p), ("down_bias", c_void_p),
    ]  # fmt: skip


class Tokens(ctypes.Structure):
    """`Tokens` of step.c."""

    _fields_ = [
        ("count", c_int64), ("ids", c_void_p), ("slots", c_void_p), ("positions", c_void_p), ("groups", c_void_p),
        ("shared", c_void_p), ("rows", c_void_p), ("cosines", c_void_p), ("sines", c_void_p), ("keys", c_void_p),
        ("values", c_void_p), ("stride", c_int64), ("logits", c_void_p),
    ]  # fmt: skip


class Native:
    """The functions of a compiled step.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._step, self._sample = library.step, library.sample
        self._step.argtypes, self._step.restype = [POINTER(Model), POINTER(Tokens)], c_int
        self._sample.argtypes, self._sample.restype = [c_int64, c_int64, *[c_void_p] * 6], c_int
        self.panel_columns = int(library.panel_columns())
        """The outputs of a matrix that are computed together."""

    def step(self, model: Model, tokens: Tokens) -> None:
        """Compute a step. Raises EngineError if there is no memory for it."""
        if self._step(byref(model), byref(tokens)):
            raise EngineError(f"there is no memory for a step of {tokens.count} tokens")

    def sample(
        self, logits: Tensor, temperature: Floats, key: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        """Sample one token per row, in one pass; return the tokens, int64 [N], and their log-probs, float32 [N].

        logits: float32 [N, vocab], on the CPU. temperature: [N]; 0: the likeliest token, with its log-prob at
        temperature 1. key, position: [N], of `uniforms`. Raises EngineError if there is no memory for it.
        """
        logits, rows = logits.contiguous(), len(temperature)
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = (
            np.ascontiguousarray(temperature, np.float32), np.ascontiguousarray(key, np.uint64),
            np.ascontiguousarray(position, np.int64), tokens, logprobs,
        )  # fmt: skip
        if self._sample(rows, logits.shape[1], logits.data_ptr(), *[array.ctypes.data for array in arrays]):
            raise EngineError(f"there is no memory to sample from {logits.shape[1]} tokens")
        return tokens, logprobs


@functools.cache
def native() -> Native | None:
    """The functions; None: they cannot be made. See `compiled`."""
    library = compiled(SOURCE, "small models are sampled at half the speed")
    return None if library is None else Native(library)
