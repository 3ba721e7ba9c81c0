"""`Native`: the functions of `step.c`, which this machine's C compiler makes once for its own processor.

Without a compiler, torch computes the same.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentrl.engine.base import EngineError
from agentrl.models.dense import cpu_name

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step.c")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 60.0
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
        self._sample.argtypes, self._sample.restype = [c_int64, c_int64, *[c_void_p] * 5], c_int
        library.panel_columns.restype = c_int64
        self.panel_columns = int(library.panel_columns())
        """The outputs of a matrix that are computed together."""

    def step(self, model: Model, tokens: Tokens) -> None:
        """Compute a step. Raises EngineError if there is no memory for it."""
        if self._step(byref(model), byref(tokens)):
            raise EngineError(f"there is no memory for a step of {tokens.count} tokens")

    def sample(self, logits: Tensor, inverse: Floats, uniform: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Sample one token per row, in one pass; return the tokens, int64 [N], and their log-probs, float32 [N].

        logits: float32 [N, vocab], on the CPU. inverse: [N], one divided by the temperature; 0: the likeliest token,
        with its log-prob at temperature 1. uniform: [N], in [0, 1). Raises EngineError if there is no memory for it.
        """
        logits, rows = logits.contiguous(), len(logits)
        inverse, uniform = np.ascontiguousarray(inverse, np.float32), np.ascontiguousarray(uniform, np.float32)
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = [array.ctypes.data for array in (inverse, uniform, tokens, logprobs)]
        if self._sample(rows, logits.shape[1], logits.data_ptr(), *arrays):
            raise EngineError(f"there is no memory to sample from {logits.shape[1]} tokens")
        return tokens, logprobs


@functools.cache
def native() -> Native | None:
    """The functions, made now (2 s) unless the cache folder has them; None: they cannot be made."""
    command = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if command is None:
        names = ", ".join(COMPILERS)
        log.warning("no C compiler (%s) is installed: small models are sampled at half the speed", names)
        return None
    home = os.path.expanduser("~")  # Path.home raises for a user without one
    folder = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache", "agentrl")
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-") as own:
            return _load(command, folder, Path(own))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        why = next((line for line in said if "error" in line), said[-1])
        slow = "small models are sampled at half the speed"
        log.warning("%s cannot compile %s: %s: %s", command, SOURCE.name, slow, why)
        return None


def _load(command: str, folder: Path, own: Path) -> Native:
    """Load the compiled file from `folder`, or make it in `own` and put it there, if `folder` can be written."""
    tuned = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    processor = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*", cpu_name(), re.MULTILINE)[:3]
    made_of = "\n".join((SOURCE.read_text(encoding="utf-8"), command, tuned, *FLAGS, *processor))
    name = f"step-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    try:
        return Native(ctypes.CDLL(str(folder / name)))
    except (OSError, AttributeError):  # not there, or cut off
        pass
    line = [*shlex.split(command), *FLAGS, tuned, "-o", str(own / name), str(SOURCE), "-lm"]
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    part = folder / f".{name}.{os.getpid()}"
    try:
        if not folder.is_absolute():
            raise OSError("the user has no home")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own / name, part)
        part.replace(folder / name)
    except OSError as error:
        log.info("the compiled %s cannot be kept in %s: %s", SOURCE.name, folder, error)
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return Native(ctypes.CDLL(str(own / name)))
