"""`cluster`: processes, machines and GPUs of the trainer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import (
    Count,
    FunctionSection,
    Positive,
    Seconds,
    Section,
    Unit,
    Workers,
    listed,
    named,
)


class PoolSection(Section):
    """Workers of their own for some roles, apart from the actor's."""

    roles: Annotated[tuple[Literal["reference", "critic", "reward_model"], ...], Field(min_length=1)]
    """Roles that these workers hold."""
    workers: Workers = 1
    """Processes of the pool."""


def _offloaded(value: Json) -> Json:
    """Parameters and optimizer for true, nothing for false."""
    return (("parameters", "optimizer") if value else ()) if isinstance(value, bool) else listed(value)


class ClusterSection(Section):
    """Processes, machines and GPUs of the trainer."""

    workers: Workers = 1
    """Processes that train together; 1: the run's own, without Ray."""
    nodes: Annotated[Positive, Unit("machines")] = 1
    """Machines that the workers are spread over."""
    gpus: Annotated[Count, Unit("GPUs per machine")] = 0
    """GPUs of each machine, one for each worker: workers = nodes x gpus; 0: on CPUs."""
    address: str | None = None
    """Address of a running Ray cluster (`auto`: the one on this machine). null: one is started."""
    restarts: Annotated[Count, Unit("restarts")] = 0
    """Times that the run continues from its last checkpoint by itself after it lost a worker."""
    timeout: Seconds = 600.0
    """Time without an answer, or a finished micro-batch, after which a worker counts as lost."""
    pools: tuple[PoolSection, ...] = ()
    """Workers for roles that do not share the actor's."""
    shard: Annotated[Count, Unit("workers")] = 0
    """Workers that hold one copy of the weights together; 0: all of them. Fewer: HSDP."""
    offload: Annotated[tuple[Literal["parameters", "optimizer", "activations"], ...], BeforeValidator(_offloaded)] = ()
    """What lies in CPU memory while nothing computes with it; true: parameters and optimizer. parameters: weights and
    gradients, each layer is brought to the GPU as it computes, for workers on a cluster. optimizer: its moments,
    which a step brings to the GPU a few parameters at a time. activations: what activation checkpointing keeps of
    each layer until the backward pass."""
    sequence_parallel: Workers = 1
    """Workers that share each sequence (Ulysses, arXiv:2309.14509)."""
    tensor_parallel: Workers = 1
    """Workers that share each layer's matrices: attention heads and hidden units are divided among neighbours."""
    expert_parallel: Workers = 1
    """Workers that divide the experts of each layer among them; tokens are sent to the workers of their experts."""
    trainer: Annotated[FunctionSection | None, BeforeValidator(named)] = None
    """A trainer of another make, by its name (`agentrl.trainers`) or as module:attribute, with arguments of its own;
    null: ours. What it does with workers, nodes and gpus is its own matter."""

    @model_validator(mode="after")
    def _workers(self) -> "ClusterSection":
        if self.gpus and self.workers not in (1, self.size):
            raise ValueError(f"workers is {self.workers}, but nodes x gpus is {self.size}: leave out workers")
        for key in ("shard", "sequence_parallel", "tensor_parallel", "expert_parallel"):
            if (value := getattr(self, key)) and self.size % value:
                raise ValueError(f"{key} is {value}, which does not divide the {self.size} workers")
        self._divided_layers()
        if self.nodes > self.size:
            raise ValueError(f"nodes is {self.nodes}, but there are only {self.size} workers")
        if self.restarts and not self.used:
            raise ValueError("restarts is for workers on a cluster: set workers, or leave it at 0")
        if "parameters" in self.offload and not self.used:
            raise ValueError(
                "offload: parameters is for workers on a cluster; a single process keeps its weights on model.device: "
                "set workers or gpus, or leave it out"
            )
        if self.trainer is not None:
            ours = {
                "pools": self.pools, "shard": self.shard, "offload": self.offload, "restarts": self.restarts,
                "sequence_parallel": self.sequence_parallel > 1, "tensor_parallel": self.tensor_parallel > 1,
                "expert_parallel": self.expert_parallel > 1,
            }  # fmt: skip
            if given := [key for key, value in ours.items() if value]:
                raise ValueError(
                    f"{' and '.join(given)}: of our own workers, which trainer {self.trainer.name} replaces"
                )
        roles = [role for pool in self.pools for role in pool.roles]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"pools: {role} is in two of them")
        return self

    def _divided_layers(self) -> None:
        """Raise ValueError for what does not go with layers that workers divide among them."""
        if self.tensor_parallel == self.expert_parallel == 1:
            return
        key = "tensor_parallel" if self.tensor_parallel > 1 else "expert_parallel"
        if self.expert_parallel > 1 and self.expert_parallel % self.tensor_parallel:
            raise ValueError(
                f"expert_parallel is {self.expert_parallel}, no multiple of tensor_parallel, {self.tensor_parallel}"
            )
        for name, ranks in (("tensor_parallel", self.tensor_parallel), ("expert_parallel", self.expert_parallel)):
            if self.shard % ranks:
                raise ValueError(f"shard is {self.shard}, no multiple of {name}, {ranks}: a copy has all parts")
        if self.sequence_parallel > 1:
            raise ValueError(f"{key} does not go with sequence_parallel: set one of them to 1")
        if "parameters" in self.offload:
            raise ValueError(f"{key} does not go with offload: parameters; set offload: [optimizer]")

    @property
    def sharing(self) -> int:
        """Number of neighbouring workers that compute on the same part of the data."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def size(self) -> int:
        """The number of the actor's workers."""
        return self.nodes * self.gpus if self.gpus else self.workers

    @property
    def used(self) -> bool:
        """Whether other processes do the tensor work."""
        return self.size > 1 or self.address is not None or bool(self.pools or self.trainer) or self.gpus > 0
