"""`RoleHost`: the contract of whoever holds the roles of a run. `LocalRoles` holds them in this process, `RayRoles` on
a cluster; loop and learner do not know which.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from agentrl.checkpoint.pending import Pending, PendingLike
from agentrl.checkpoint.roles import RoleState, load_roles, save_roles
from agentrl.compute.batch import Batch
from agentrl.compute.classifier import RewardModel
from agentrl.compute.flops import RoleCost, costs, peak_of
from agentrl.compute.forward import SEQUENTIAL
from agentrl.errors import UserError, call_plugin
from agentrl.learner.actor import Actor
from agentrl.learner.critic import Critic
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.learner.reference import Reference
from agentrl.learner.teacher import Teacher, TeacherRole, compared_whole, local_teachers
from agentrl.models import lora
from agentrl.plugins.registry import load, with_arguments
from agentrl.recipe.schema import Recipe
from agentrl.weights.source import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Floats = npt.NDArray[np.float32]


class ActorRole(Protocol):
    """What the learner needs of the actor, in whatever process it runs. `Actor` is one."""

    @property
    def description(self) -> str:
        """How log-probs are computed, in one line."""

    @property
    def trained(self) -> int:
        """Number of trained parameters, over all ranks."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates that changed the weights, or began to."""

    def begin_stage(self, weight_decay: float, muon: float | None = None) -> None:
        """Go on with a new optimizer; see `Actor.begin_stage`."""

    def logprobs(self, batch: Batch) -> Floats:
        """The log-probs of the sampled tokens under the current weights, float32 [T], 0 elsewhere."""

    def entropies(self, batch: Batch) -> Floats:
        """The entropy of what each sampled token was drawn from, float32 [T], 0 elsewhere."""

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update at learning rate `rate`; return its metrics. See `Actor.update` for the columns."""


class ReferenceRole(Protocol):
    """What the learner needs of the reference policy. `Reference` is one."""

    def logprobs(self, batch: Batch) -> Floats:
        """The log-probs of the sampled tokens, float32 [T], 0 elsewhere."""

    def follow(self, keep: float) -> None:
        """Make the weights keep * themselves + (1 - keep) * the policy's; with 0, a copy of the policy's. Called
        after a step, only where the recipe has `algorithm.reference`."""


class CriticRole(Protocol):
    """What the learner needs of the critic. `Critic` is one."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates that changed the weights, or began to."""

    def values(self, batch: Batch) -> Floats:
        """The value of the state before each sampled token, float32 [T], 0 elsewhere."""

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update at learning rate `rate`; return its metrics. See `Critic.update` for the
        columns."""


class RewardModelRole(Protocol):
    """What rollouts need of the reward model. `RewardModel` is one."""

    @property
    def description(self) -> str:
        """How scores are computed, in one line."""

    def scores(self, batch: Batch) -> Floats:
        """The score of each sample, float32 [S]."""


class Roles(Protocol):
    """The roles of a run, ready for calls."""

    @property
    def actor(self) -> ActorRole:
        """The policy that is trained."""

    @property
    def reference(self) -> ReferenceRole | None:
        """The policy of a KL term, which is not trained; None if the recipe has none."""

    @property
    def critic(self) -> CriticRole | None:
        """The value model; None if the recipe has none."""

    @property
    def reward_model(self) -> RewardModelRole | None:
        """The model that scores trajectories; None if the recipe has none."""

    @property
    def teachers(self) -> Mapping[int, TeacherRole]:
        """The teachers in the trainer's processes, by the index of their environment in `env.mix` (0 without one)."""

    @property
    def pools(self) -> Mapping[str, str]:
        """The name of the pool of workers that holds each role ("actor", "reference", ...). Roles of different pools
        are called at the same time, from different threads; roles that are not named count as one pool."""


class RoleHost(Roles, Protocol):
    """The roles, with what the run needs to know of the processes and devices that hold them."""

    @property
    def in_process(self) -> bool:
        """Whether the roles compute in this process."""

    @property
    def device(self) -> Any:
        """The device of the roles' tensors in this process; "cpu" if the roles are in other processes."""

    @property
    def role_costs(self) -> Mapping[str, RoleCost]:
        """The FLOPs of each role's passes and the peak of its devices, by the name of the role."""

    def measure(self) -> dict[str, float]:
        """memory/<phase>_<role>_gb: the peak memory, since the last call, of roles in other processes."""

    def trace(self, step: int, folder: Path) -> None:
        """Let roles in other processes write traces of step `step` into `folder` from now on; step 0 ends that."""

    def describe(self) -> list[str]:
        """Lines for the start of a run: how each role computes."""

    def weights(self) -> WeightSource | None:
        """The source that the engine reads after an update; None if it shares the policy's weights."""

    def save(self, folder: Path) -> PendingLike:
        """Start to write the trained roles into `folder`, as `save_roles` does; they may go on learning at once."""

    def load(self, folder: Path) -> None:
        """Load the roles from what `save` wrote. Raises UserError: it is damaged, or of another model."""

    def close(self) -> None:
        """Release the roles and their processes; also after an error."""


def make_trainer(
    recipe: Recipe, begins: Recipe, logs: Path, say: Callable[[str], None], phase: Callable[[str], None]
) -> RoleHost:
    """Make the role host that `cluster.trainer` names, of whatever make.

    begins: the recipe with the model that the policy starts from. logs: a folder for the output of its processes. say:
    prints a line for people. phase: says what is being waited for.

    Raises UserError: it is not installed, it failed, it does not take its arguments, or what it gave is no `RoleHost`.
    """
    section = recipe.cluster.trainer
    assert section is not None
    make, what = load("trainers", section.name), f"cluster.trainer {section.name!r}"
    if not callable(make):
        kind = type(make).__name__
        raise UserError(f"{what} is of type {kind}; expected a class, or a function that makes a RoleHost")
    made = with_arguments(make, 5, section.args, "cluster.trainer.args")
    host: RoleHost = call_plugin(what, made, recipe, begins, logs, say, phase)
    wanted = {member for kind in (Roles, RoleHost) for member in vars(kind) if not member.startswith("_")}
    if absent := sorted(member for member in wanted if not _offers(host, member)):
        raise UserError(f"{what} made {type(host).__name__}, which lacks {', '.join(absent)} of a RoleHost")
    return host


def _offers(host: object, member: str) -> bool:
    """Whether it is there, without calling a property."""
    try:
        inspect.getattr_static(host, member)
    except AttributeError:
        return False
    return True


USUAL = "training forward: own forward"
"""The line of `forward_lines` that says that nothing is out of the ordinary."""


def forward_lines(description: str) -> list[str]:
    """Lines for the start of a run: how the policy is computed, and a warning if that is slow."""
    lines = [f"training forward: {description}"]
    if description.startswith(SEQUENTIAL):
        lines.append(
            "warning: training is slow: prompts that samples share are computed for each, and the logits of a whole "
            "sequence stand at once; the line above says why"
        )
    return lines


class LocalRoles:
    """The role host of this process. The actor trains `model` in place."""

    def __init__(self, recipe: Recipe, model: "PreTrainedModel") -> None:
        self.model, self._recipe = model, recipe
        self.in_process, self.device = True, next(model.parameters()).device
        self.pools: dict[str, str] = {}
        self.actor = Actor(model, recipe)
        self.reference = (
            Reference.in_process(recipe, model, self.actor.forward) if recipe.algorithm.kl_coef > 0 else None
        )
        self.teachers: Mapping[int, Teacher] = local_teachers(
            recipe, lambda t: Teacher.in_process(t, recipe, self.actor.forward)
        )
        """Teachers in this process, by the index of their environment in `env.mix`."""
        self.actor.teachers = compared_whole(self.teachers)
        self.critic = Critic(recipe) if recipe.critic is not None else None
        self.reward_model = RewardModel(recipe) if recipe.rewards.model is not None else None

    @property
    def role_costs(self) -> dict[str, RoleCost]:
        """The FLOPs of each role's passes; all roles share one device."""
        peak = peak_of(self.model, self._recipe, self.device)
        return {name: RoleCost(cost, peak, "this process") for name, cost in costs(self).items()}

    def measure(self) -> dict[str, float]:
        """Nothing: no role is in another process."""
        return {}

    def trace(self, step: int, folder: Path) -> None:
        """Do nothing: no role is in another process."""

    @property
    def roles(self) -> Mapping[str, RoleState]:
        """The roles whose weights change, by name."""
        moving = self.reference.state if self.reference is not None else None
        found: dict[str, RoleState | None] = {"actor": self.actor, "critic": self.critic, "reference": moving}
        return {name: role for name, role in found.items() if role is not None}

    def describe(self) -> list[str]:
        """Lines for the start of a run: how each role computes."""
        lines = forward_lines(self.actor.description)
        lines += [f"trained: {lora.describe(self.model)}"] if lora.layers(self.model) else []
        lines += [f"critic: {self.critic.description}"] if self.critic is not None else []
        return lines + ([f"reward model: {self.reward_model.description}"] if self.reward_model is not None else [])

    def weights(self) -> None:
        """None: an engine in this process shares the policy's weights."""

    def save(self, folder: Path) -> Pending:
        """Start to write the trained roles into `folder` (see `save_roles`)."""
        return save_roles(self.roles, folder)

    def load(self, folder: Path) -> None:
        """Load the trained roles from what `save` wrote. Raises UserError."""
        load_roles(self.roles, folder)

    def close(self) -> None:
        """Do nothing: no process or connection is open."""
