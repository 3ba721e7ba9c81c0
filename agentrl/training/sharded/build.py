"""From a recipe to sharded roles. Rank 0 alone reads the weights, on its CPU, and deals them out; the others build the
same modules on the meta device, where nothing is allocated, and receive their shards.

What depends on the weights being whole (which way of computing log-probs is exact) is found out on rank 0 and told to
the others, so that all ranks run the same collectives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from agentrl.errors import UserError
from agentrl.models.load import load_model, load_shape, resolve
from agentrl.models.lora import add_adapter
from agentrl.recipe.schema import ModelSection, Recipe
from agentrl.training.forward import Forward, ModuleForward, SequenceForward, choose
from agentrl.training.ranks import Peers
from agentrl.training.recompute import blocks_of, recompute
from agentrl.training.sharded.mesh import Place
from agentrl.training.sharded.scatter import fill, share
from agentrl.training.sharded.shard import Options, Root, shard

WAYS: dict[str, Any] = {kind.__name__: kind for kind in (ModuleForward, SequenceForward)}


@dataclass(frozen=True, slots=True)
class Sharded:
    """model: the module, whose parameters are DTensors. forward: the root of FSDP2, to be called like a `Forward` (or
    whatever its way is called like). description: a line for people."""

    model: Any
    forward: Any
    description: str


@dataclass(frozen=True, slots=True)
class Role:
    """How a model is made, and what is computed with it.

    skeleton: called by every rank, on the meta device. load: called by rank 0: the same module with its weights, on the
    CPU; it may raise UserError. study: what rank 0 finds out about the whole model, small and picklable. way: the
    computation over the sharded model, given what was found out; called inside the root's forward, where weights are
    whole in the layer that runs and outside of the layers.
    """

    skeleton: Callable[[], nn.Module]
    load: Callable[[], nn.Module]
    way: Callable[[Any, Any], Callable[..., Any]]
    study: Callable[[Any], Any] = lambda model: None


def build(role: Role, recipe: Recipe, place: Place, trained: bool = True) -> tuple[Any, Root, Any]:
    """The sharded model, its root, and what `study` found. trained: False freezes it.

    Raises UserError on every rank when rank 0 could not load it.
    """
    source, told = _read(role, place)
    with torch.device("meta"):
        model = role.skeleton()
    _match(model, told)
    if not trained:
        model.requires_grad_(False)
    elif recipe.model.checkpointing:
        recompute(model)
    root = Root(model.eval(), role.way(model, told.found))
    options = Options.of(recipe)
    shard(root, blocks_of(model), place, options)
    model.to_empty(device="cpu" if options.offload else place.device)
    fill(model, source, place)
    return model, root, told.found


def build_policy(recipe: Recipe, place: Place) -> Sharded:
    """The model of the recipe, to be trained."""
    return _causal(recipe, place, recipe.model, trained=True)


def build_reference(recipe: Recipe, place: Place) -> Sharded:
    """The same before any training, frozen, without the adapter (a policy that trains one is its own reference)."""
    return _causal(recipe, place, recipe.model.model_copy(update={"lora": None}), trained=False)


def _causal(recipe: Recipe, place: Place, section: ModelSection, trained: bool) -> Sharded:
    on_cpu = section.model_copy(update={"device": "cpu"})

    def way(model: Any, found: tuple[str, str, Any]) -> Forward:
        model.generation_config = found[2]
        forward: Forward = WAYS[found[0]](model)
        if isinstance(forward, SequenceForward):
            forward.most = Peers(device=place.device).most
        return forward

    role = Role(lambda: _skeleton(section), lambda: load_model(on_cpu)[0], way, _study)
    model, root, found = build(role, recipe, place, trained)
    options = Options.of(recipe)
    return Sharded(model, root, f"{found[1]}, {_describe(place, options)}")


def _skeleton(section: ModelSection) -> Any:
    model = load_shape(section)[0]
    if section.lora is not None:
        add_adapter(model, section.lora.model_copy(update={"start": None}), resolve(section.path))
    return model


def _study(model: Any) -> tuple[str, str, Any]:
    forward, description = choose(model, own=False)
    return type(forward).__name__, description, model.generation_config


def _describe(place: Place, options: Options) -> str:
    copies = place.size // place.shards
    spread = f"sharded over {place.shards} workers" + (f" in {copies} copies" if copies > 1 else "")
    return spread + (", offloaded to the CPU" if options.offload else "")


@dataclass(frozen=True, slots=True)
class _Told:
    """What rank 0 tells the others. kinds: each parameter's shape and type by name."""

    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]
    found: Any


def _read(role: Role, place: Place) -> tuple[nn.Module | None, _Told]:
    """On rank 0 the model, elsewhere None."""
    source: nn.Module | None = None
    told: _Told | UserError | None = None
    if place.rank == 0:
        try:
            source = role.load()
            kinds = {name: (tuple(p.shape), p.dtype) for name, p in source.named_parameters()}
            told = _Told(kinds, role.study(source))
        except UserError as error:
            told = error
    told = share(told, place)
    if isinstance(told, UserError):
        raise told
    assert told is not None
    return source, told


def _match(model: nn.Module, told: _Told) -> None:
    """Give the parameters the types that rank 0 found; a file may keep some layers in another precision."""
    own = dict(model.named_parameters())
    if odd := own.keys() ^ told.kinds.keys():
        raise RuntimeError(f"rank {dist.get_rank()} built another model than rank 0: {min(odd)} is not in both")
    for name, parameter in own.items():
        shape, kind = told.kinds[name]
        if tuple(parameter.shape) != shape:
            raise RuntimeError(f"rank {dist.get_rank()} built another model than rank 0: {name} has another shape")
        parameter.data = parameter.data.to(kind)
