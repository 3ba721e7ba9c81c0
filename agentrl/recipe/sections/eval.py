"""`eval`: evaluation on held-out tasks."""

from typing import Annotated

from pydantic import Field

from agentrl.recipe.sections.section import AtLeast0, Count, Positive, Section, Steps, Tokens, Unit


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
    temperature: AtLeast0 | None = None
    """Sampling temperature. null: that of rollout, as for the keys up to max_tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[Count, Unit("tokens")] | None = None
    """Sample from this many of the likeliest tokens; 0: from all."""
    max_turns: Annotated[Positive, Unit("turns")] | None = None
    """Assistant turns of a request."""
    max_turn_tokens: Tokens | None = None
    """Tokens that the model may sample in one turn."""
    max_tokens: Tokens | None = None
    """Length of a whole conversation, prompt included."""
    splits: tuple[str, ...] | None = None
    """Held-out splits to evaluate before and after training. null: all but validation."""
