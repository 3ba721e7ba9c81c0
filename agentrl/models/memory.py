"""Estimates, from the model's shape and the recipe, of the memory of each worker and the traffic between workers of
FSDP2, before anything is loaded.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentrl.models.load import on_gpu
from agentrl.models.shape import Shape, read_shape
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import PoolSection

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `model.dtype`."""
MOMENT_BYTES = 8
"""Bytes of the two float32 moments of a parameter."""
BUCKET_BYTES = 1 << 28
"""Offloaded moments that are copied and stepped together, unless one parameter's are larger."""
BUCKETS = 3
"""Of them, on the device at once: one is stepped, while the next one comes and the one before leaves."""
MASTER_BYTES = 4
"""Bytes of the float32 master of a parameter of lower precision."""
GRADIENT_BYTES = 4
"""Bytes of a gradient, which is summed in float32."""
REDUCE_BYTES = 4
"""Bytes of a gradient while it is averaged, in float32."""
LAYER_TENSORS, WIDE_TENSORS = 16, 4
"""Activations of a layer that its backward pass needs for each token: tensors of the hidden size (projections, norms,
residuals) and of the feed-forward's."""
LOGIT_ROWS, GPU_LOGIT_ROWS, LOGIT_ELEMENTS = 512, 1024, 1 << 22
"""Minimum predictions whose logits exist at once, on a CPU and on a GPU, and the number of logits that exist at
once."""
HEAD_SLICE, GPU_HEAD_SLICE = 1 << 24, 1 << 27
"""Elements of the gradient of the output layer that a chunk adds at once, on a CPU and on a GPU."""
LOGIT_COPIES = 3
"""Float32 tensors as large as the logits: log-softmax, its exponential, and their product or the gradient."""


PROCESS_BYTES = 1_500_000_000
"""Of a GPU that a process takes besides tensors: CUDA, NCCL, workspaces. An estimate, as are the next two."""
ASLEEP_BYTES = 3_500_000_000
"""Of each of its GPUs that a server keeps while it sleeps."""
READER_BYTES = 500_000_000
"""Of a GPU whose memory a process of another GPU opens: a rank of a server, the weights that a worker hands over."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is spread over workers and computed."""

    size: int = 4
    """Bytes of a stored weight."""
    compute: int = 4
    """Bytes of a weight in matrix products."""
    shard: int = 1
    """Workers that together hold one copy of the weights."""
    sequence: int = 1
    """Workers that share a sequence."""
    tokens: int = 16384
    """Packed tokens of a micro-batch."""
    offload: bool = False
    """Whether shards, gradients and optimizer state are in CPU memory."""
    optimizer: bool = False
    """Whether the optimizers' moments are in CPU memory between steps."""
    host_activations: bool = False
    """Whether the inputs of recomputed layers are in CPU memory until the backward pass."""
    checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass."""
    averaged: bool = False
    """Whether the reference is a moving average of the policy, which is kept in float32."""
    rows: int = LOGIT_ROWS
    """Minimum predictions whose logits exist at once."""
    frozen: bool = False
    """Whether the vision tower is not trained."""
    tensor: int = 1
    """Workers that divide the matrices of a layer."""
    dealt: int = 1
    """Workers that divide the experts of a layer."""

    @classmethod
    def of(cls, recipe: Recipe, workers: int, *, actor: bool = True) -> "Setting":
        """The setting of a group of `workers` workers. actor: False for a pool without the actor, whose models
        are sharded over all of its workers."""
        size, cluster = BYTES[recipe.model.dtype], recipe.cluster
        return cls(
            size=size,
            compute=2 if recipe.model.compute == "bfloat16" else size,
            shard=(cluster.shard if actor else 0) or workers,
            sequence=cluster.sequence_parallel if actor else 1,
            tokens=recipe.train.micro_batch_tokens,
            offload="parameters" in cluster.offload,
            optimizer="optimizer" in cluster.offload,
            host_activations="activations" in cluster.offload,
            checkpointing=recipe.model.checkpointing,
            averaged=recipe.algorithm.reference is not None and recipe.algorithm.reference.ema is not None,
            rows=GPU_LOGIT_ROWS if on_gpu(recipe) else LOGIT_ROWS,
            frozen="vision" in recipe.model.freeze,
            tensor=cluster.tensor_parallel if actor else 1,
            dealt=max(cluster.tensor_parallel, cluster.expert_parallel) if actor else 1,
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one worker, in bytes."""

    parameters: int
    """The number of parameters of the policy and its adapter."""
    trained: int | None
    """The number of parameters of the adapter, the only ones with gradients, in float32; None: all are trained."""
    weights: int
    """Weights of the policy."""
    gradients: int
    """Gradients of the policy."""
    optimizer: int
    """State of the policy's optimizer."""
    reference: int
    """Weights of the reference."""
    critic: int
    """Weights, gradients and optimizer of the critic."""
    reward_model: int
    """Weights of the reward model."""
    teachers: int
    """Weights of the teachers in the trainer's processes."""
    gathered: int
    """Layers that FSDP2 gathers while they run, their gradients, and weights outside of layers. In one process, the
    copy of the weights in the dtype of matrix products."""
    activations: int
    """Peak activations of one micro-batch."""
    tower: int
    """Peak activations of the vision tower, if all of a micro-batch's tokens were of images; with their pixels and
    features."""
    logits: int
    """Logits of one chunk of predictions, and the gradient of the output layer, as it is summed or then rounded."""
    cache_token: int
    """Keys and values of one token in the engine, over all of its GPUs."""
    moments: int
    """Moments of the optimizers in CPU memory."""
    stepped: int
    """Of them, on the device at once during a step."""
    saved: int
    """Activations in CPU memory until the backward pass."""
    offload: bool
    """Whether shards, gradients and optimizer state are in CPU memory."""

    @property
    def kept(self) -> int:
        """Bytes of the state between steps, on the device or offloaded."""
        return (
            self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.reward_model
            + self.teachers
        )  # fmt: skip

    @property
    def between_steps(self) -> int:
        """Bytes on the worker's device while an engine samples; gradients are freed with each step."""
        return 0 if self.offload else self.kept - self.moments - self.gradients

    @property
    def device(self) -> int:
        """Peak bytes on the worker's device."""
        passing = self.gathered + self.activations + self.tower + self.logits
        return passing if self.offload else self.kept - self.moments + max(passing, self.stepped)

    def beside(self, ranks: int) -> int:
        """Estimate the bytes of a worker's device that others take while it trains. ranks: of the server that sleeps
        there; 0: none does."""
        if not ranks:
            return PROCESS_BYTES
        base = 2 * self.parameters // ranks if self.trained is not None else 0  # it stays: only the adapter is sent
        return PROCESS_BYTES + ASLEEP_BYTES + (ranks - 1) * READER_BYTES + base

    @property
    def host(self) -> int:
        """Bytes in CPU memory, if the device is not the CPU."""
        return (self.kept if self.offload else self.moments) + self.saved


def plan_memory(recipe: Recipe) -> MemoryPlan | None:
    """Estimate the memory of each worker of the actor's group, or of the only process.

    Returns None if the configuration of a model is not on this machine. Raises UserError for a path that is no model.
    """
    pooled = {role for pool in recipe.cluster.pools for role in pool.roles}
    roles = [role for role in recipe.roles if role not in pooled]
    return _plan_roles(recipe, roles, Setting.of(recipe, recipe.cluster.size))


def plan_pools(recipe: Recipe) -> list[tuple[PoolSection, MemoryPlan]]:
    """Estimate the memory of each worker in `cluster.pools`; pools whose models are not known are left out."""
    plans = [
        (pool, _plan_roles(recipe, pool.roles, Setting.of(recipe, pool.workers, actor=False)))
        for pool in recipe.cluster.pools
    ]
    return [(pool, plan) for pool, plan in plans if plan is not None]


def plan(
    shape: Shape,
    setting: Setting,
    roles: Collection[str] = ("actor",),
    critic: Shape | None = None,
    reward_model: Shape | None = None,
    teachers: Sequence[Shape] = (),
) -> MemoryPlan:
    """Estimate the memory of a worker with these roles. critic, reward_model: their shapes if not the policy's.
    teachers: those beside the actor."""
    actor = "actor" in roles
    trained = (shape if actor else None, (critic or shape) if "critic" in roles else None)
    trains = actor or "critic" in roles
    weights, gradients, optimizer = _trained(shape, setting) if actor else (0, 0, 0)
    value = sum(_trained(critic or shape, setting)) if "critic" in roles else 0
    moments = [_moments(each, setting) for each in trained if each is not None] if setting.optimizer else []
    kept = setting.size + (4 if setting.size < 4 else 0) if setting.averaged else setting.compute
    reward = (reward_model or shape).parameters * setting.compute // setting.shard if "reward_model" in roles else 0
    return MemoryPlan(
        parameters=shape.parameters + shape.adapter,
        trained=shape.adapter or None,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=shape.parameters * kept // setting.shard if "reference" in roles and not shape.adapter else 0,
        critic=value,
        reward_model=reward,
        teachers=sum(each.parameters * setting.compute // setting.shard for each in teachers) if actor else 0,
        gathered=_gathered(shape, setting, trains),
        activations=_activations(shape, setting, trains),
        tower=_tower(shape, setting, trains),
        logits=_logits(shape, setting) if actor else 0,
        cache_token=shape.kv * setting.compute,
        moments=sum(moments),
        stepped=max((min(each, _stepped(shape, setting)) for each in moments), default=0),
        saved=_saved(shape, setting) if trains and setting.host_activations else 0,
        offload=setting.offload,
    )


def _plan_roles(recipe: Recipe, roles: Collection[str], setting: Setting) -> MemoryPlan | None:
    shape = read_shape(recipe.model)
    if shape is None:
        return None
    own = {"critic": recipe.critic.path if recipe.critic else None, "reward_model": recipe.rewards.model}
    shapes: dict[str, Shape | None] = {}
    for role, path in own.items():
        section = recipe.model.model_copy(update={"path": path})
        shapes[role] = read_shape(section) if path is not None and role in roles else None
    paths = {teacher.path for teacher in recipe.part_teachers if teacher is not None and not teacher.served} - {
        "policy"
    }
    teachers = [read_shape(recipe.model.model_copy(update={"path": path, "lora": None})) for path in sorted(paths)]
    known = [teacher for teacher in teachers if teacher is not None]
    return plan(shape, setting, roles, shapes["critic"], shapes["reward_model"], known)


def _trained(shape: Shape, setting: Setting) -> tuple[int, int, int]:
    """The bytes of weights, gradients and optimizer state; an adapter is float32."""
    weights = shape.parameters * setting.size + shape.adapter * 4
    trained = _changed(shape, setting)
    state = MOMENT_BYTES + (MASTER_BYTES if setting.size < 4 and not shape.adapter else 0)
    return weights // setting.shard, trained * GRADIENT_BYTES // setting.shard, trained * state // setting.shard


def _changed(shape: Shape, setting: Setting) -> int:
    """The number of parameters that have gradients."""
    frozen = shape.tower.parameters if shape.tower is not None and setting.frozen else 0
    return shape.adapter or shape.parameters - frozen


def _moments(shape: Shape, setting: Setting) -> int:
    return _changed(shape, setting) * MOMENT_BYTES // setting.shard


def _stepped(shape: Shape, setting: Setting) -> int:
    """The bytes of moments on the device during a step: buckets, the largest of which may be one parameter's."""
    largest = max(shape.vocabulary * shape.hidden, shape.experts // max(1, shape.layers))
    return BUCKETS * max(BUCKET_BYTES, largest * MOMENT_BYTES // setting.shard)


def _saved(shape: Shape, setting: Setting) -> int:
    """The bytes of the inputs of all layers but the last one; torch rounds pinned memory up to a power of two."""
    each = -(-setting.tokens // setting.sequence) * setting.compute * shape.hidden
    return (1 << (each - 1).bit_length()) * (shape.layers - 1)


def _gathered(shape: Shape, setting: Setting, trains: bool) -> int:
    """The bytes of gathered weights: the root, the layer that runs and the next one; in the backward pass also
    the whole gradients of a layer until they are averaged, and those of the root, which are averaged last."""
    if setting.shard == 1 and not setting.offload:
        return shape.parameters * setting.compute if setting.compute < setting.size else 0
    layer = shape.layer - _elsewhere(shape, setting) // max(1, shape.layers)
    whole = (shape.root + 2 * layer) * setting.compute
    if shape.adapter or not trains:
        return whole
    in_layers = whole + shape.root * setting.compute + layer * (setting.compute + REDUCE_BYTES)
    at_the_end = shape.root * (2 * setting.compute + REDUCE_BYTES)
    return max(in_layers, at_the_end)


def _elsewhere(shape: Shape, setting: Setting) -> int:
    """The parameters of layers that this worker never holds: parts of matrices and experts that are others'."""
    dense = shape.parameters - shape.root - shape.experts
    return dense - dense // setting.tensor + shape.experts - shape.experts // setting.dealt


def _activations(shape: Shape, setting: Setting, trains: bool) -> int:
    """The bytes of activations of a micro-batch; a recomputed layer keeps only its input."""
    layer = LAYER_TENSORS * shape.hidden + WIDE_TENSORS * shape.wide
    if not trains:
        numbers = layer
    elif setting.checkpointing:
        numbers = layer + shape.hidden * (min(2, shape.layers) if setting.host_activations else shape.layers)
    else:
        numbers = layer * shape.layers
    return -(-setting.tokens // setting.sequence) * setting.compute * numbers


def _tower(shape: Shape, setting: Setting, trains: bool) -> int:
    """The bytes of activations of the vision tower for a micro-batch whose tokens are all of images. A frozen
    tower keeps none but those of the layer that runs, and its features."""
    if (tower := shape.tower) is None:
        return 0
    layer = LAYER_TENSORS * tower.hidden + WIDE_TENSORS * tower.wide
    layers = tower.layers if trains and not setting.frozen else 1
    numbers = setting.compute * (tower.patches * layer * layers + shape.hidden) + 4 * tower.patches * tower.pixels
    return -(-setting.tokens // setting.sequence) * numbers


def _logits(shape: Shape, setting: Setting) -> int:
    rows = min(setting.tokens, max(setting.rows, LOGIT_ELEMENTS // shape.vocabulary))
    chunk = rows * shape.vocabulary * 4 * LOGIT_COPIES
    if shape.adapter:
        return chunk
    head = shape.vocabulary * shape.hidden
    rounded = head * setting.compute if setting.compute < GRADIENT_BYTES else 0  # once all chunks are through
    added = min(GPU_HEAD_SLICE if setting.rows == GPU_LOGIT_ROWS else HEAD_SLICE, head)
    return head * GRADIENT_BYTES + max(chunk + added * setting.compute, rounded)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each worker receives by FSDP2 in one micro-batch."""

    forward: int
    """Weights gathered for a pass without gradients."""
    update: int
    """Weights gathered for a pass with gradients, which gathers every layer again in the backward pass."""
    gradients: int
    """Gradients averaged over the workers that hold one copy."""
    tokens: int = 0
    """Hidden states of a full micro-batch on their way to dealt experts and back, in a pass with gradients."""

    @classmethod
    def of(cls, shape: Shape, setting: Setting) -> "Traffic":
        """Compute the traffic of a model under a setting."""
        layers = shape.parameters - shape.root
        trained = shape.adapter or shape.parameters
        experts, groups = shape.experts * (setting.dealt > 1), max(1, setting.shard // setting.dealt)

        def received(numbers: int, size: int, passes: int = 1) -> int:
            dense = (numbers - passes * experts) * size * (setting.shard - 1) // setting.shard
            return dense + passes * experts // setting.dealt * size * (groups - 1) // groups

        return cls(
            forward=received(shape.parameters, setting.compute),
            update=received(2 * layers + shape.root, setting.compute, 2),
            gradients=received(trained, REDUCE_BYTES, int(not shape.adapter)),
            tokens=_travelling(shape, setting),
        )


def _travelling(shape: Shape, setting: Setting) -> int:
    """The bytes of `Traffic.tokens`: each token goes to the experts that its router chooses, and comes back; gradients
    take the same ways, and a layer that is computed again sends its tokens again."""
    if setting.dealt == 1:
        return 0
    ways = 6 if setting.checkpointing else 4
    each = setting.tokens * shape.routed * shape.hidden * setting.compute * shape.layers
    return ways * each * (setting.dealt - 1) // setting.dealt
