"""The keys of a recipe: each with its type, its unit, a default that was tried and what it means.

Everything here is read by code, and an unknown key is an error. The docstring below a key is its description: errors
and `docs/reference/recipe.md` (`agentrl/recipe/reference.py`) take it from there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from agentrl.errors import nearest
from agentrl.jsonable import Json
from agentrl.recipe.document import Key, Reference
from agentrl.recipe.reader import read_recipe
from agentrl.recipe.secrets import masked, plain, secret_values
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.algorithm import (
    COMPARING,
    AlgorithmSection,
    CriticSection,
    StreamsSection,
    TeacherSection,
    teacher_of,
)
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.env import DataSection, EnvSection, RewardsSection, ToolSection
from agentrl.recipe.sections.eval import EvalSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import EngineSection, RolloutSection
from agentrl.recipe.sections.section import Section, named
from agentrl.recipe.sections.sft import NewModel, RewardModelSection, SftSection
from agentrl.recipe.sections.start import StartSection, started
from agentrl.recipe.sections.track import ProfileSection, TrackSection
from agentrl.recipe.sections.train import TrainSection
from agentrl.recipe.sections.workspace import WorkspaceSection, provided


class Recipe(Section):
    """A whole run, checked. `Recipe.load(path, overrides)` reads one."""

    model: ModelSection = ModelSection()
    env: EnvSection = EnvSection()
    data: DataSection = DataSection()
    tools: tuple[Annotated[ToolSection, BeforeValidator(named)], ...] = ()
    """Tools that every task offers."""
    rewards: RewardsSection = RewardsSection()
    rollout: RolloutSection = RolloutSection()
    workspace: Annotated[WorkspaceSection | None, BeforeValidator(provided)] = None
    """Files and processes that each rollout has to itself. null: none."""
    agent: Annotated[AgentSection | None, BeforeValidator(named)] = None
    """Who holds the conversation; null: the built-in driver, which calls the tools that the model asks for."""
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    start: Annotated[StartSection | None, BeforeValidator(started)] = None
    """What is taught before the first step. null: nothing."""
    sft: SftSection | None = None
    """Supervised fine-tuning, for `agentrl sft`, and how `start` teaches. null: none."""
    teacher: Annotated[TeacherSection | None, BeforeValidator(teacher_of)] = None
    """Teaches the sampled tokens (algorithm.streams.distill). null: none."""
    teachers: dict[str, Annotated[TeacherSection, BeforeValidator(teacher_of)]] = Field(default_factory=dict)
    """Teachers by a name each, with the keys of `teacher`, for environments of a mixture (env.mix.N.teacher)."""
    critic: CriticSection | None = None
    """Train a critic; `{}` takes the defaults of its keys. null: none."""
    reward_model: RewardModelSection | None = None
    """Training of a reward model, for `agentrl reward-model`. null: none."""
    cluster: ClusterSection = ClusterSection()
    track: TrackSection = TrackSection()
    profile: ProfileSection = ProfileSection()
    output: str | None = None
    """The run folder. null: runs/<recipe>-<number>."""
    _references: dict[Key, Reference] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = ()) -> "Recipe":
        """Read, extend, override and check a recipe: a file, the name of one that ships, or None for the defaults.

        overrides: `rollout.n=16`, `env.args.names=[a, b]`, `tools.0.args.max_operations=4` (or
        `tools.calculator.args...`); the value is YAML and replaces what stands at its key.
        Raises UserError: one line with the key's path and what to do.
        """
        recipe, references = read_recipe(cls, path, overrides)
        recipe._references = dict(references)
        return recipe

    def written(self) -> dict[str, Json]:
        """Every key as JSON values, with a Reference where a `${VAR}` stood and its value is still the same.

        Write, print and send this, not `model_dump`: values of variables may be secrets.
        """
        tree = self.model_dump(mode="json")
        for key, reference in self._references.items():
            _refer(tree, key, reference)
        return tree

    def shown(self) -> dict[str, Json]:
        """Every key as JSON values for people: secrets hidden, `${VAR}` where one stood."""
        found: dict[str, Json] = plain(masked(self.written()))
        return found

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values of `${VAR}` that must not be written down anywhere."""
        return secret_values(self._references)

    @property
    def roles(self) -> list[str]:
        """The parts that do tensor work beside the engine: actor; reference, critic, reward_model if used."""
        used = {
            "actor": True,
            "reference": self.algorithm.kl_coef > 0,
            "critic": self.critic is not None,
            "reward_model": self.rewards.model is not None,
        }
        return [role for role, needed in used.items() if needed]

    @property
    def new_model(self) -> NewModel | None:
        """The model that `start` makes from nothing and teaches; None: it teaches `model.path`, or there is none."""
        return self.sft.new_model if self.start is not None and self.sft is not None else None

    @model_validator(mode="after")
    def _combinations(self) -> "Recipe":
        if twice := {t.name for t in self.tools if self.tools.count(t) > 1}:
            raise ValueError(f"tools: {', '.join(sorted(twice))} is listed twice")
        if self.agent is not None and self.rollout.compact is not None:
            raise ValueError("rollout.compact has no effect beside agent, which holds its conversations itself")
        if self.algorithm.reference is not None and self.model.lora is not None:
            raise ValueError(
                "algorithm.reference: with model.lora the reference is the model without its adapter, which cannot "
                "follow the policy: leave out one of the two"
            )
        self._check_cluster()
        if self.start is not None and self.sft is not None:
            if self.sft.source:
                raise ValueError("sft.source has no effect beside start, which says what is taught: leave out one")
            if self.sft.new_model and self.start.source is not None:
                raise ValueError("sft.new_model learns its tokenizer from demonstrations: set start: demonstrations")
        most = self.train.steps if self.data.epochs is None else max(self.profile.steps, default=0)
        if never := [step for step in self.profile.steps if not 1 <= step <= most]:
            raise ValueError(f"profile.steps: there is no step {never[0]}; train.steps is {self.train.steps}")
        if self.engine.sleep and self.rollout.overlap != "none":
            raise ValueError("engine.sleep stops sampling during training, rollout.overlap does not: choose one")
        if self.rollout.max_turn_tokens > self.rollout.max_tokens:
            raise ValueError("rollout.max_turn_tokens is larger than rollout.max_tokens, so it can never be reached")
        if self.train.mini_batches > self.rollout.n * self.rollout.tasks:
            raise ValueError("train.mini_batches is larger than rollout.n x rollout.tasks: some would be empty")
        self._check_streams()
        compared = self.algorithm.advantage.name in COMPARING and any(p.policy.ever for p in self.streams)
        if self.rollout.n < 2 and compared and self.train.steps > 0:
            name = self.algorithm.advantage.name
            raise ValueError(f"rollout.n is 1, but {name} compares the samples of a task: use 2 or more")
        return self

    @property
    def streams(self) -> tuple[StreamsSection, ...]:
        """The weights of the token streams of each environment of the mixture; of the only one without."""
        whole = self.algorithm.streams
        return tuple(whole.changed(**part.streams) for part in self.env.mix) or (whole,)

    @property
    def part_teachers(self) -> tuple[TeacherSection | None, ...]:
        """The teacher of each environment of the mixture, of the only one without; None where nothing is
        distilled."""
        names = [part.teacher for part in self.env.mix] or [None]
        own = [self.teacher if name is None else self.teachers[name] for name in names]
        return tuple(t if s.distill.ever else None for t, s in zip(own, self.streams, strict=True))

    def _check_streams(self) -> None:
        for number, part in enumerate(self.env.mix):
            if part.teacher is not None and part.teacher not in self.teachers:
                known = nearest(part.teacher, self.teachers) or ": `teachers` names none"
                raise ValueError(f"env.mix.{number}.teacher: no teacher {part.teacher!r}{known}")
        for streams, teacher in zip(self.streams, self.part_teachers, strict=True):
            if streams.distill.ever and teacher is None:
                raise ValueError("algorithm.streams.distill needs a teacher: name a model's path or a URL in `teacher`")
            if not (streams.policy.ever or streams.imitate.ever or streams.distill.ever):
                raise ValueError("algorithm.streams: all weights are 0, so nothing would be learned")
        if self.cluster.sequence_parallel > 1 and any(
            t is not None and not t.served and t.compared != "sampled" for t in self.part_teachers
        ):
            raise ValueError(
                "cluster.sequence_parallel gives log-probs of sampled tokens alone: set teacher.form: sampled"
            )
        if any(t is not None and t not in self.part_teachers for t in (self.teacher, *self.teachers.values())):
            raise ValueError("a teacher has no effect where algorithm.streams.distill is 0: give it a weight")

    def _check_cluster(self) -> None:
        cluster = self.cluster
        if "activations" in cluster.offload and not self.model.checkpointing:
            raise ValueError(
                "cluster.offload: activations moves what activation checkpointing keeps: set model.checkpointing, or "
                "leave it out"
            )
        if self.model.compile and max(cluster.tensor_parallel, cluster.expert_parallel) > 1:
            raise ValueError("model.compile does not go with layers that workers divide: leave one of them out")
        roles = [role for pool in cluster.pools for role in pool.roles]
        if self.algorithm.reference is not None and "reference" in roles:
            raise ValueError(
                "cluster.pools: a reference that follows the policy (algorithm.reference) copies its shards on the "
                "actor's workers: leave reference out of the pools"
            )
        absent = {"critic": self.critic is None, "reward_model": self.rewards.model is None}
        absent["reference"] = self.algorithm.kl_coef == 0 or self.model.lora is not None
        if idle := [role for role in roles if absent[role]]:
            raise ValueError(f"cluster.pools: this recipe has no {idle[0]} to place there")


def _refer(tree: Json, key: Key, reference: Reference) -> None:
    """Put `reference` at `key`; what may be written short (`tools: [name]`, `lora.targets: x`) is long in a tree."""
    place: Json = {"": tree}
    step: str | int = ""
    for part in key:
        place, step = place[step], part
        known = part in place if isinstance(place, dict) else isinstance(place, list) and 0 <= int(part) < len(place)
        if not known:
            return
    found = place[step]
    if isinstance(found, dict) and "name" in found:
        place, step = found, "name"
    elif isinstance(found, list) and len(found) == 1:
        place, step = found, 0
    if place[step] == reference.value:
        place[step] = reference
