"""Says when the samples of a task do not differ, so that comparing them teaches nothing, and what that comes from."""

from collections.abc import Mapping
from typing import Any

from agentrl.recipe.schema import COMPARING, Recipe

STEPS = 3
"""In a row without anything to learn from, before that is said."""


class ContrastWatch:
    """Looks at the recipe, then at the metrics of each step; warns once a run."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._compares = recipe.algorithm.advantage in COMPARING
        self._greedy = _greedy(recipe)
        self._idle = 0
        self._said = False

    def beforehand(self) -> str | None:
        """A line to print before the first step, or None."""
        if not (self._compares and self._greedy and self._recipe.train.steps):
            return None
        self._said = True
        return (
            f"{self._greedy}, so the samples of a task are one and the same unless its tools draw lots, and "
            f"{self._recipe.algorithm.advantage}, which compares them, has nothing to learn from: sample at "
            "rollout.temperature=1"
        )

    def warning(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """A line to print, or None."""
        self._idle = self._idle + 1 if self._learns_nothing(step, metrics) else 0
        if self._said or self._idle < STEPS:
            return None
        self._said = True
        return (
            f"steps {step - STEPS + 1} to {step}: no two samples of a task differed in their reward, and "
            f"{self._recipe.algorithm.advantage} learned nothing. Likely cause: {self._cause(metrics)}"
        )

    def _learns_nothing(self, step: int, metrics: Mapping[str, Any]) -> bool:
        if metrics["groups/varied"]:
            return False
        waits = self._recipe.critic is not None and step <= self._recipe.critic.warmup_steps
        return self._compares or (metrics["train/samples"] == 0 and not waits)

    def _cause(self, metrics: Mapping[str, Any]) -> str:
        """From what this step shows, the surest sign first."""
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
    """Why sampling draws nothing, or nothing."""
    if recipe.rollout.temperature == 0:
        return "rollout.temperature is 0"
    return "rollout.top_k is 1" if recipe.rollout.top_k == 1 else ""
