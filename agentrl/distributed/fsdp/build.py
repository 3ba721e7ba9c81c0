"""From a recipe to the sharded model of each role, and how that is computed. Every rank calls these in step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentrl.compute.forward import ModuleForward, SequenceForward, local_attention, probe_of
from agentrl.compute.micro_batches import TorchProcessGroup
from agentrl.compute.sequence_parallel import SequenceParallelForward, SequenceParallelValues
from agentrl.compute.value_head import CONFIDENCE_FEATURES, ModuleValues, SequenceValues, ValueModel
from agentrl.distributed.fsdp.choose import Ways
from agentrl.distributed.fsdp.mesh import Place
from agentrl.distributed.fsdp.role import Built, Role, build
from agentrl.distributed.fsdp.shard import Options
from agentrl.distributed.fsdp.source import Source, open_source
from agentrl.errors import UserError
from agentrl.learner.critic import critic_model
from agentrl.models.load import load_model, load_shape, resolve
from agentrl.models.lora import add_adapter
from agentrl.models.streamed import stream_model
from agentrl.recipe.schema import ModelSection, Recipe

NAME = "module with shared-prefix attention"


@dataclass(frozen=True, slots=True)
class Sharded:
    """model: the module, whose parameters are DTensors. forward: the root of FSDP2, to be called as one would call the
    way that it computes by. description: a line for people."""

    model: Any
    forward: Any
    description: str


def build_policy(recipe: Recipe, place: Place) -> Sharded:
    """The model of the recipe, to be trained. forward: a `Forward`."""
    return _causal(recipe, place, recipe.model, trained=True)


def build_reference(recipe: Recipe, place: Place) -> Sharded:
    """The same before any training, frozen, without the adapter (a policy that trains one is its own reference)."""
    return _causal(recipe, place, recipe.model.model_copy(update={"lora": None}), trained=False)


def build_critic(recipe: Recipe, place: Place) -> Sharded:
    """The value model of the recipe's `critic`. forward: a `ValueForward`."""
    section = critic_model(recipe)

    def load() -> Source:
        source = _open(section, recipe.train.seed, headless=True)
        return replace(source, model=ValueModel(source.model))

    def ways(model: ValueModel) -> Ways:
        backbone, group = model.model, place.sequence
        fast = partial(ModuleValues, model) if group is None else partial(SequenceParallelValues, model, group)
        slow = SequenceValues(model, most=TorchProcessGroup(device=place.device).most)
        probe = probe_of(backbone)
        features = torch.zeros(len(probe.predict), CONFIDENCE_FEATURES, device=place.device)
        return _ways(backbone, fast, slow, (probe, features), partial(_telling_apart, model))

    built = build(Role(lambda: ValueModel(_skeleton(section)), load, ways), recipe, place)
    return _shared(recipe, place, built)


def _causal(recipe: Recipe, place: Place, section: ModelSection, trained: bool) -> Sharded:
    def ways(model: Any) -> Ways:
        group = place.sequence
        fast = partial(ModuleForward, model) if group is None else partial(SequenceParallelForward, model, group)
        slow = SequenceForward(model, most=TorchProcessGroup(device=place.device).most)
        return _ways(model, fast, slow, (probe_of(model), 1.0))

    role = Role(lambda: _skeleton(section), lambda: _open(section, recipe.train.seed), ways)
    built = build(role, recipe, place, trained)
    built.model.generation_config = built.known
    return _shared(recipe, place, built)


def _skeleton(section: ModelSection) -> Any:
    model = load_shape(section)[0]
    if section.lora is not None:
        add_adapter(model, section.lora.model_copy(update={"start": None}), resolve(section.path))
    return model


def _open(section: ModelSection, seed: int, headless: bool = False) -> Source:
    whole = section.model_copy(update={"device": "cpu"})
    return open_source(
        partial(stream_model, section, seed, headless=headless),
        lambda: load_model(whole, seed, headless=headless)[0],
    )


def _ways(transformer: Any, fast: Any, slow: Any, probe: tuple[Any, ...], around: Any = None) -> Ways:
    """around: what both are tried in, where they do not give log-probs."""
    ways = Ways(fast, slow, probe, NAME, local_attention(transformer), kernels=transformer)
    return ways if around is None else replace(ways, around=around, relative=True)


@contextmanager
def _telling_apart(model: ValueModel) -> Iterator[None]:
    """Inside the block a value is a fixed mixture of a hidden state's numbers, as the output layer, which begins as 0,
    gives all states the same."""

    def mixed(states: Tensor) -> Tensor:
        mixture = torch.randn(states.shape[-1], 1, generator=torch.Generator().manual_seed(0))
        return states.float() @ mixture.to(states.device) / math.sqrt(len(mixture))

    model.of = mixed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.of


def _shared(recipe: Recipe, place: Place, built: Built) -> Sharded:
    """Raises UserError when the ranks are to share sequences that only one at a time can compute."""
    if place.sequence is not None and isinstance(built.root.way, SequenceForward):
        raise UserError(f"cluster.sequence_parallel: the model runs {built.description}; leave it at 1")
    return Sharded(built.model, built.root, f"{built.description}, {_spread(recipe, place)}")


def _spread(recipe: Recipe, place: Place) -> str:
    copies = place.size // place.shards
    spread = f"sharded over {place.shards} workers" if place.shards > 1 else "whole"
    offloaded = ", offloaded to the CPU" if Options.of(recipe).offload else ""
    return spread + (f", in {copies} copies" if copies > 1 else "") + offloaded
