"""The recipe's reward model over the ranks, frozen."""

from functools import partial
from typing import Any

from agentrl.compute.classifier import (
    ModuleScores,
    SequenceScores,
    classifier_folder,
    classifier_shape,
    load_classifier,
    probe_of,
)
from agentrl.compute.micro_batches import TorchProcessGroup
from agentrl.distributed.fsdp.build import Sharded
from agentrl.distributed.fsdp.choose import Ways
from agentrl.distributed.fsdp.mesh import Place
from agentrl.distributed.fsdp.role import Role, build
from agentrl.distributed.fsdp.source import Source, open_source
from agentrl.models.streamed import stream
from agentrl.recipe.schema import Recipe


def build_reward_model(recipe: Recipe, place: Place) -> Sharded:
    """forward: a `ScoreForward`. Every rank calls this in step. Raises UserError as `load_classifier` does."""

    def load() -> Source:
        kind, folder = type(classifier_shape(recipe)), classifier_folder(str(recipe.rewards.model))
        return open_source(partial(stream, kind, folder, recipe.model), partial(load_classifier, recipe))

    def ways(model: Any) -> Ways:
        slow = SequenceScores(model, TorchProcessGroup(device=place.device).most)
        return Ways(partial(ModuleScores, model), slow, (probe_of(model),), "packed, prompts shared", relative=True)

    built = build(Role(lambda: classifier_shape(recipe), load, ways), recipe, place, trained=False)
    return Sharded(built.model, built.root, built.description)
