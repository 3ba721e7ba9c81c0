"""`TrainWorker`: the roles of one rank, sharded by FSDP2. All ranks call every method, in the same order."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from agentrl.addresses import same_host
from agentrl.checkpoint.pending import Pending
from agentrl.checkpoint.roles import RoleState, load_roles, save_roles
from agentrl.cluster.dispatch import ONE_TO_ALL, RANK_ZERO, SPLIT, register
from agentrl.compute.batch import Batch
from agentrl.compute.classifier import RewardModel
from agentrl.compute.flops import ROLES, Cost, costs, peak_of
from agentrl.compute.micro_batches import TorchProcessGroup
from agentrl.distributed.fsdp.build import (
    Sharded,
    build_critic,
    build_policy,
    build_reference,
    build_reward_model,
    build_teacher,
)
from agentrl.distributed.fsdp.mesh import ParallelContext, make_context
from agentrl.images import STORE
from agentrl.learner.actor import Actor
from agentrl.learner.critic import Critic
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.learner.reference import Reference, WithoutAdapter
from agentrl.learner.teacher import POLICY, Teacher, compared_whole, local_teachers, teacher_model
from agentrl.models import lora
from agentrl.models.download import download
from agentrl.models.load import resolve
from agentrl.plugins.types import Json
from agentrl.profiling.step import SYNC
from agentrl.profiling.worker import InstrumentedWorker, instrumented
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import TeacherSection
from agentrl.weights.group import agree_with_servers
from agentrl.weights.publisher import Publisher
from agentrl.weights.request import WeightRequest, WeightResult
from agentrl.weights.source import ModelWeights, NamedTensor, buckets

Floats = npt.NDArray[np.float32]
BEAT_SECONDS = 5.0
WHOLE = {"shard": 0, "sequence_parallel": 1, "tensor_parallel": 1, "expert_parallel": 1}
"""Of a pool of its own, which is sharded over itself."""
BUCKET_BYTES = 256 << 20
"""Bytes of whole tensors handed over at once; two buckets exist at a time."""


class TrainWorker(InstrumentedWorker):
    """recipe: as JSON; the policy starts from its `model`. base: a ModelSection as JSON, the reference. roles: those of
    this group, of actor, reference, critic and reward_model. images: the folder of the run's images."""

    memory_advice = "lower train.micro_batch_tokens, set model.checkpointing or cluster.offload, or use more workers"

    def __init__(self, recipe: Mapping[str, Json], base: Mapping[str, Json], roles: Sequence[str], images: str) -> None:
        STORE.look_in(Path(images))
        self.recipe = Recipe.model_validate(recipe)
        original = self.recipe.model_copy(update={"model": self.recipe.model.model_validate(base)})
        if self.recipe.train.threads:
            torch.set_num_threads(self.recipe.train.threads)
        torch.manual_seed(self.recipe.train.seed)
        args = self.recipe.engine.args
        if self.recipe.engine.name == "sglang" and (
            args.get("weights") == "from_distributed" or (args.get("remote_nodes") and not self.recipe.engine.sleep)
        ):
            agree_with_servers()
        self.connect(self.recipe.cluster.timeout)
        self.start_measuring()
        self._fetch(resolve(self.recipe.model.path))
        cluster = self.recipe.cluster
        if "actor" not in roles:
            cluster = cluster.model_copy(update=WHOLE)
        context = make_context(cluster, self.device)
        ranks = TorchProcessGroup(self.device, self.heartbeat, cluster.tensor_parallel)
        self._saving = dist.new_group(backend="gloo")  # a save goes on beside the collectives of training
        self._save: Pending | None = None
        self._weights: Iterator[list[NamedTensor]] = iter(())
        if "actor" in roles:
            made = self.policy(context)
            self.actor = Actor(made.model, self.recipe, made.forward, ranks, made.description)
            self._publisher = Publisher(made.model, self.rank, self.heartbeat)
            self.teachers = local_teachers(original, lambda section: self._teacher(section, original, context, ranks))
            self.actor.teachers = compared_whole(self.teachers)
        if "reference" in roles:
            if self.recipe.model.lora is not None:  # then no pool of its own holds it
                self.reference = Reference(self.recipe, WithoutAdapter(self.actor.model, self.actor.forward), ranks)
            else:
                policy = self.actor.model if "actor" in roles else None
                self.reference = Reference(original, build_reference(original, context).forward, ranks, policy)
        if "critic" in roles:
            valued = build_critic(original, context)
            self.critic = Critic(original, valued.forward, ranks, valued.description)
        if "reward_model" in roles:
            scored = build_reward_model(original, context)
            self.reward_model = RewardModel(original, scored.forward, ranks, scored.description)

    def policy(self, context: ParallelContext) -> Sharded:
        """Build the model that the actor trains. A trainer of another make has its own here (`cluster.trainer`)."""
        return build_policy(self.recipe, context)

    def _fetch(self, path: str) -> None:
        """Fetch what this machine lacks of a hub's model. The ranks of a machine wait for each other in it, and give
        signs of life meanwhile: the hub's library has time limits of its own."""
        fetched = threading.Event()

        def beat() -> None:
            while not fetched.wait(BEAT_SECONDS):
                self.heartbeat()

        threading.Thread(target=beat, daemon=True).start()
        try:
            download(path, lambda line: None)
        finally:
            fetched.set()

    def _teacher(
        self, section: TeacherSection, recipe: Recipe, context: ParallelContext, ranks: TorchProcessGroup
    ) -> Teacher:
        if section.path == POLICY:
            return Teacher(section, recipe, self.actor.forward, ranks)
        forward = build_teacher(recipe, context, teacher_model(section, recipe)).forward
        return Teacher(section, recipe, forward, ranks, sharded=True)

    @property
    def roles(self) -> dict[str, RoleState]:
        """The roles of this rank whose weights change."""
        found = {name: getattr(self, name) for name in ("actor", "critic") if hasattr(self, name)}
        moving = self.reference.state if hasattr(self, "reference") else None
        return found if moving is None else {**found, "reference": moving}

    @register(RANK_ZERO)
    def describe(self) -> dict[str, object]:
        """Describe the actor: `description`, `trained` (parameters), `adapter` (a line, empty without one), `feature`
        (see `Cost.feature`)."""
        adapter = lora.describe(self.actor.model) if lora.layers(self.actor.model) else ""
        about = {"description": self.actor.description, "trained": self.actor.trained, "adapter": adapter}
        return {**about, "feature": self.actor.feature}

    @register(RANK_ZERO)
    def role_costs(self) -> tuple[dict[str, Cost], float | None]:
        """The cost of each role's passes, and the peak of this rank's device (FLOP/s; None: not known)."""
        some = next(role for name in ROLES if (role := getattr(self, name, None)) is not None)
        return costs(self), peak_of(some.model, self.recipe, self.device)

    @register(SPLIT)
    @instrumented("actor")
    def logprobs(self, batch: Batch) -> Floats:
        """The actor's log-probs of the rank's part of a batch."""
        return self.actor.logprobs(batch)

    @register(SPLIT)
    @instrumented("actor")
    def entropies(self, batch: Batch) -> Floats:
        """The entropies of the rank's part of a batch."""
        return self.actor.entropies(batch)

    @register(SPLIT)
    @instrumented("reference")
    def reference_logprobs(self, batch: Batch) -> Floats:
        """The reference's log-probs of the rank's part of a batch."""
        return self.reference.logprobs(batch)

    @register(ONE_TO_ALL)
    def begin_stage(self, weight_decay: float) -> None:
        """Go on with a new optimizer (see `Actor.begin_stage`)."""
        self.actor.begin_stage(weight_decay)

    @register(ONE_TO_ALL)
    def follow_policy(self, keep: float) -> None:
        """Move the reference towards the policy (see `Reference.follow`)."""
        self.reference.follow(keep)

    @register(SPLIT)
    @instrumented("actor")
    def teacher_columns(self, batch: Batch, part: int) -> Batch:
        """What the teacher of an environment says of the rank's part of a batch (see `Teacher.columns`)."""
        return self.teachers[part].columns(batch)

    @register(SPLIT)
    @instrumented("actor")
    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make an update of the actor with the rank's part of a batch."""
        return self.actor.update(batch, rate)

    @register(ONE_TO_ALL)
    def begin_weights(self) -> None:
        """Start handing over the policy's weights: whole tensors by the names of the plain module, adapters merged."""
        self._weights = buckets(ModelWeights(self.actor.model, own_names=True), BUCKET_BYTES)

    @register(ONE_TO_ALL)
    @instrumented("actor", SYNC)
    def next_weights(self) -> list[NamedTensor] | None:
        """The next bucket on rank 0, None after the last. All ranks take part in gathering each tensor."""
        with torch.no_grad():
            bucket = next(self._weights, None)
        if bucket is None or self.rank:
            return None
        return [(name, tensor.cpu()) for name, tensor in bucket]

    @register(ONE_TO_ALL)
    def open_publisher(self, folder: str | None, transport: str, key: str | None, kind: str, nccl: str | None) -> None:
        """See `Publisher.open`; so are the next four methods, each a call of its on every rank."""
        self._publisher.open(folder, transport, key, kind, nccl)

    @register(ONE_TO_ALL)
    @instrumented("actor", SYNC)
    def publish(self, request: WeightRequest) -> WeightResult | None:
        """Take part in sending the weights (see `Publisher.publish`)."""
        return self._publisher.publish(request)

    @register(ONE_TO_ALL)
    def near(self, urls: Sequence[str]) -> list[str]:
        """The servers that share this machine's memory, on its first rank: the one that sends to them."""
        return [url for url in urls if same_host(url)] if self.local_rank == 0 else []

    @register(ONE_TO_ALL)
    @instrumented("actor", SYNC)
    def sleep_servers(self, urls: Sequence[str], senders: Mapping[str, int]) -> dict[str, str]:
        """Let the servers of this rank release their memory; return the failures by URL."""
        return self._publisher.sleep(urls, senders)

    @register(ONE_TO_ALL)
    @instrumented("actor", SYNC)
    def wake_servers(self) -> dict[str, str]:
        """Wake the servers of this rank; return the failures by URL."""
        return self._publisher.wake()

    @register(ONE_TO_ALL)
    def close_publisher(self) -> None:
        """Close the publisher of this rank."""
        self._publisher.close()

    @register(ONE_TO_ALL)
    def make_room(self) -> None:
        """GPU memory that torch has cached to the driver, for servers that share the GPU."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Close the publisher, and leave the process group."""
        if hasattr(self, "_publisher"):
            self._publisher.close()
        super().close()

    @register(SPLIT)
    @instrumented("critic")
    def values(self, batch: Batch) -> Floats:
        """The critic's values of the rank's part of a batch."""
        return self.critic.values(batch)

    @register(SPLIT)
    @instrumented("critic")
    def update_critic(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make an update of the critic with the rank's part of a batch."""
        return self.critic.update(batch, rate)

    @register(RANK_ZERO)
    def describe_reward_model(self) -> str:
        """One line that says how scores are computed."""
        return self.reward_model.description

    @register(SPLIT)
    @instrumented("reward_model")
    def scores(self, batch: Batch) -> Floats:
        """The reward model's scores of the rank's part of a batch."""
        return self.reward_model.scores(batch)

    @register(ONE_TO_ALL)
    def begin_save(self, folder: str) -> None:
        """Start a save (see `save_roles`), which goes on while the roles learn."""
        self._save = save_roles(self.roles, Path(folder), group=self._saving)

    @register(ONE_TO_ALL)
    def saved(self) -> bool:
        """Whether this rank's part is written, or failed."""
        return self._save is None or self._save.done()

    @register(ONE_TO_ALL)
    def finish_save(self) -> None:
        """Wait for the save. Raises UserError for errors of the disk."""
        if self._save is not None:
            pending, self._save = self._save, None
            pending.result()

    @register(ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Load the roles from a checkpoint (see `load_roles`)."""
        load_roles(self.roles, Path(folder), rank=self.rank)
