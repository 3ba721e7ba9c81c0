"""Tensors in pinned CPU memory, copied to and from a GPU beside what it computes: each direction has a stream of its
own, and the GPU, not the host, waits for a copy.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was begun."""

    target: Tensor
    """What is copied to; not set before `done`."""
    done: torch.Event | None
    """Recorded behind the copy."""


class Transfers(Protocol):
    """Copies between a device and CPU memory. Those of one direction run one after another."""

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """Begin to copy what the device computes until now. The caller holds `source` until `wait` has returned.
        target: in pinned memory; None: new memory."""
        ...

    def to_device(self, source: Tensor) -> Copy:
        """Begin to copy pinned memory to new memory of the device."""
        ...

    def wait(self, copy: Copy) -> Tensor:
        """Make what the device computes from now on wait for the copy; return its target."""
        ...

    def finish(self, copy: Copy) -> None:
        """Make the host wait for the copy."""
        ...


class CudaTransfers:
    """Transfers of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """See `Transfers`."""
        if target is None:
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return self._copy(self._out, source, target)

    def to_device(self, source: Tensor) -> Copy:
        """See `Transfers`."""
        return self._copy(self._in, source, torch.empty(source.shape, dtype=source.dtype, device=self.device))

    def wait(self, copy: Copy) -> Tensor:
        """See `Transfers`."""
        assert copy.done is not None
        torch.cuda.current_stream(self.device).wait_event(copy.done)
        return copy.target

    def finish(self, copy: Copy) -> None:
        """See `Transfers`."""
        assert copy.done is not None
        copy.done.synchronize()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Copy:
        # Waits for the source to be computed, and for what used the memory of a new target before.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return Copy(target, stream.record_event())


PIECE = 1 << 28
"""Bytes that are pinned at once."""
ALIGNED = 256
"""Bytes; tensors in a piece start at multiples."""


class PinnedMemory:
    """Pinned CPU memory for many tensors that stay. torch rounds each allocation up to a power of two, so they lie in
    pieces that are one; those larger than half a piece have an allocation of their own."""

    def __init__(self) -> None:
        self._piece: Tensor | None = None
        self._used = 0

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """A tensor of 0 of the shape and type of `tensor`."""
        if 2 * tensor.nbytes > PIECE:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self._piece is None or self._used + tensor.nbytes > PIECE:
            self._piece, self._used = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), 0
        found = self._piece[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += -(-tensor.nbytes // ALIGNED) * ALIGNED
        return found.zero_()


@lru_cache
def transfers_of(device: torch.device) -> Transfers | None:
    """The transfers of a device; None: its memory is the host's."""
    return None if device.type == "cpu" else CudaTransfers(device)


class _Saved:
    """The input of a layer, between its passes."""

    def __init__(self, source: Tensor, before: "_Saved | None") -> None:
        self.source: Tensor | None = source
        """On the device, until it is copied and the next layer has run."""
        self.host: Copy | None = None
        self.fetched: Copy | None = None
        """On its way back."""
        self.before = weakref.ref(before) if before is not None else None
        """Of the layer before, which the backward pass comes to next."""


class InputsOnHost:
    """The inputs of a model's layers in CPU memory from a layer's pass until the backward pass.

    An input is copied while its layer runs; the GPU frees it once that copy is done and the next layer begins. In the
    backward pass it is fetched while the layer after it is computed. So two inputs are on the device at once; that of
    the last layer, which is needed first, stays there.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._last: weakref.ref[_Saved] | None = None

    def around(self, layer: int, arguments: Sequence[object]) -> saved_tensors_hooks | None:
        """Hooks around the call of layer number `layer`, whose input is the first tensor of `arguments`; what else is
        saved, as positions, which all layers share, stays on the device. None: that is the host."""
        source = next(each for each in arguments if isinstance(each, Tensor))
        transfers = transfers_of(source.device)
        if transfers is None:
            return None

        def pack(saved: Tensor) -> Tensor | _Saved:
            if saved.shape != source.shape or not saved.is_floating_point():
                return saved
            return self._keep(saved.detach(), transfers, last=layer == self.layers - 1)

        return saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else fetch(saved, transfers))

    def _keep(self, source: Tensor, transfers: Transfers, last: bool) -> _Saved:
        before = self._last() if self._last is not None else None
        kept = _Saved(source, before)
        if not last:
            kept.host = transfers.to_host(source)
        if before is not None and before.host is not None:
            transfers.wait(before.host)
            before.source = None
        self._last = weakref.ref(kept)
        return kept


def fetch(saved: _Saved, transfers: Transfers) -> Tensor:
    """The input of a layer on the device again; begins to fetch that of the layer before."""
    found = saved.source
    if found is None:
        copy = saved.fetched or _begin(saved, transfers)
        saved.fetched = None
        found = transfers.wait(copy)
    before = saved.before() if saved.before is not None else None
    if before is not None and before.source is None and before.fetched is None:
        before.fetched = _begin(before, transfers)
    return found


def _begin(saved: _Saved, transfers: Transfers) -> Copy:
    assert saved.host is not None
    return transfers.to_device(saved.host.target)
