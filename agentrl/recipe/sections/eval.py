"""`eval`: evaluation on held-out tasks."""

from typing import Annotated

from pydantic import AfterValidator, Field

from agentrl.errors import nearest
from agentrl.jsonable import Json
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.section import Positive, Section, Steps, Unit

OTHER = ("temperature", "top_p", "top_k", "max_turns", "max_turn_tokens", "max_tokens")
"""Keys of `rollout` that evaluations may have another value of."""


def _of_rollout(given: dict[str, Json]) -> dict[str, Json]:
    for key in given:
        if key not in OTHER:
            raise ValueError(f"{key!r} is no key that evaluations may have another value of{nearest(key, OTHER)}")
    section = RolloutSection.model_validate(given, strict=True)
    return {key: getattr(section, key) for key in given}


class EvalSection(Section):
    """Evaluation on held-out tasks."""

    every: Steps = 20
    """Steps between evaluations on the split for validation; 0: before and after training only."""
    before: bool = True
    """Evaluate before training too."""
    tasks: Annotated[Positive, Unit("tasks")] = 128
    """Tasks of each split."""
    samples: Annotated[Positive, Unit("samples per task")] = 1
    """Samples of each task."""
    rollout: Annotated[dict[str, Json], AfterValidator(_of_rollout)] = Field(default_factory=dict)
    """Keys of `rollout` that have another value in evaluations, such as {temperature: 0}: temperature, top_p, top_k,
    max_turns, max_turn_tokens and max_tokens."""
    splits: tuple[str, ...] | None = None
    """Held-out splits to evaluate before and after training. null: all but validation."""
