"""Says when trainer and engine disagree more than rounding explains, and what that usually comes from."""

from collections.abc import Mapping
from typing import Any

from agentrl.recipe.schema import Recipe

MEAN_BOUND = 0.05
"""Nats of |trainer - engine| a token, in the mean. bfloat16 on both sides stays below about 0.02."""
ESS_BOUND = 0.9
"""Of the effective sample size a token: below it, importance weights spread as they do for another policy."""
SILENT_STEPS = 20
"""Steps between one warning and the next."""


class MismatchWatch:
    """Looks at the metrics of each step; warns at once, and then not again for a while."""

    def __init__(self, recipe: Recipe) -> None:
        self._causes = _causes(recipe)
        self._next = 0

    def warning(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """A line to print, or None."""
        mean, ess = metrics.get("mismatch/logprob_mean", 0.0), metrics.get("mismatch/ess", 1.0)
        if (mean <= MEAN_BOUND and ess >= ESS_BOUND) or step < self._next:
            return None
        self._next = step + SILENT_STEPS
        return (
            f"step {step}: engine and trainer give sampled tokens other probabilities: {mean:.3f} nats in the mean, at "
            f"most {metrics['mismatch/logprob_max']:.2f}, effective sample size {ess:.0%}. "
            f"Likely causes: {self._causes}"
        )


def _causes(recipe: Recipe) -> str:
    """The likeliest first."""
    causes = []
    if recipe.rollout.overlap != "none":
        causes.append(f"rollouts older than the weights (rollout.max_staleness {recipe.rollout.max_staleness})")
    if recipe.engine.name != "local":
        causes.append("weights that did not reach the engine (see weight_version in the trajectories)")
        causes.append(f"another number format there than {_computed(recipe)}, or other kernels")
    causes.append("a learning rate so high that mini-batches of a step differ much")
    if recipe.engine.name == "local" and recipe.model.mixed:
        causes.append(
            f"weights of {recipe.model.dtype} that the engine samples with and the trainer rounds to bfloat16"
        )
    if recipe.engine.name == "local":
        causes.append("an architecture that the engine computes otherwise (dropout, routing)")
    return "; ".join(causes)


def _computed(recipe: Recipe) -> str:
    model = recipe.model
    return f"model.compute {model.compute}" if model.mixed else f"model.dtype {model.dtype}"
