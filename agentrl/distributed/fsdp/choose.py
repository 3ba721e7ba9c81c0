"""Which way of computing a sharded model is exact: found out on the shards themselves, by all ranks together.

Nobody ever has the whole model, so both ways run through the root, on the device and in the precision of training. All
ranks compute the same small row, and go by what rank 0 found, so that they run the same collectives afterwards.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentrl.compute import liger
from agentrl.compute.forward import TOLERANCE
from agentrl.compute.hf_attention import Unsupported
from agentrl.distributed.fsdp.mesh import Place
from agentrl.distributed.fsdp.scatter import everywhere, share
from agentrl.distributed.fsdp.shard import Root
from agentrl.models.prove import attempt, difference


@dataclass(frozen=True, slots=True)
class Ways:
    """fast: makes the one that is wanted, called `name`; slow: the one that is right for every model. probe: the
    arguments that both are tried with. declined: what speaks against the fast one before it is tried. relative:
    differences are measured by the largest number. around: what both are tried in. kernels: the modules that may get
    other kernels (None: they may not)."""

    fast: Callable[[], Any]
    slow: Any
    probe: tuple[Any, ...]
    name: str
    declined: str | None = None
    relative: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    kernels: Any = None


@torch.no_grad()
def choose(ways: Ways, root: Root, place: Place, compute: torch.dtype) -> tuple[Any, str]:
    """The fastest exact one of the ways, and a line for people. compute: the type that is computed in.

    Raises UserError: as `ways.fast` does; kernels that are there and do not fit.
    """
    with ways.around():
        why = share(ways.declined or _misfit(ways, root, compute), place)
        if why is not None:
            return ways.slow, f"one sequence at a time (no {ways.name}: {why})"
        fast = ways.fast()
        if ways.kernels is None or not everywhere(liger.fits(ways.kernels, place.device), place):
            return fast, ways.name
        liger.put_in_and_compare(ways.kernels, lambda: _run(root, fast, ways), TOLERANCE.get(compute, 0.25))
        return fast, f"{ways.name}, {liger.SAID}"


def _misfit(ways: Ways, root: Root, compute: torch.dtype) -> str | None:
    """Why the fast way will not do, or None."""
    try:
        fast = ways.fast()
    except Unsupported as error:
        return f"Unsupported: {error}"
    found = _run(root, partial(_attempt, fast), ways)
    wanted = _run(root, ways.slow, ways)  # also after a failure, which left layers gathered
    if isinstance(found, str):
        return found
    return difference(found, wanted, TOLERANCE.get(compute, 0.25), ways.relative)


def _run(root: Root, way: Any, ways: Ways) -> Any:
    root.way = way
    return _first(root(*ways.probe))


def _first(found: Any) -> Any:
    """The log-probs where there are entropies too."""
    return found[0] if isinstance(found, tuple) else found


def _attempt(way: Any, *arguments: Any) -> Tensor | str:
    """Inside the root's forward, so that its hooks see a forward that ends."""
    return attempt(lambda: _first(way(*arguments)))
