"""Monitors of a run's metrics. Each warns with the likely causes.

`MismatchMonitor`: engine and trainer disagree by more than rounding. `ContrastMonitor`: the samples of each task have
equal rewards, so that comparing them teaches nothing.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.recipe.schema import COMPARING, Recipe

MEAN_BOUND = 0.05
"""Largest mean of |trainer - engine|, in nats a token. With bfloat16 on both sides it stays below about 0.02."""
ESS_BOUND = 0.9
"""Smallest effective sample size, as a share of the tokens. Below it, importance weights spread as they do between
different policies."""
SILENT_STEPS = 20
"""Steps between two warnings of a mismatch."""
EQUAL_STEPS = 3
"""Consecutive steps without anything to learn after which the run is warned."""


class MismatchMonitor:
    """Warns when engine and trainer compute different log-probs; at once, then not again for SILENT_STEPS steps."""

    def __init__(self, recipe: Recipe) -> None:
        self._causes = _mismatch_causes(recipe)
        self._next = 0

    def warning(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return a line to print after step `step` with these metrics, or None."""
        mean, ess = metrics.get("mismatch/logprob_mean", 0.0), metrics.get("mismatch/ess", 1.0)
        if (mean <= MEAN_BOUND and ess >= ESS_BOUND) or step < self._next:
            return None
        self._next = step + SILENT_STEPS
        return (
            f"step {step}: engine and trainer give sampled tokens other probabilities: {mean:.3f} nats in the mean, at "
            f"most {metrics['mismatch/logprob_max']:.2f}, effective sample size {ess:.0%}. "
            f"Likely causes: {self._causes}"
        )


def _mismatch_causes(recipe: Recipe) -> str:
    """Return what may cause a mismatch under this recipe, the likeliest first."""
    causes = []
    if recipe.rollout.overlap != "none":
        causes.append(f"rollouts older than the weights (rollout.max_staleness {recipe.rollout.max_staleness})")
    if recipe.engine.name != "local":
        causes.append("weights that did not reach the engine (see weight_version in the trajectories)")
        causes.append(f"another number format there than {_number_format(recipe)}, or other kernels")
    causes.append("a learning rate so high that mini-batches of a step differ much")
    if recipe.engine.name == "local" and recipe.model.mixed:
        causes.append(
            f"weights of {recipe.model.dtype} that the engine samples with and the trainer rounds to bfloat16"
        )
    if recipe.engine.name == "local":
        causes.append("an architecture that the engine computes otherwise (dropout, routing)")
    return "; ".join(causes)


def _number_format(recipe: Recipe) -> str:
    """Return the recipe key of the trainer's number format, with its value."""
    model = recipe.model
    return f"model.compute {model.compute}" if model.mixed else f"model.dtype {model.dtype}"


class ContrastMonitor:
    """Warns once a run when the samples of each task have equal rewards, so that nothing can be learned from them."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._compares = recipe.algorithm.advantage.name in COMPARING
        self._greedy = _greedy(recipe)
        self._equal_steps = 0
        self._warned = False

    def initial_warning(self) -> str | None:
        """Return a line to print before the first step, or None."""
        if not (self._compares and self._greedy and self._recipe.train.steps):
            return None
        self._warned = True
        return (
            f"{self._greedy}, so the samples of a task are one and the same unless its tools draw lots, and "
            f"{self._recipe.algorithm.advantage.name}, which compares them, has nothing to learn from: sample at "
            "rollout.temperature=1"
        )

    def warning(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return a line to print after step `step` with these metrics, or None."""
        self._equal_steps = self._equal_steps + 1 if self._learns_nothing(step, metrics) else 0
        if self._warned or self._equal_steps < EQUAL_STEPS:
            return None
        self._warned = True
        return (
            f"steps {step - EQUAL_STEPS + 1} to {step}: no two samples of a task differed in their reward, and "
            f"{self._recipe.algorithm.advantage.name} learned nothing. Likely cause: {self._cause(metrics)}"
        )

    def _learns_nothing(self, step: int, metrics: Mapping[str, Any]) -> bool:
        if metrics["groups/varied"]:
            return False
        waits = self._recipe.critic is not None and step <= self._recipe.critic.warmup_steps
        return self._compares or (metrics["train/samples"] == 0 and not waits)

    def _cause(self, metrics: Mapping[str, Any]) -> str:
        """Return the likely cause by the metrics of this step; the surest sign is checked first."""
        played, failed = metrics["rollout/trajectories"], metrics["rollout/failed"]
        if metrics["groups/few"] > metrics["groups/equal"]:
            return f"{failed} samples of the step failed, which left fewer than two of most tasks"
        if self._greedy:
            return self._greedy
        cut = metrics["stop/length"] + metrics["stop/max_turns"] + metrics["stop/timeout"]
        if 2 * cut > played:
            return (
                f"{cut} of {played} samples were cut off (rollout.max_turn_tokens, max_tokens, max_turns or timeout) "
                "before they could earn anything"
            )
        return (
            f"a reward that is the same for all, or tasks far too hard or too easy for this model (mean reward "
            f"{metrics['reward/mean']:.3g}); look at trajectories/"
        )


def _greedy(recipe: Recipe) -> str:
    """Return why sampling is deterministic under this recipe; empty if it is not."""
    if recipe.rollout.temperature == 0:
        return "rollout.temperature is 0"
    return "rollout.top_k is 1" if recipe.rollout.top_k == 1 else ""
