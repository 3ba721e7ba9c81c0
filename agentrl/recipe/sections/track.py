"""`track` and `profile`: what a run writes down."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Count, Section, Steps, Unit, listed, named


class ProfileSection(Section):
    """Traces of single steps."""

    steps: Annotated[tuple[int, ...], BeforeValidator(listed), Unit("steps")] = ()
    """Steps to write a trace of, by their numbers."""


class TrajectoriesSection(Section):
    """Which conversations a run writes down."""

    every: Steps = 1
    """Steps between two that are written; 0: none is, and no evaluation either."""
    keep: Annotated[Count, Unit("files")] = 200
    """Newest files of steps, and of evaluations of each split beside the first, that are kept; 0: all."""
    sample: Annotated[Count, Unit("tasks")] = 0
    """Tasks of a step that are written, those that a filter left out among them, with all of their samples; 0: all.
    Evaluations are written whole."""


def _switched(value: Json) -> Json:
    return {"every": int(value)} if isinstance(value, bool) else value


class TrackerSection(Section):
    """A tracker; `trackers: [tensorboard]` is short for `{name: tensorboard}`."""

    name: str
    """An installed tracker (`agentrl trackers` lists them), or module:attribute."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Arguments of the tracker's class, such as project, run and tags."""


class TrackSection(Section):
    """What a run writes besides metrics.jsonl and the display."""

    trackers: tuple[Annotated[TrackerSection, BeforeValidator(named)], ...] = ()
    """Further trackers, such as tensorboard, wandb, mlflow and trackio."""
    trajectories: Annotated[TrajectoriesSection, BeforeValidator(_switched)] = TrajectoriesSection()
    """Samples in trajectories/step_N.parquet and eval_SPLIT_N.parquet; `false` is short for `{every: 0}`."""
