"""Build a model over the ranks, none of which ever holds it whole.

All ranks build the modules on the meta device, where nothing is allocated. Rank 0 reads one tensor after another from
the files and each rank receives its shard. Only if the files hold other tensors than the modules does rank 0 load the
whole model, on its CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.compute.activation_checkpointing import blocks_of, recompute
from agentrl.compute.compiled_layers import compile_layers
from agentrl.distributed.fsdp.choose import Candidates, choose
from agentrl.distributed.fsdp.layers import divide_layers
from agentrl.distributed.fsdp.mesh import ParallelContext
from agentrl.distributed.fsdp.scatter import Source, fill, share
from agentrl.distributed.fsdp.shard import Options, Root, shard
from agentrl.errors import UserError
from agentrl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Role:
    """How the model of a role is made and computed."""

    skeleton: Callable[[], nn.Module]
    """Make the modules; called by every rank, on the meta device."""
    load: Callable[[], Source]
    """Open the weights of the same modules; called by rank 0. May raise UserError."""
    candidates: Callable[[Any], Candidates]
    """From the skeleton to its computations, which run inside the forward of the root: there, weights are whole in the
    layer that runs, and outside of the layers."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model over the ranks."""

    model: Any
    """The module; its parameters are DTensors."""
    root: Root
    """The module to call."""
    known: object
    """See `Source.known`."""
    description: str
    """A line that says how it is computed."""


def build(role: Role, recipe: Recipe, context: ParallelContext, trained: bool = True) -> Built:
    """Build, shard and fill the model. trained: False freezes it. Raises UserError on all ranks if rank 0 fails to."""
    source, manifest = read_source(role.load, context)
    with torch.device("meta"):
        model = role.skeleton()
    match_types(model, manifest, context)
    transformer = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    experts = divide_layers(transformer, context.layers) if context.layers is not None else []
    if not trained:
        model.requires_grad_(False)
    if compiled := trained and recipe.model.compile:
        compile_layers(transformer)
    if trained and recipe.model.checkpointing:
        recompute(transformer, "activations" in recipe.cluster.offload)
    root = Root(model.eval(), None)
    options, blocks = Options.of(recipe), blocks_of(transformer)
    _check_types(root, blocks)
    shard(root, blocks, context, options, experts)
    model.to_empty(device="cpu" if options.offload else context.device)
    fill(model, source, context)
    del source
    dtype = options.compute or next(model.parameters()).dtype
    root.computation, line = choose(role.candidates(model), root, context, dtype, compiled)
    return Built(model, root, manifest.known, f"{line}, {manifest.note}" if manifest.note else line)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What rank 0 sends to the others before the weights."""

    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each parameter, by name."""
    known: object
    """See `Source.known`."""
    note: str
    """See `Source.note`."""


def read_source(load: Callable[[], Source], context: ParallelContext) -> tuple[Source | None, Manifest]:
    """Open the source on rank 0 (None on the others), and share its manifest. Raises UserError on all ranks if `load`
    does."""
    source: Source | None = None
    found: Manifest | UserError | None = None
    if context.rank == 0:
        try:
            source = load()
            kinds = {name: (tuple(p.shape), p.dtype) for name, p in source.model.named_parameters()}
            found = Manifest(kinds, source.known, source.note)
        except UserError as error:
            found = error
    found = share(found, context)
    if isinstance(found, UserError):
        raise found
    assert found is not None
    return source, found


def match_types(model: nn.Module, manifest: Manifest, context: ParallelContext) -> None:
    """Give the parameters the dtypes that rank 0 found: some layers may be kept in another precision.

    Raises RuntimeError if this rank's skeleton is of another model."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if own != (theirs := {name: shape for name, (shape, _) in manifest.kinds.items()}):
        odd = min(name for name, _ in own.items() ^ theirs.items())
        raise RuntimeError(f"rank {context.rank} built another model than rank 0: {odd} differs")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(manifest.kinds[name][1])


def _check_types(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise UserError if weights that are gathered together are trained in several precisions."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [p for p in root.parameters() if id(p) not in inside]
    for group in [*(list(block.parameters()) for block in blocks), outside]:
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in group if p.requires_grad})
        if len(kinds) > 1:
            raise UserError(
                f"model.dtype: the model keeps weights of {' and '.join(kinds)} at once, which FSDP2 cannot train; "
                "set model.dtype=float32 (and model.compute=bfloat16)"
            )
