"""`RoleHost`: the roles of a run, in this process or on a cluster. Loop and learner do not know which."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from agentrl.checkpoint.pending import Pending, PendingLike
from agentrl.checkpoint.roles import RoleState, load_roles, save_roles
from agentrl.compute.batch import Batch
from agentrl.compute.classifier import RewardModel
from agentrl.compute.flops import Work, costs, peak_of
from agentrl.compute.forward import ALONE
from agentrl.learner.actor import Actor
from agentrl.learner.critic import Critic
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.learner.reference import Reference
from agentrl.models import lora
from agentrl.recipe.schema import Recipe
from agentrl.weights.source import WeightSource

Floats = npt.NDArray[np.float32]


class Policy(Protocol):
    """What the learner asks of the actor, wherever it is; see `Actor`."""

    @property
    def description(self) -> str: ...

    @property
    def trained(self) -> int: ...

    @property
    def updates(self) -> int: ...

    def logprobs(self, batch: Batch) -> Floats: ...

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics: ...


class Frozen(Protocol):
    """Likewise of the reference."""

    def logprobs(self, batch: Batch) -> Floats: ...


class Values(Protocol):
    """Likewise of the critic; see `Critic`."""

    @property
    def updates(self) -> int: ...

    def values(self, batch: Batch) -> Floats: ...

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics: ...


class Scores(Protocol):
    """Likewise of the reward model; see `RewardModel`."""

    @property
    def description(self) -> str: ...

    def scores(self, batch: Batch) -> Floats: ...


class Roles(Protocol):
    """The roles, ready to work. reference, critic, reward_model: None where the recipe has none."""

    @property
    def actor(self) -> Policy: ...

    @property
    def reference(self) -> Frozen | None: ...

    @property
    def critic(self) -> Values | None: ...

    @property
    def reward_model(self) -> Scores | None: ...


class RoleHost(Roles, Protocol):
    """The roles, and where they are."""

    @property
    def here(self) -> bool:
        """Whether they work in this process."""
        ...

    @property
    def device(self) -> Any:
        """Of the tensors in this process."""
        ...

    @property
    def work(self) -> Mapping[str, Work]:
        """What the passes of each role cost, and its devices."""
        ...

    def measure(self) -> dict[str, float]:
        """The memory of roles in other processes since the last call: memory/<phase>_<role>_gb."""
        ...

    def record(self, step: int, folder: Path) -> None:
        """Roles in other processes write traces of what they do from now on, as of step `step`. 0: no more."""
        ...

    def describe(self) -> list[str]:
        """Lines for the start of a run."""
        ...

    def weights(self) -> WeightSource | None:
        """Return what the engine is given once the policy has changed; None where it shares the policy's weights."""
        ...

    def save(self, folder: Path) -> PendingLike:
        """Write what is trained into `folder`, as `save_roles` does; the roles may go on learning at once."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse. Raises UserError."""
        ...

    def close(self) -> None:
        """Let go of all of it."""
        ...


def forward_lines(description: str) -> list[str]:
    """Return lines for the start of a run: how the policy is computed, and a warning where that is slow."""
    lines = [f"training forward: {description}"]
    if description.startswith(ALONE):
        lines.append(
            "warning: training is slow: prompts that samples share are computed for each, and the logits of a whole "
            "sequence stand at once; the line above says why"
        )
    return lines


class LocalRoles:
    """In this process, on `model`, in place."""

    def __init__(self, recipe: Recipe, model: Any, tokenizer: Any = None) -> None:
        self.model, self._tokenizer, self._recipe = model, tokenizer, recipe
        self.here, self.device = True, next(model.parameters()).device
        self.actor = Actor(model, recipe)
        self.reference = Reference.alone(recipe, model, self.actor.forward) if recipe.algorithm.kl_coef > 0 else None
        self.critic = Critic(recipe) if recipe.critic is not None else None
        self.reward_model = RewardModel(recipe) if recipe.rewards.model is not None else None

    @property
    def work(self) -> dict[str, Work]:
        peak = peak_of(self.model, self._recipe, self.device)
        return {name: Work(cost, peak, "here") for name, cost in costs(self).items()}

    def measure(self) -> dict[str, float]:
        return {}

    def record(self, step: int, folder: Path) -> None:
        """There are none."""

    @property
    def roles(self) -> Mapping[str, RoleState]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def describe(self) -> list[str]:
        lines = forward_lines(self.actor.description)
        lines += [f"trained: {lora.describe(self.model)}"] if lora.layers(self.model) else []
        lines += [f"critic: {self.critic.description}"] if self.critic is not None else []
        return lines + ([f"reward model: {self.reward_model.description}"] if self.reward_model is not None else [])

    def weights(self) -> None:
        return None

    def save(self, folder: Path) -> Pending:
        return save_roles(self.roles, folder, tokenizer=self._tokenizer)

    def load(self, folder: Path) -> None:
        load_roles(self.roles, folder)

    def close(self) -> None:
        """Nothing is held."""
