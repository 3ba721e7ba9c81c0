"""What a recipe may say. Every key has a reader, a unit and a default that was tried; an unknown key is an error."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from agentrl.errors import nearest
from agentrl.recipe.document import Key, Reference

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of a recipe: strict about keys, and frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class LoraSection(Section):
    """An adapter that is trained in place of the model's own weights."""

    rank: Positive = 16
    alpha: Positive = 32  # its share is scaled by alpha / rank
    # Layers, by the end of their names, such as [q_proj, v_proj]; all-linear: all but the output layer.
    targets: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)] = ("all-linear",)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the adapter's input, while it is trained
    start: str | None = None  # a folder of peft's format to go on from; None: a new adapter


class ModelSection(Section):
    path: str = "tiny"  # `tiny` (ships with the package), a Hugging Face folder, or a hub name
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"  # of the trainer and the engine `local`: auto (a GPU where there is one), cpu, cuda, cuda:1
    chat: str = "auto"  # auto | bridge | a family of `renderers`, such as qwen3
    chat_template: str | None = None  # a jinja file that replaces the tokenizer's own
    trust_remote_code: bool = False
    lora: LoraSection | None = None  # None: every weight is trained
    # What the trainer computes in. same: as dtype says. bfloat16: mixed precision, the weights stay what they are.
    compute: Literal["same", "bfloat16"] = "same"
    checkpointing: bool = False  # compute activations again in the backward pass, instead of keeping them


class EnvPart(Section):
    """One environment of several that a recipe mixes."""

    name: str
    source: str = "generated"
    args: dict[str, Any] = Field(default_factory=dict)
    weight: Annotated[float, Field(gt=0)] = 1.0  # its share of the training tasks
    tools: tuple[str, ...] | None = None  # those of the recipe's tools that its tasks offer; None: all


class EnvSection(Section):
    name: str = "gsm8k"
    source: str = "generated"  # what the environment says: a generator, a file, a hub name
    args: dict[str, Any] = Field(default_factory=dict)  # further arguments of the environment's class
    mix: tuple[EnvPart, ...] = ()  # several environments at once, instead of `name`, `source` and `args`


class ToolSection(Section):
    name: str
    args: dict[str, Any] = Field(default_factory=dict)  # arguments of the tool's class


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class RolloutSection(Section):
    n: Positive = 8  # samples a task
    tasks: Positive = 16  # tasks a step
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    max_turns: Positive = 6  # assistant turns a request
    max_tool_calls: Positive = 16  # calls a request
    max_tool_calls_per_turn: Positive = 3  # further ones are refused, and the model is told
    max_turn_tokens: Positive = 512
    max_tokens: Positive = 4096  # a trajectory, prompt included
    max_tool_tokens: Positive = 256  # what one tool response may add; longer ones are cut in the middle
    tool_timeout: Seconds = 30.0  # seconds a call
    turn_timeout: Seconds = 300.0  # seconds a turn, sampling and tools
    timeout: Seconds = 900.0  # seconds a request
    retries: Annotated[int, Field(ge=0)] = 1  # of a request that FAILED
    concurrency: Positive = 1024  # requests in flight
    # none: a step samples, then trains. one_step: the next step's samples are drawn while this one trains. async:
    # sampling never stops, and new weights land in the middle of requests.
    overlap: Literal["none", "one_step", "async"] = "none"
    max_staleness: Annotated[int, Field(ge=1)] = 2  # updates between a sample's first token and its training (async)


class RewardSection(Section):
    name: str
    part: str | None = None  # the reward part that it fills; None: its own name
    args: dict[str, Any] = Field(default_factory=dict)  # arguments of its class or function
    # Run it in so many processes, each killed and replaced when a call takes too long; 0: in this one.
    processes: Annotated[int, Field(ge=0)] = 0


class RewardsSection(Section):
    weights: dict[str, float] = Field(default_factory=dict)  # of named parts; a part that is not named counts 1
    functions: tuple[Annotated[RewardSection, BeforeValidator(_named)], ...] = ()  # besides environment and tools
    model: str | None = None  # a sequence classifier, whose score of a finished trajectory is the part `model`


class EngineSection(Section):
    name: str = "local"
    max_batch: Positive = 128  # rows decoded at once
    sleep: bool = False  # give the engine's memory back while the trainer works: for one device that both share
    args: dict[str, Any] = Field(default_factory=dict)  # further arguments of the engine's class


COMPARING = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline")
"""Advantages of our own that are 0 where a task has one sample."""


class AlgorithmSection(Section):
    advantage: str = "grpo"
    gamma: Fraction = 1.0  # discount a sampled token (gae)
    lam: Fraction = 1.0  # of gae: 1 takes returns as they come, 0 trusts the critic
    loss: str = "ppo_clip"
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    clip_dual: Annotated[float, Field(gt=1)] | None = 3.0  # None: off
    kl_coef: Annotated[float, Field(ge=0)] = 0.0  # of the KL against the reference; 0: no reference is kept
    # loss: a term beside the policy's (k3). reward: each token's log-ratio (k1) is taken off its reward.
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    # The weight of a token that the engine sampled with another probability than the trainer's. auto: token_tis where
    # engine and trainer are apart (another engine than `local`, or rollout.overlap), else none.
    off_policy: Literal["auto", "none", "token_tis", "sequence_tis", "token_mask"] = "auto"
    off_policy_cap: Annotated[float, Field(ge=1)] = 2.0  # of that weight


class TrainSection(Section):
    steps: Annotated[int, Field(ge=0)] = 100
    lr: Annotated[float, Field(gt=0)] = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    mini_batches: Positive = 1  # optimizer updates an epoch
    epochs: Positive = 1  # passes over a step's samples
    micro_batch_tokens: Positive = 16384  # packed tokens a forward; gradients add up exactly
    save_every: Annotated[int, Field(ge=0)] = 50  # steps; 0: at the end only
    keep: Positive = 2  # checkpoints kept
    seed: int = 0
    threads: Annotated[int, Field(ge=0)] = 0  # of torch on a CPU; 0: all cores


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 20  # steps, on the split for validation; 0: before and after training only
    tasks: Positive = 128  # of each split
    samples: Positive = 1  # a task
    temperature: Annotated[float, Field(ge=0)] | None = None  # None: that of rollout
    splits: tuple[str, ...] | None = None  # held-out splits before and after training; None: all but validation


class SftStage(Section):
    style: str = "clean"  # what the environment's `demonstrate` knows
    steps: Positive = 1000
    lr: Annotated[float, Field(gt=0)] = 1e-3
    batch: Positive = 32  # demonstrations a step
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks, adamw for the rest
    muon_lr: Annotated[float, Field(gt=0)] = 0.02  # where lr is at its peak; it follows the same schedule
    warmup_steps: Annotated[int, Field(ge=0)] = 60
    weight_decay: Annotated[float, Field(ge=0)] = 0.05


QWEN3 = {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
"""What may be said of a new model's shape, by the names of Hugging Face's Qwen3Config, and what holds unless said."""


def _qwen3(config: dict[str, int]) -> dict[str, int]:
    for name in config:
        if name not in QWEN3:
            raise ValueError(f"{name!r} is no name of the model's shape{nearest(name, QWEN3)}")
    return QWEN3 | config


class NewModel(Section):
    """A model and tokenizer made from nothing (Qwen3 architecture), instead of starting from `model.path`."""

    config: Annotated[dict[str, Positive], AfterValidator(_qwen3)] = Field(QWEN3, validate_default=True)
    vocabulary: Positive = 832
    texts: Positive = 16_000  # demonstrations, over all splits, that the tokenizer learns from
    chat_template: str  # a jinja file, relative to the recipe
    tokens: tuple[str, ...] = ()  # texts that become one token each, such as the frame of a call's JSON


class SftSection(Section):
    new_model: NewModel | None = None
    stages: Annotated[tuple[SftStage, ...], Field(min_length=1)] = (SftStage(),)


class CriticSection(Section):
    """A value model, trained beside the policy, for advantages that want one (gae)."""

    path: str | None = None  # the model whose backbone it begins with; None: model.path
    lr: Annotated[float, Field(gt=0)] = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # steps at the start in which it alone learns
    clip: Annotated[float, Field(gt=0)] = 0.2  # how far a value may move in one step's updates


class PoolSection(Section):
    """Workers of their own for some roles, apart from the actor's."""

    roles: Annotated[tuple[Literal["reference", "critic", "reward_model"], ...], Field(min_length=1)]
    workers: Positive = 1


class ClusterSection(Section):
    workers: Positive = 1  # processes that train together; 1: this one, without Ray
    nodes: Positive = 1  # machines that they are spread over
    gpus: Annotated[int, Field(ge=0)] = 0  # of each machine, one a worker: workers = nodes x gpus; 0: on CPUs
    address: str | None = None  # of a Ray cluster that runs already (`auto`: the one here); None: one is started
    restarts: Annotated[int, Field(ge=0)] = 0  # times that the run goes on from its last checkpoint by itself
    timeout: Seconds = 600.0  # seconds without an answer after which a worker is lost
    pools: tuple[PoolSection, ...] = ()  # roles that do not share the actor's workers
    shard: Annotated[int, Field(ge=0)] = 0  # workers that hold one copy of the weights; 0: all of them. Fewer: HSDP
    offload: bool = False  # parameters and optimizer stay in the memory of the CPU
    sequence_parallel: Positive = 1  # workers that share each sequence

    @property
    def size(self) -> int:
        """Workers of the actor."""
        return self.nodes * self.gpus if self.gpus else self.workers

    @property
    def used(self) -> bool:
        """Whether the tensor work is done by other processes."""
        return self.size > 1 or self.address is not None or bool(self.pools) or self.gpus > 0


class ProfileSection(Section):
    steps: Annotated[tuple[int, ...], BeforeValidator(_listed)] = ()  # steps of which a trace is written


class TrackSection(Section):
    trackers: tuple[str, ...] = ()  # besides metrics.jsonl and the display: entry points of `agentrl.trackers`
    trajectories: bool = True  # write trajectories/step_N.jsonl


class Recipe(Section):
    """A whole run, checked. `Recipe.load(path, overrides)` reads one."""

    model: ModelSection = ModelSection()
    env: EnvSection = EnvSection()
    tools: tuple[Annotated[ToolSection, BeforeValidator(_named)], ...] = ()
    rewards: RewardsSection = RewardsSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    sft: SftSection | None = None
    critic: CriticSection | None = None
    cluster: ClusterSection = ClusterSection()
    track: TrackSection = TrackSection()
    profile: ProfileSection = ProfileSection()
    output: str | None = None  # the run folder; None: runs/<recipe>-<number>
    _references: dict[Key, Reference] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str, overrides: list[str] | tuple[str, ...] = ()) -> "Recipe":
        """Read a YAML recipe. Raises UserError: one line with the key's path and what to do."""
        from agentrl.recipe.load import load_recipe

        return load_recipe(path, overrides)

    def with_references(self, references: Mapping[Key, Reference]) -> "Recipe":
        """This recipe, which remembers where a `${VAR}` stood in what it was read from."""
        recipe = self.model_copy()
        recipe._references = dict(references)
        return recipe

    def written(self) -> dict[str, Any]:
        """Every key as JSON values, with a Reference where a `${VAR}` stood and its value was not changed since. This,
        and not `model_dump`, is what is written, printed and sent: values of variables may be secrets."""
        tree = self.model_dump(mode="json")
        for key, reference in self._references.items():
            _refer(tree, key, reference)
        return tree

    @property
    def roles(self) -> list[str]:
        """Which parts do tensor work beside the engine: actor, and reference, critic, reward_model where wanted."""
        wanted = {
            "actor": True,
            "reference": self.algorithm.kl_coef > 0,
            "critic": self.critic is not None,
            "reward_model": self.rewards.model is not None,
        }
        return [role for role, needed in wanted.items() if needed]

    @model_validator(mode="after")
    def _combinations(self) -> "Recipe":
        if twice := {t.name for t in self.tools if self.tools.count(t) > 1}:
            raise ValueError(f"tools: {', '.join(sorted(twice))} is listed twice")
        for key in ("name", "source", "args") if self.env.mix else ():
            default = EnvSection.model_fields[key].get_default(call_default_factory=True)
            if getattr(self.env, key) != default:
                raise ValueError(
                    f"env.{key} does nothing beside env.mix: say it in a part; here leave it at {default!r}"
                )
        self._check_cluster()
        if never := [step for step in self.profile.steps if not 1 <= step <= self.train.steps]:
            raise ValueError(f"profile.steps: there is no step {never[0]}; train.steps is {self.train.steps}")
        if self.engine.sleep and self.rollout.overlap != "none":
            raise ValueError("engine.sleep stops sampling while the trainer works, rollout.overlap goes on: choose one")
        if self.rollout.max_turn_tokens > self.rollout.max_tokens:
            raise ValueError("rollout.max_turn_tokens is larger than rollout.max_tokens, so it can never be reached")
        if self.train.mini_batches > self.rollout.n * self.rollout.tasks:
            raise ValueError("train.mini_batches is larger than rollout.n x rollout.tasks: some would be empty")
        if self.rollout.n < 2 and self.algorithm.advantage in COMPARING and self.train.steps > 0:
            name = self.algorithm.advantage
            raise ValueError(f"rollout.n is 1, but {name} compares the samples of a task: use 2 or more")
        return self

    def _check_cluster(self) -> None:
        cluster = self.cluster
        if cluster.gpus and cluster.workers not in (1, cluster.size):
            raise ValueError(
                f"cluster.workers is {cluster.workers}, but nodes x gpus is {cluster.size}: leave workers out"
            )
        for key, value in (("shard", cluster.shard), ("sequence_parallel", cluster.sequence_parallel)):
            if value and cluster.size % value:
                raise ValueError(f"cluster.{key} is {value}, which does not divide the {cluster.size} workers")
        if cluster.nodes > cluster.size:
            raise ValueError(f"cluster.nodes is {cluster.nodes}, but there are only {cluster.size} workers")
        if cluster.restarts and not cluster.used:
            raise ValueError("cluster.restarts is for workers on a cluster: set cluster.workers, or leave it at 0")
        if cluster.offload and not cluster.used:
            raise ValueError(
                "cluster.offload is for workers on a cluster; one process alone keeps all where model.device says: "
                "set cluster.workers or cluster.gpus, or leave it out"
            )
        roles = [role for pool in cluster.pools for role in pool.roles]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"cluster.pools: {role} stands in two of them")
        absent = {"critic": self.critic is None, "reward_model": self.rewards.model is None}
        absent["reference"] = self.algorithm.kl_coef == 0 or self.model.lora is not None
        if idle := [role for role in roles if absent[role]]:
            raise ValueError(f"cluster.pools: this recipe has no {idle[0]} that could be placed apart")


def _refer(tree: Any, key: Key, reference: Reference) -> None:
    """Put `reference` at `key`; what may be written short (`tools: [name]`, `profile.steps: 3`) is long in a tree."""
    place: Any = {"": tree}
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
