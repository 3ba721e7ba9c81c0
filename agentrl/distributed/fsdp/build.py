"""Build the sharded model of each role from a recipe. Every rank calls these functions, in the same order."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.compute.classifier import (
    ModuleScores,
    SequenceScores,
    classifier_folder,
    classifier_skeleton,
    load_classifier,
)
from agentrl.compute.classifier import probe_of as classifier_probe
from agentrl.compute.forward import ModuleForward, SequenceForward, probe_of, unsupported_attention, vision_of
from agentrl.compute.micro_batches import TorchProcessGroup
from agentrl.compute.sequence_parallel import SequenceParallelForward, SequenceParallelValues
from agentrl.compute.tree_attention import faults
from agentrl.compute.value_head import CONFIDENCE_FEATURES, ModuleValues, SequenceValues, ValueModel
from agentrl.distributed.fsdp.choose import Candidates
from agentrl.distributed.fsdp.mesh import ParallelContext
from agentrl.distributed.fsdp.role import Built, Role, build
from agentrl.distributed.fsdp.scatter import Source, open_source
from agentrl.distributed.fsdp.shard import Options
from agentrl.errors import UserError
from agentrl.learner.critic import critic_model
from agentrl.models.load import load_model, load_skeleton, resolve
from agentrl.models.lora import add_adapter
from agentrl.models.streamed import stream, stream_model
from agentrl.models.vision import Vision
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "module with shared-prefix attention"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The model of one role over the ranks."""

    model: Any
    """The module; its parameters are DTensors."""
    forward: Any
    """The root of FSDP2, called like the computation that it wraps."""
    description: str
    """A line for people."""


def build_policy(recipe: Recipe, context: ParallelContext) -> Sharded:
    """Build the policy, to be trained. forward: a `Forward`."""
    return _causal(recipe, context, recipe.model, trained=True)


def build_reference(recipe: Recipe, context: ParallelContext) -> Sharded:
    """Build the policy as it was before training, frozen, without an adapter (with one it is its own reference)."""
    return _causal(recipe, context, recipe.model.frozen, trained=False)


def build_teacher(recipe: Recipe, context: ParallelContext, section: ModelSection) -> Sharded:
    """Build a frozen model that the policy is distilled from. forward: a `Forward`."""
    return _causal(recipe, context, section, trained=False)


def build_critic(recipe: Recipe, context: ParallelContext) -> Sharded:
    """Build the value model of the recipe's `critic`. forward: a `ValueForward`."""
    section = critic_model(recipe)

    def load() -> Source:
        source = open_causal(section, recipe.train.seed, headless=True)
        return replace(source, model=ValueModel(source.model))

    def candidates(model: ValueModel) -> Candidates:
        backbone, agreed = model.model, _agreed(model, context)
        slow = SequenceValues(model, max_over_ranks=agreed)
        fast: Any = partial(ModuleValues, model, max_over_ranks=agreed)
        if context.sequence is not None:
            fast = partial(SequenceParallelValues, model, context.sequence, _sight(model))
        probe = probe_of(backbone)
        features = torch.zeros(len(probe.predict), CONFIDENCE_FEATURES, device=context.device)
        return _candidates(backbone, fast, slow, (probe, features), partial(_distinguishing_states, model))

    built = build(Role(lambda: ValueModel(_skeleton(section)), load, candidates), recipe, context)
    return _sharded(recipe, context, built)


def build_reward_model(recipe: Recipe, context: ParallelContext) -> Sharded:
    """Build the recipe's reward model, frozen. forward: a `ScoreForward`. Raises as `load_classifier` does."""

    def load() -> Source:
        kind, folder = type(classifier_skeleton(recipe)), classifier_folder(str(recipe.rewards.model))
        return open_source(partial(stream, kind, folder, recipe.model.frozen), partial(load_classifier, recipe))

    def candidates(model: "PreTrainedModel") -> Candidates:
        agreed = _agreed(model, context)
        fast, slow = partial(ModuleScores, model, agreed), SequenceScores(model, agreed)
        return Candidates(fast, slow, (classifier_probe(model),), "packed, prompts shared", relative=True)

    built = build(Role(lambda: classifier_skeleton(recipe), load, candidates), recipe, context, trained=False)
    return Sharded(built.model, built.root, built.description)


def _causal(recipe: Recipe, context: ParallelContext, section: ModelSection, trained: bool) -> Sharded:
    def candidates(model: "PreTrainedModel") -> Candidates:
        agreed = _agreed(model, context)
        slow = SequenceForward(model, max_over_ranks=agreed)
        fast: Any = partial(ModuleForward, model, max_over_ranks=agreed)
        if context.sequence is not None:
            fast = partial(SequenceParallelForward, model, context.sequence, _sight(model))
        found = _candidates(model, fast, slow, (probe_of(model), 1.0))
        return replace(found, other=(probe_of(model, other=True), 1.0))

    role = Role(lambda: _skeleton(section), lambda: open_causal(section, recipe.train.seed), candidates)
    built = build(role, recipe, context, trained)
    built.model.generation_config = built.known
    return _sharded(recipe, context, built)


def _skeleton(section: ModelSection) -> Any:
    model = load_skeleton(section)[0]
    if section.lora is not None:
        add_adapter(model, section.lora.model_copy(update={"start": None}), resolve(section.path))
    return model


def open_causal(section: ModelSection, seed: int, headless: bool = False) -> Source:
    """Open the weights of a causal model, to be read one by one. seed, headless: see `load_model`. Raises UserError."""
    whole = section.model_copy(update={"device": "cpu"})
    return open_source(
        partial(stream_model, section, seed, headless=headless), lambda: load_model(whole, seed, headless=headless)[0]
    )


def _candidates(transformer: Any, fast: Any, slow: Any, probe: tuple[object, ...], around: Any = None) -> Candidates:
    """around: the context that both are compared in, if they do not give log-probs."""
    found = Candidates(fast, slow, probe, NAME, unsupported_attention(transformer), kernels=transformer)
    return found if around is None else replace(found, around=around, relative=True)


def _agreed(model: nn.Module, context: ParallelContext) -> Callable[[int], int]:
    """What gives the maximum of a count over the ranks. Those of a model that sees ask for it in each pass: by
    way of the CPU, so that none waits for its device."""
    return TorchProcessGroup("cpu" if Vision.of(model) else context.device).max_over_ranks


def _sight(model: nn.Module) -> Vision | None:
    """The vision of a model whose ranks share sequences; None: it reads text."""
    return vision_of(model, TorchProcessGroup("cpu").max_over_ranks)


@contextmanager
def _distinguishing_states(model: ValueModel) -> Iterator[None]:
    """Make values a fixed mixture of the hidden states inside the block: the output layer, which begins as 0, gives all
    states the same value."""

    def mixed(states: Tensor) -> Tensor:
        mixture = torch.randn(states.shape[-1], 1, generator=torch.Generator().manual_seed(0))
        return states.float() @ mixture.to(states.device) / math.sqrt(len(mixture))

    model.of_states = mixed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.of_states


def _sharded(recipe: Recipe, context: ParallelContext, built: Built) -> Sharded:
    """Complete the description. Raises UserError if ranks share sequences that the model computes singly."""
    if context.sequence is not None and isinstance(built.root.computation, SequenceForward):
        raise UserError(f"cluster.sequence_parallel: the model runs {built.description}; leave it at 1")
    return Sharded(built.model, built.root, f"{built.description}, {_spread(recipe, context)}")


def _spread(recipe: Recipe, context: ParallelContext) -> str:
    copies, layers = context.size // context.shards, context.layers
    spread = f"sharded over {context.shards} workers" if context.shards > 1 else "whole"
    offloaded = ", offloaded to the CPU" if Options.of(recipe).offload else ""
    spread += f", matrices divided by {layers.tensor}" if layers is not None and layers.tensor > 1 else ""
    spread += f", experts by {layers.expert}" if layers is not None and recipe.cluster.expert_parallel > 1 else ""
    spread += ", in bfloat16" if Options.of(recipe).compute == torch.bfloat16 else ""
    spread += f", attention in buckets, which is slow ({why})" if (why := faults(context.device)) else ""
    return spread + (f", in {copies} copies" if copies > 1 else "") + offloaded
