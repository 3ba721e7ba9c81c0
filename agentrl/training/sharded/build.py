"""From a recipe to the sharded model of each role, and how that is computed. Every rank calls these in step."""

from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError
from agentrl.models.load import load_model, load_shape, resolve
from agentrl.models.lora import add_adapter
from agentrl.recipe.schema import ModelSection, Recipe
from agentrl.training.critic import critic_model
from agentrl.training.forward import Forward, ModuleForward, SequenceForward, choose
from agentrl.training.ranks import Peers
from agentrl.training.sequence_parallel import SequenceParallelForward
from agentrl.training.sharded.mesh import Place
from agentrl.training.sharded.role import Role, build
from agentrl.training.sharded.shard import Options
from agentrl.training.values import ModuleValues, SequenceValues, ValueModel


@dataclass(frozen=True, slots=True)
class Sharded:
    """model: the module, whose parameters are DTensors. forward: the root of FSDP2, to be called as one would call the
    way that it computes by. description: a line for people."""

    model: Any
    forward: Any
    description: str


@dataclass(frozen=True, slots=True)
class _Known:
    """Of the whole model. way: the name of the class that computes it exactly."""

    way: str
    description: str
    generation: Any


def build_policy(recipe: Recipe, place: Place) -> Sharded:
    """The model of the recipe, to be trained. forward: a `Forward`."""
    return _causal(recipe, place, recipe.model, trained=True)


def build_reference(recipe: Recipe, place: Place) -> Sharded:
    """The same before any training, frozen, without the adapter (a policy that trains one is its own reference)."""
    return _causal(recipe, place, recipe.model.model_copy(update={"lora": None}), trained=False)


def build_critic(recipe: Recipe, place: Place) -> Sharded:
    """The value model of the recipe's `critic`. forward: a `ValueForward`."""
    section = critic_model(recipe)

    def load() -> tuple[ValueModel, _Known]:
        model, known = _load(section, recipe.train.seed, headless=True)
        return ValueModel(model), known

    def way(model: ValueModel, known: _Known) -> Any:
        if known.way == SequenceForward.__name__:
            return SequenceValues(model, most=Peers(device=place.device).most)
        return ModuleValues(model)

    role = Role(lambda: ValueModel(_skeleton(section)), load, way)
    model, root, known = build(role, recipe, place)
    return Sharded(model, root, f"{known.description}, {_spread(recipe, place)}")


def _causal(recipe: Recipe, place: Place, section: ModelSection, trained: bool) -> Sharded:
    def way(model: Any, known: _Known) -> Forward:
        model.generation_config = known.generation
        return _way(model, known, place)

    role = Role(lambda: _skeleton(section), lambda: _load(section, recipe.train.seed), way)
    model, root, known = build(role, recipe, place, trained)
    return Sharded(model, root, f"{known.description}, {_spread(recipe, place)}")


def _skeleton(section: ModelSection) -> Any:
    model = load_shape(section)[0]
    if section.lora is not None:
        add_adapter(model, section.lora.model_copy(update={"start": None}), resolve(section.path))
    return model


def _load(section: ModelSection, seed: int, headless: bool = False) -> tuple[Any, _Known]:
    model = load_model(section.model_copy(update={"device": "cpu"}), seed, headless=headless)[0]
    forward, description = choose(model, own=False)
    return model, _Known(type(forward).__name__, description, model.generation_config)


def _way(model: Any, known: _Known, place: Place) -> Forward:
    if known.way == SequenceForward.__name__:
        if place.sequence is not None:
            raise UserError(f"cluster.sequence_parallel: the model runs {known.description}; leave it at 1")
        return SequenceForward(model, most=Peers(device=place.device).most)
    return ModuleForward(model) if place.sequence is None else SequenceParallelForward(model, place.sequence)


def _spread(recipe: Recipe, place: Place) -> str:
    copies = place.size // place.shards
    spread = f"sharded over {place.shards} workers" if place.shards > 1 else "whole"
    offloaded = ", offloaded to the CPU" if Options.of(recipe).offload else ""
    return spread + (f", in {copies} copies" if copies > 1 else "") + offloaded
