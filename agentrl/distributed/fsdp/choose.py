"""Choose how a sharded model is computed: by the fast computation, if it equals the slow one on the shards.

No rank has the whole model, so both run through the root, on the device and in the precision of training. All ranks
compute the same small row and follow rank 0's result, so that they run the same collectives afterwards.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentrl.compute import compiled_layers, liger
from agentrl.compute.compiled_layers import cannot
from agentrl.compute.forward import EXACT, SEQUENTIAL, TOLERANCE
from agentrl.compute.hf_attention import Unsupported
from agentrl.distributed.fsdp.mesh import ParallelContext
from agentrl.distributed.fsdp.scatter import everywhere, share
from agentrl.distributed.fsdp.shard import Root
from agentrl.models.prove import attempt, difference, differs_like_others


@dataclass(frozen=True, slots=True)
class Candidates:
    """A fast and a slow computation of one model."""

    fast: Callable[[], object]
    """Make the fast computation. May raise Unsupported."""
    slow: Any
    """The computation that is right for every model."""
    probe: tuple[object, ...]
    """Arguments that both are compared on."""
    name: str
    """Of the fast one, for people."""
    declined: str | None = None
    """Why the fast one is not even tried; None: it is."""
    relative: bool = False
    """Measure differences relative to the largest output, where that is above 1."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """The context that both are compared in."""
    other: tuple[object, ...] | None = None
    """Arguments for which log-probs in half precision have to differ far more (see `differs_like_others`); None:
    outputs of any precision are compared by their largest difference."""
    kernels: Any = None
    """The modules that may get liger kernels; None: none."""


@torch.no_grad()
def choose(
    candidates: Candidates, root: Root, context: ParallelContext, compute: torch.dtype, compiled: bool = False
) -> tuple[Any, str]:
    """The fastest exact computation, and a line for people. compute: the dtype of its matrix products. compiled:
    whether the layers are, for the fast one.

    Raises UserError: as `candidates.fast` does; kernels that are installed, or compiled layers, change the results.
    """
    with candidates.around():
        why = share(candidates.declined or _mismatch(candidates, root, compute), context)
        if why is not None and compiled:
            raise cannot(why)
        if why is not None:
            return candidates.slow, f"{SEQUENTIAL} (no {candidates.name}: {why})"
        fast = candidates.fast()
        if compiled:
            return fast, f"{candidates.name}, {compiled_layers.DESCRIPTION}"
        kernels = candidates.kernels if context.layers is None else None  # they take no divided matrices
        if kernels is None or not everywhere(liger.fits(kernels, context.device), context):
            return fast, candidates.name
        judge = _judge(candidates, root, compute)
        liger.apply_and_compare(kernels, lambda: _run(root, fast, candidates), judge)
        return fast, f"{candidates.name}, {liger.DESCRIPTION}"


def _mismatch(candidates: Candidates, root: Root, compute: torch.dtype) -> str | None:
    """Why the fast computation cannot be used, or None."""
    try:
        fast = candidates.fast()
    except Unsupported as error:
        return f"Unsupported: {error}"
    found = _run(root, partial(_attempt, fast), candidates)
    wanted = _run(root, candidates.slow, candidates)  # also after a failure, which left layers gathered
    judge = _judge(candidates, root, compute)
    if isinstance(found, str):
        return found
    return judge(found, wanted)


def _judge(candidates: Candidates, root: Root, compute: torch.dtype) -> Callable[[Tensor, Tensor], str | None]:
    """What says why outputs for the probe are not those wanted, or None. A collective."""
    if candidates.other is None or compute in EXACT:
        return lambda found, wanted: difference(found, wanted, TOLERANCE.get(compute, 0.25), candidates.relative)
    root.computation = candidates.slow
    other = _first(root(*candidates.other))
    return lambda found, wanted: differs_like_others(found, wanted, other)


def _run(root: Root, computation: Any, candidates: Candidates) -> Any:
    root.computation = computation
    return _first(root(*candidates.probe))


def _first(found: object) -> Any:
    """The log-probs where there are entropies too."""
    return found[0] if isinstance(found, tuple) else found


def _attempt(computation: Any, *arguments: object) -> Tensor | str:
    """Catch errors inside the root's forward, so that its hooks see a forward that ends."""
    return attempt(lambda: _first(computation(*arguments)))
