"""A model over the ranks, none of which ever holds it whole.

All ranks build its modules on the meta device, where nothing is allocated. Rank 0 reads one tensor after another from
the files, and each rank receives its shard of it. Only where the files hold other tensors than the modules does rank 0
load the whole model, on its CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.compute.activation_checkpointing import blocks_of, recompute
from agentrl.distributed.fsdp.choose import Ways, choose
from agentrl.distributed.fsdp.mesh import Place
from agentrl.distributed.fsdp.scatter import fill, share
from agentrl.distributed.fsdp.shard import Options, Root, shard
from agentrl.distributed.fsdp.source import Source
from agentrl.errors import UserError
from agentrl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Role:
    """How a model is made, and what is computed with it.

    skeleton: called by every rank, on the meta device. load: called by rank 0: the same modules, and their weights; it
    may raise UserError. ways: from the skeleton to how it may be computed, inside the forward of the root: there,
    weights are whole in the layer that runs, and outside of the layers.
    """

    skeleton: Callable[[], nn.Module]
    load: Callable[[], Source]
    ways: Callable[[Any], Ways]


@dataclass(frozen=True, slots=True)
class Built:
    """model: sharded. root: what is called. known: of the source. description: a line that says how it is computed."""

    model: Any
    root: Root
    known: Any
    description: str


def build(role: Role, recipe: Recipe, place: Place, trained: bool = True) -> Built:
    """trained: False freezes it. Raises UserError on every rank when rank 0 could not load it."""
    source, told = _read(role, place)
    with torch.device("meta"):
        model = role.skeleton()
    _match(model, told, place)
    transformer = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    if not trained:
        model.requires_grad_(False)
    elif recipe.model.checkpointing:
        recompute(transformer)
    root = Root(model.eval(), None)
    options, blocks = Options.of(recipe), blocks_of(transformer)
    _check_types(root, blocks)
    shard(root, blocks, place, options)
    model.to_empty(device="cpu" if options.offload else place.device)
    fill(model, source, place)
    del source
    root.way, line = choose(role.ways(model), root, place, options.compute or next(model.parameters()).dtype)
    return Built(model, root, told.known, f"{line}, {told.note}" if told.note else line)


@dataclass(frozen=True, slots=True)
class _Told:
    """What rank 0 tells the others. kinds: each parameter's shape and type by name."""

    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]
    known: Any
    note: str


def _read(role: Role, place: Place) -> tuple[Source | None, _Told]:
    """On rank 0 the source, elsewhere None."""
    source: Source | None = None
    told: _Told | UserError | None = None
    if place.rank == 0:
        try:
            source = role.load()
            kinds = {name: (tuple(p.shape), p.dtype) for name, p in source.model.named_parameters()}
            told = _Told(kinds, source.known, source.note)
        except UserError as error:
            told = error
    told = share(told, place)
    if isinstance(told, UserError):
        raise told
    assert told is not None
    return source, told


def _match(model: nn.Module, told: _Told, place: Place) -> None:
    """Give the parameters the types that rank 0 found: some layers may be kept in another precision.

    Raises RuntimeError when this rank's skeleton is of another model."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if own != (theirs := {name: shape for name, (shape, _) in told.kinds.items()}):
        odd = min(name for name, _ in own.items() ^ theirs.items())
        raise RuntimeError(f"rank {place.rank} built another model than rank 0: {odd} differs")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(told.kinds[name][1])


def _check_types(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """What is gathered together must be trained in one precision."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in root.parameters() if id(p) not in inside]
    for group in [*(list(block.parameters()) for block in blocks), outside]:
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in group if p.requires_grad})
        if len(kinds) > 1:
            raise UserError(
                f"model.dtype: the model keeps weights of {' and '.join(kinds)} at once, which FSDP2 cannot train; "
                "set model.dtype=float32 (and model.compute=bfloat16)"
            )
