"""Verify that a server holds what was sent, bit for bit. It answers 200 also for names that it does not know.

A server on a CPU hashes each of its parameters (SHA-256), whole where it has one rank; the same hashes are computed
here while the tensors pass by. Servers on GPUs hash in another way: they, and servers whose model is split or
quantized, are only compared with each other."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentrl.weights.request import WeightUpdateError
from agentrl.weights.server import WeightServer
from agentrl.weights.source import NamedTensor, WeightSource

_T = TypeVar("_T")
_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
          "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip
_PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(?=\w+$)")
_HOLDERS = re.compile(r"\b(?:language_model|model)\.")
"""What servers leave out of names, or put there, where the text model is one part of several."""
_NOT_COMPARED = (".experts.", "visual.", "vision", ".rotary_emb.")
"""Parts of names that servers stack or rename in ways that are not reproduced here, or that no trainer has."""


class Fingerprint(WeightSource):
    """Passes weights on, counts their bytes and, with `hashing`, hashes them as servers do, in each of `dtypes`."""

    def __init__(self, weights: WeightSource, hashing: bool, dtypes: Iterable[str] = ()) -> None:
        self._weights, self._hashing = weights, hashing
        self._dtypes = {getattr(torch, name) for name in dtypes if hasattr(torch, name)}
        self.repeatable, self.feed = weights.repeatable, weights.feed
        self.bytes = 0
        self._sums: dict[str, _Sum] = {}

    def __iter__(self) -> Iterator[NamedTensor]:
        self.bytes, self._sums = 0, {}
        for name, tensor in self._weights:
            self.bytes += tensor.nbytes
            if self._hashing:
                self._add(name, tensor)
            yield name, tensor

    def _add(self, name: str, tensor: Tensor) -> None:
        found = _PART.search(name)
        part = 0
        if found is not None:
            fused, part = _FUSED[found[1]]
            name = name[: found.start(1)] + fused + name[found.end(1) :]
        self._sums.setdefault(name, _Sum()).add(part, tensor, self._dtypes)

    def differences(self, checksums: Mapping[str, str], all_shown: bool = True) -> list[str]:
        """Compare a server's `checksums` (parameter -> hash) with what was passed on. Returns a line for each
        difference. all_shown: whether a parameter without a checksum is one that the server lacks."""
        theirs, ours = _compared(checksums), _compared(self._sums)
        return (
            [f"it has no {name}" for name in ours.keys() - theirs.keys() if all_shown]
            + [f"{name} was not sent" for name in theirs.keys() - ours.keys()]
            + [
                f"its {n} is not what was sent"
                for n in ours.keys() & theirs.keys()
                if theirs[n] not in ours[n].hashes()
            ]
        )


def _compared(found: Mapping[str, _T]) -> dict[str, _T]:
    """What is compared, by names that trainer and servers agree on."""
    kept = {name: value for name, value in found.items() if not any(part in name for part in _NOT_COMPARED)}
    return {_HOLDERS.sub("", name): value for name, value in kept.items()}


class _Sum:
    """The hash of parts that a server keeps as one tensor, in each dtype that it may keep them in. Parts may be added
    in any order."""

    def __init__(self) -> None:
        self._running: dict[torch.dtype | None, Any] = {}
        self._next = 0
        self._pending: dict[int, Tensor] = {}

    def add(self, part: int, tensor: Tensor, dtypes: Iterable[torch.dtype]) -> None:
        self._pending[part] = tensor
        while (due := self._pending.pop(self._next, None)) is not None:
            self._next += 1
            for dtype in (None, *dtypes):  # None: as it is sent
                kept = due.detach() if dtype is None else due.detach().to(dtype)
                flat = kept.cpu().contiguous().reshape(-1).view(torch.uint8)
                self._running.setdefault(dtype, hashlib.sha256()).update(flat.numpy().data)

    def hashes(self) -> set[str]:
        return {running.hexdigest()[:16] for running in self._running.values()}


async def check(server: WeightServer, sent: Fingerprint, others: dict[tuple[object, ...], str]) -> None:
    """Raise WeightUpdateError with one line when the server holds something else than was sent.

    others: kind of server -> hash of its answer; filled here, to compare servers of one kind with each other.
    """
    facts = await server.facts()
    ranks = await server.checksums()
    if facts.hashes_whole:
        wrong = sent.differences(ranks[0], server.shows_all)
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise WeightUpdateError(f"{server.url} does not hold the weights that were sent: {min(wrong)}{more}")
    answer = hashlib.sha256(repr(ranks).encode()).hexdigest()
    if others.setdefault(facts.kind, answer) != answer:
        raise WeightUpdateError(f"{server.url} holds other weights than the servers like it that were sent the same")
