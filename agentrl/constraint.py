"""What an answer must look like, and which token ids that allowed where each of its tokens was sampled.

A token that was sampled under a constraint was drawn from softmax over the allowed ids. Its log-prob is that of this
distribution, and the trainer computes it by the same ids: the engine writes them down as it samples, packed, so that no
second library has to find them again.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Allowed = npt.NDArray[np.generic]
"""object [T]: of each token sampled under a constraint the ids that were allowed (`packed`), None elsewhere."""
FORBIDDEN = -1e30
"""The logit of an id that is not allowed: its probability is 0, and 0 times its log-prob is no NaN."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A text: `before`, a JSON value, `after`."""

    before: str
    """What stands before the value."""
    schema: str
    """The JSON schema of the value, as JSON text."""
    after: str
    """What stands behind it, up to the end of the turn."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a turn must be: one of several shapes, perhaps behind a thought."""

    shapes: tuple[Shape, ...]
    """One of these."""
    thought: tuple[str, str] | None = None
    """What begins a thought and what ends it: before the shape there may be one. None: there is none."""
    begun: bool = False
    """Whether the prompt has begun the thought, so that there must be one."""
    opener: str = ""
    """The special token that every shape begins with, where the turn may be anything else too: only from this token to
    the end of a shape is it constrained, as often as it is sampled. Empty: the turn is one shape."""


def packed(bits: npt.NDArray[np.uint8]) -> bytes:
    """Which ids are allowed in few bytes. bits: one bit for each id, the lowest first."""
    return zlib.compress(bits.tobytes(), 1)


@lru_cache(maxsize=256)  # 39 MB of a vocabulary of 150,000
def unpacked(allowed: bytes, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Bool [vocabulary]. Raises ValueError: it is not what `packed` made of so many ids."""
    size = -(-vocabulary // 8)
    try:
        data = zlib.decompressobj().decompress(allowed, size + 8)  # a file may be a stranger's
    except zlib.error as error:
        raise ValueError(f"the allowed ids of a token cannot be read: {error}") from None
    if not size <= len(data) <= size + 3:  # libraries write whole words
        raise ValueError(f"the allowed ids of a token are of another vocabulary than {vocabulary}")
    found = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:vocabulary].astype(np.bool_)
    found.flags.writeable = False
    return found


def allows(allowed: bytes, token: int) -> bool:
    """Whether a token is allowed. Raises ValueError."""
    try:
        data = zlib.decompressobj().decompress(allowed, token // 8 + 1)
    except zlib.error as error:
        raise ValueError(f"the allowed ids of a token cannot be read: {error}") from None
    return token // 8 < len(data) and bool(data[token // 8] >> (token % 8) & 1)


class Masks:
    """The allowed ids of N predictions, as the output layer needs them; those of the others stay as they are."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self._rows = np.flatnonzero([one is not None for one in allowed])

    @classmethod
    def of(cls, allowed: Allowed | None) -> "Masks | None":
        """The masks; None where nothing is constrained."""
        return None if allowed is None or all(one is None for one in allowed) else cls(allowed)

    def take(self, indices: npt.NDArray[np.int64]) -> "Masks | None":
        """Those of the predictions at `indices`."""
        return Masks.of(self.allowed[indices])

    def apply(self, logits: "Tensor", rows: slice) -> "Tensor":
        """Logits [n, vocabulary] of the predictions `rows` with FORBIDDEN at what is not allowed; may change
        them in place."""
        import torch  # who reads stored rollouts needs no model

        own = self._rows[(self._rows >= rows.start) & (self._rows < rows.stop)]
        if not len(own):
            return logits
        allowed = np.stack([unpacked(self.allowed[row], logits.shape[-1]) for row in own])
        places = torch.from_numpy(own - rows.start).to(logits.device)
        changed = logits[places].masked_fill(~torch.from_numpy(allowed).to(logits.device), FORBIDDEN)
        return logits.index_copy(0, places, changed)
