"""Copies between a device and CPU memory that are made as late as they may be: not before something waits for them.

What was written over or freed too early, or read without waiting, then gives other numbers, or fails by name. Devices
are the CPU, or a pretended GPU.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.compute import offload
from agentrl.compute.offload import Copy
from agentrl.learner import optimizer


class LateTransfers:
    """Transfers that record what was begun and waited for, in `order`: `out 0` begins the first copy to the host,
    `in 0` that of the same host memory back; then `wait out 0`, `finish out 0`."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.most = 0
        """Bytes on the device, of copies to it, at most at once."""
        self._begun: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        """Name and source of copies that are not made, by the target's id."""
        self._written: dict[int, Tensor] = {}
        """What the device wrote to host memory that the host has not waited for, by its id."""
        self._host: list[Tensor] = []
        self._here: list[weakref.ref[Tensor]] = []

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Copy:
        if target is None:
            target = torch.full(source.shape, float("nan"), dtype=source.dtype)
        self._written.pop(id(target), None)
        return self._begin("out", source, target, target)

    def to_device(self, source: Tensor) -> Copy:
        made = torch.full_like(source, float("nan"), device=DEVICE[0])
        self._here = [one for one in self._here if one() is not None] + [weakref.ref(made)]
        self.most = max(self.most, sum(one.nbytes for ref in self._here if (one := ref()) is not None))
        return self._begin("in", source, made, source)

    def wait(self, copy: Copy) -> Tensor:
        if id(copy.target) not in self._begun:
            return copy.target
        name, kept = self._begun.pop(id(copy.target))
        self.order.append(f"wait {name}")
        source = kept()
        assert source is not None, f"the source of {name} was freed before it was copied"
        if name.startswith("out"):
            self._written[id(copy.target)] = source.detach().clone()
        else:
            copy.target.copy_(self._written.get(id(source), source))
        return copy.target

    def finish(self, copy: Copy) -> None:
        self.wait(copy)
        self.order.append("finish")
        for host in self._host:  # copies of one direction run one after another
            if (values := self._written.pop(id(host), None)) is not None:
                host.copy_(values)

    def _begin(self, direction: str, source: Tensor, target: Tensor, host: Tensor) -> Copy:
        if not any(one is host for one in self._host):
            self._host.append(host)
        name = f"{direction} {next(n for n, one in enumerate(self._host) if one is host)}"
        self.order.append(name)
        self._begun[id(target)] = name, weakref.ref(source)
        return Copy(target, None)


def _unpinned(make: Callable[..., Tensor], *shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    """Memory that is not pinned, for which torch wants a driver."""
    return make(*shape, **options)


DEVICE = [torch.device("cpu")]
"""Where copies to the device go."""


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> LateTransfers:
    """The transfers of all devices, the CPU too."""
    made = LateTransfers()
    monkeypatch.setattr(offload, "transfers_of", lambda device: made)
    monkeypatch.setattr(optimizer, "transfers_of", lambda device: made)
    for make in ("empty", "zeros"):
        monkeypatch.setattr(offload.torch, make, partial(_unpinned, getattr(torch, make)))
    return made
