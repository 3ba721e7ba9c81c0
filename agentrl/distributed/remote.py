"""`RayRoles`: the role host on Ray workers. Its roles are objects here that call the groups of workers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentrl.cluster.group import Future, WorkerGroup
from agentrl.cluster.placement import Placement, names_of
from agentrl.cluster.pool import Home, ResourcePool, own_address, own_id
from agentrl.cluster.session import Session
from agentrl.compute.batch import Batch
from agentrl.compute.flops import RoleCost
from agentrl.images import FOLDER as IMAGES
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.learner.roles import forward_lines
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.weights.request import WeightRequest, WeightResult, cpu_place
from agentrl.weights.source import NamedTensor, WeightSource

if TYPE_CHECKING:
    from agentrl.distributed.worker import TrainWorker

Floats = npt.NDArray[np.float32]
POLL_SECONDS = 0.1
"""Interval between two checks whether a save has ended."""


class RemoteActor:
    """`Actor` on workers."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        about = group.describe()
        self.description: str = about["description"]
        """How rank 0 computes, a line for people."""
        self.trained: int = about["trained"]
        """Number of trained parameters."""
        self.adapter: str = about["adapter"]
        """The adapter, a line for people; empty without one."""
        self.feature: float = about["feature"]
        """What a feature of an image costs (see `Cost.feature`)."""
        self.updates = 0
        """Updates sent to the workers: one that fails may have changed the weights of some."""

    def begin_stage(self, weight_decay: float, muon: float | None = None) -> None:
        """Let every worker go on with a new optimizer. Raises ValueError for Muon, which wants whole matrices."""
        if muon is not None:
            raise ValueError("muon trains in one process")
        self._group.begin_stage(weight_decay)

    def logprobs(self, batch: Batch) -> Floats:
        """The log-probs of the sampled tokens, float32 [T], 0 elsewhere."""
        found: Floats = self._group.logprobs(batch.with_image_cost(self.feature))
        return found

    def entropies(self, batch: Batch) -> Floats:
        """The entropy of what each sampled token was drawn from, float32 [T], 0 elsewhere."""
        found: Floats = self._group.entropies(batch.with_image_cost(self.feature))
        return found

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update on all workers; return its metrics."""
        self.updates += 1
        found: MicroBatchMetrics = self._group.update(batch.with_image_cost(self.feature), rate)
        return found


class RemoteReference:
    """`Reference` on workers."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def logprobs(self, batch: Batch) -> Floats:
        """The log-probs of the sampled tokens, float32 [T], 0 elsewhere."""
        found: Floats = self._group.reference_logprobs(batch)
        return found

    def follow(self, keep: float) -> None:
        """Move it towards the policy on all workers (see `Reference.follow`)."""
        self._group.follow_policy(keep)


class RemoteTeacher:
    """`Teacher` on workers. part: index of its environment in `env.mix`."""

    def __init__(self, group: WorkerGroup, part: int) -> None:
        self._group, self._part = group, part

    def columns(self, batch: Batch) -> Batch:
        """See `TeacherRole.columns`."""
        found: Batch = self._group.teacher_columns(batch, self._part)
        return found


class RemoteCritic:
    """`Critic` on workers. feature: what a feature of an image costs (see `Cost.feature`). updates: as
    `RemoteActor.updates`."""

    def __init__(self, group: WorkerGroup, feature: float = 0.0) -> None:
        self._group, self._feature = group, feature
        self.updates = 0

    def values(self, batch: Batch) -> Floats:
        """The value of the state before each sampled token, float32 [T], 0 elsewhere."""
        found: Floats = self._group.values(batch.with_image_cost(self._feature))
        return found

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update on all workers; return its metrics."""
        self.updates += 1
        found: MicroBatchMetrics = self._group.update_critic(batch.with_image_cost(self._feature), rate)
        return found


class RemoteRewardModel:
    """`RewardModel` on workers."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.description: str = group.describe_reward_model()

    def scores(self, batch: Batch) -> Floats:
        """The score of each sample, float32 [S]."""
        found: Floats = self._group.scores(batch)
        return found


class RemoteWeights(WeightSource):
    """The policy's weights on the workers of `group`: whole tensors by the names of the plain model, a bucket at a
    time, the next one gathered while this one is read; or published by the workers. groups: all that may share GPUs
    with servers."""

    repeatable = True

    def __init__(self, group: WorkerGroup, groups: Sequence[WorkerGroup]) -> None:
        self._group = group
        self.publisher = RemotePublisher(group, groups)

    def __iter__(self) -> Iterator[NamedTensor]:
        self._group.begin_weights()
        ahead: Future = self._group.next_weights.future()
        while (bucket := ahead.result()[0]) is not None:
            ahead = self._group.next_weights.future()
            yield from bucket


class RemotePublisher:
    """`Publisher` on workers: all ranks of `group` take part. A server that shares a GPU with one of them is sent its
    weights by that rank, from that GPU, and where it has several, each of its ranks from the GPU that it is on; another
    one on a machine of theirs by the first rank there; rank 0 sends to the others. groups: all that may share GPUs with
    servers."""

    def __init__(self, group: WorkerGroup, groups: Sequence[WorkerGroup]) -> None:
        self._group, self._groups = group, groups
        self._transport = "auto"
        self._rank_by_url: dict[str, int] = {}

    def open(
        self,
        folder: str | None = None,
        transport: str = "auto",
        key: str | None = None,
        kind: str = "sglang",
        nccl: str | None = None,
    ) -> None:
        """Open the publisher of every rank (see `Publisher.open`)."""
        self._transport = transport
        self._group.open_publisher(folder, transport, key, kind, nccl)

    def publish(self, request: WeightRequest) -> WeightResult:
        """Let the workers send their weights; return the joined results."""
        feeders: dict[str, tuple[int, ...]] = {}
        if request.places and self._transport in ("auto", "from_tensor"):
            at, met = {}, Counter[str]()
            for rank, worker in enumerate(self._group.workers):
                for gpu in worker.gpus or (cpu_place(met[worker.node_id]),):
                    at[worker.node_id, gpu] = rank
                met[worker.node_id] += 1
            for url, places in request.places.items():
                ranks = [at.get((place.node or own_id(), place.gpu)) for place in places]
                if ranks[0] is not None:
                    self._rank_by_url[url] = ranks[0]
                known = tuple(rank for rank in ranks if rank is not None)
                if len(set(known)) == len(ranks) > 1:
                    feeders[url] = known
        senders = self._senders(request.urls)
        sending = {senders.get(url, 0) for url in request.urls}
        feeders = {url: ranks for url, ranks in feeders.items() if not sending & set(ranks[1:])}
        return WeightResult.joined(self._group.publish(replace(request, senders=senders, feeders=feeders)))

    def sleep(self, urls: Sequence[str]) -> dict[str, str]:
        """Let the servers release their memory; return the failures by URL."""
        return _merged(self._group.sleep_servers(urls, self._senders(urls)))

    def wake(self) -> dict[str, str]:
        """Wake the servers after `sleep`; return the failures by URL."""
        return _merged(self._group.wake_servers())

    def _senders(self, urls: Sequence[str]) -> dict[str, int]:
        """URL -> rank that shares its GPU or, of a server on another machine than rank 0's, is on its machine. Each is
        looked for once."""
        new = [url for url in urls if url not in self._rank_by_url]
        if self._transport != "auto" or len({process.node_id for process in self._group.workers}) == 1:
            self._rank_by_url |= dict.fromkeys(new, 0)
        elif new:
            found = enumerate(self._group.near(new))
            near = {url: rank for rank, theirs in reversed(list(found)) for url in theirs}
            self._rank_by_url |= {url: near.get(url, 0) for url in new}
        return {url: rank for url in urls if (rank := self._rank_by_url[url])}

    def make_room(self) -> None:
        """Free the GPU memory that every worker keeps for its next step."""
        for future in [group.make_room.future() for group in self._groups]:
            future.result()

    def close(self) -> None:
        """Close the publisher of every rank."""
        self._group.close_publisher()


class RemoteSave:
    """A save in progress on the workers of every group."""

    def __init__(self, groups: list[WorkerGroup], folder: Path) -> None:
        self._groups = groups
        for group in groups:
            group.begin_save(str(folder))

    def done(self) -> bool:
        """Whether every worker has written its part, or failed."""
        return all(all(group.saved()) for group in self._groups)

    def result(self) -> None:
        """Wait until it is written. Raises UserError for errors of the disk. Polls, so that workers can train."""
        while not self.done():
            sleep(POLL_SECONDS)
        for future in [group.finish_save.future() for group in self._groups]:
            future.result()


class RayRoles:
    """The roles of `recipe` on Ray workers, in the actor's group or in pools of their own, as `cluster` says.

    begins: the recipe with the model that the policy starts from (a checkpoint, for example). logs: folder for the
    workers' output, by the same path on every machine, in the run folder, where they look for images. say, phase:
    called with lines that stay, and with progress. placement: the run's devices (None: as Ray gives them).

    Raises ClusterError (Ray, resources, a worker), and UserError of the workers: a model that does not load.
    """

    in_process, device = False, "cpu"

    def __init__(
        self,
        recipe: Recipe,
        begins: Recipe,
        logs: Path,
        say: Callable[[str], None] = lambda line: None,
        phase: Callable[[str], None] = lambda line: None,
        placement: Placement | None = None,
    ) -> None:
        cluster = recipe.cluster
        self._stack, self._recipe, self._begins, self._logs = ExitStack(), recipe, begins, logs
        self._groups: dict[str, WorkerGroup] = {}
        try:
            phase("starting Ray")
            session = self._stack.enter_context(_session(cluster, placement))
            roles, home = recipe.roles, _home(cluster, placement)
            own = self._reserve(cluster.size, cluster.nodes, home)  # first: it has the table's first devices
            for apart in cluster.pools:
                beside = home and replace(home, workers=None)
                self._start(self._reserve(apart.workers, 1, beside), list(apart.roles), phase)
                roles = [role for role in roles if role not in apart.roles]
            self._start(own, roles, phase)
            where = session.address if cluster.address else "this machine"
            say(f"cluster: {sum(len(g) for g in set(self._groups.values()))} workers on {where}, logs in {logs}")
            self.actor = RemoteActor(self._groups["actor"])
            scorer = self._groups.get("reward_model")
            self.reward_model = RemoteRewardModel(scorer) if scorer is not None else None
        except BaseException:
            self.close()
            raise
        self.pools = {role: group.name for role, group in self._groups.items()}
        self.teachers = {
            part: RemoteTeacher(self._groups["actor"], part)
            for part, teacher in enumerate(recipe.part_teachers)
            if teacher is not None and not teacher.served
        }
        """Teachers on the actor's workers, by the index of their environment in `env.mix`."""
        groups = list(dict.fromkeys(self._groups.values()))
        self._weights = RemoteWeights(self._groups["actor"], groups)
        self.reference = RemoteReference(self._groups["reference"]) if "reference" in self._groups else None
        self.critic = RemoteCritic(self._groups["critic"], self.actor.feature) if "critic" in self._groups else None

    def _reserve(self, workers: int, nodes: int, home: Home | None) -> ResourcePool:
        return self._stack.enter_context(ResourcePool(workers, nodes, gpu=self._recipe.cluster.gpus > 0, home=home))

    def worker_class(self) -> "type[TrainWorker]":
        """The class of the workers, imported where they are started: it brings torch with it."""
        from agentrl.distributed.worker import TrainWorker

        return TrainWorker

    def _start(self, pool: ResourcePool, roles: list[str], phase: Callable[[str], None]) -> None:
        recipe, actor = self._recipe, "actor" in roles
        phase(f"starting {pool.workers} workers ({', '.join(roles)})")
        group = WorkerGroup(
            pool,
            self.worker_class(),
            self._begins.model_dump(mode="json"),
            recipe.model.model_dump(mode="json"),
            roles,
            str(self._logs.parent / IMAGES),
            name="trainer" if actor else "_".join(roles),
            logs=self._logs,
            timeout=recipe.cluster.timeout,
            sharing=recipe.cluster.sharing if actor else 1,
        )
        self._stack.callback(group.close)
        self._groups |= dict.fromkeys(roles, group)

    @property
    def role_costs(self) -> dict[str, RoleCost]:
        """The FLOPs of each role's passes, and the peak of the devices of its group."""
        found: dict[str, RoleCost] = {}
        for group in dict.fromkeys(self._groups.values()):
            costs, peak = group.role_costs()
            whole = peak and peak * len(group)
            found |= {role: RoleCost(cost, whole, group.name) for role, cost in costs.items()}
        return found

    def measure(self) -> dict[str, float]:
        """The largest values of any worker of each group, by the name of its first role."""
        futures = {group: group.measure.future() for group in dict.fromkeys(self._groups.values())}
        found: dict[str, float] = {}
        for role, group in self._groups.items():
            if (future := futures.pop(group, None)) is not None:
                for key, value in (item for rank in future.result() for item in rank.items()):
                    name = key.replace("_gb", f"_{role}_gb")
                    found[name] = max(value, found.get(name, 0.0))
        return found

    def trace(self, step: int, folder: Path) -> None:
        """Let the workers write traces of step `step` into `folder` from now on; step 0 ends that."""
        for group in dict.fromkeys(self._groups.values()):
            group.trace(step, str(folder))

    def describe(self) -> list[str]:
        """Lines for the start of a run: how each role computes."""
        lines = forward_lines(self.actor.description)
        lines += [f"trained: {self.actor.adapter}"] if self.actor.adapter else []
        return lines + ([f"reward model: {self.reward_model.description}"] if self.reward_model is not None else [])

    def weights(self) -> RemoteWeights:
        """The source of the weights: an engine in this process copies its tensors; servers are sent them by the
        workers that hold them."""
        return self._weights

    def save(self, folder: Path) -> RemoteSave:
        """Start to write the trained roles into `folder`; they may go on learning at once."""
        return RemoteSave(self._trained(), folder)

    def load(self, folder: Path) -> None:
        """Load the trained roles from a checkpoint. Raises UserError."""
        for future in [group.load.future(str(folder)) for group in self._trained()]:
            future.result()

    def close(self) -> None:
        """End the workers, and the Ray that this run started."""
        self._stack.close()

    def _trained(self) -> list[WorkerGroup]:
        """The groups with trained roles."""
        groups = [self._groups[role] for role in ("actor", "critic") if role in self._groups]
        return list(dict.fromkeys(groups))


def _merged(failed: Sequence[dict[str, str]]) -> dict[str, str]:
    """What failed on any rank, by URL."""
    return {url: why for part in failed for url, why in part.items()}


def _session(cluster: ClusterSection, placement: Placement | None) -> AbstractContextManager[Session]:
    """Connect to the cluster, unless the engine has, whose servers are on its other machines; or start a Ray that is
    shown the trainer's devices alone, so that no worker gets an engine's."""
    if cluster.address is not None and (joined := Session.current()) is not None:
        return nullcontext(joined)
    if cluster.address is not None or not cluster.gpus or placement is None:
        return Session(cluster.address, gpus=None if cluster.gpus else 0)
    devices = names_of(placement.devices("trainer"))
    return Session(gpus=len(devices), devices=devices)


def _home(cluster: ClusterSection, placement: Placement | None) -> Home | None:
    """What the actor's pool has to know of this machine; None where Ray's choice is as good as any: no engine
    has GPUs here, or Ray was shown the trainer's alone."""
    if cluster.address is None or not cluster.gpus or placement is None or not placement.engine:
        return None
    engine = frozenset(names_of([d for d in placement.engine if d not in placement.devices("trainer")]))
    workers = placement.devices("trainer")
    return Home(own_address(), frozenset(names_of(workers)) if workers else None, engine)
