"""The recipe's reward model over the ranks, frozen."""

from typing import Any

from agentrl.recipe.schema import Recipe
from agentrl.training.ranks import Peers
from agentrl.training.reward_model import ModuleScores, SequenceScores, choose, classifier_shape, load_classifier
from agentrl.training.sharded.build import Sharded
from agentrl.training.sharded.mesh import Place
from agentrl.training.sharded.role import Role, build


def build_reward_model(recipe: Recipe, place: Place) -> Sharded:
    """forward: a `ScoreForward`. Every rank calls this in step. Raises UserError as `load_classifier` does."""

    def load() -> tuple[Any, tuple[str, str]]:
        model = load_classifier(recipe)
        return model, choose(model)

    def way(model: Any, known: tuple[str, str]) -> Any:
        if known[0] == SequenceScores.__name__:
            return SequenceScores(model, Peers(device=place.device).most)
        return ModuleScores(model)

    role = Role(lambda: classifier_shape(recipe), load, way)
    model, root, known = build(role, recipe, place, trained=False)
    return Sharded(model, root, known[1])
