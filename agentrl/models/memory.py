"""What training needs of each worker before anything is loaded: memory, and traffic between the workers of FSDP2.

All of it follows from the model's shape and the recipe.
"""

from collections.abc import Collection
from dataclasses import dataclass

from agentrl.models.load import on_gpu
from agentrl.models.shape import Shape, read_shape
from agentrl.recipe.schema import PoolSection, Recipe

BYTES = {"float32": 4, "bfloat16": 2}
MOMENT_BYTES = 8  # two float32 moments a parameter
MASTER_BYTES = 4  # a float32 copy of each parameter of less precision
GRADIENT_BYTES = 4  # gradients add up in float32
REDUCE_BYTES = 4  # gradients are averaged in float32
LAYER_TENSORS, WIDE_TENSORS = 16, 4
"""Activations of a layer that its backward pass wants for a token: so many of the hidden size (projections, norms,
residuals) and of the feed-forward's."""
LOGIT_ROWS, GPU_LOGIT_ROWS, LOGIT_ELEMENTS = 512, 1024, 1 << 22
"""Predictions whose logits exist at once: at least, likewise on a GPU, and by the logits' number."""
LOGIT_COPIES = 3  # log-softmax, its exponential and their product, or the gradient, float32


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is spread over workers and computed."""

    size: int = 4
    """Bytes of a weight as it is kept."""
    compute: int = 4
    """Bytes of a weight as it is computed with."""
    shard: int = 1
    """Workers that hold one copy together."""
    sequence: int = 1
    """Workers that share a sequence."""
    tokens: int = 16384
    """Packed tokens of a micro-batch."""
    offload: bool = False
    """Whether the state between steps lies in the CPU's memory."""
    optimizer: bool = False
    """Whether the optimizers' moments do."""
    host_activations: bool = False
    """Whether what is kept of each layer does, where activations are computed again."""
    checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass."""
    rows: int = LOGIT_ROWS
    """Predictions whose logits exist at once, at least."""

    @classmethod
    def of(cls, recipe: Recipe, workers: int, *, actor: bool = True) -> "Setting":
        """Of a group of so many workers; those of pools apart are sharded over all of them."""
        size, cluster = BYTES[recipe.model.dtype], recipe.cluster
        return cls(
            size=size,
            compute=2 if recipe.model.compute == "bfloat16" else size,
            shard=(cluster.shard if actor else 0) or workers,
            sequence=cluster.sequence_parallel if actor else 1,
            tokens=recipe.train.micro_batch_tokens,
            offload=cluster.offload.parameters,
            optimizer=cluster.offload.optimizer,
            host_activations=cluster.offload.activations,
            checkpointing=recipe.model.checkpointing,
            rows=GPU_LOGIT_ROWS if on_gpu(recipe) else LOGIT_ROWS,
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one worker, in bytes."""

    parameters: int
    """The number of parameters of the policy and its adapter."""
    trained: int | None
    """The number of those of the adapter, which are float32 and alone have gradients (None: all are trained)."""
    weights: int
    """Of the policy."""
    gradients: int
    """Of the policy."""
    optimizer: int
    """State of the policy's optimizer."""
    reference: int
    """Weights."""
    critic: int
    """Weights, gradients and optimizer."""
    reward_model: int
    """Weights."""
    gathered: int
    """Layers that FSDP2 makes whole while they run, their gradients, and what lies outside of layers. In one process,
    the copy of the weights in the type that is computed in."""
    activations: int
    """Of one micro-batch, at their peak."""
    logits: int
    """Of one chunk of predictions, and the gradient of the output layer with a chunk's share of it."""
    cache_token: int
    """Keys and values of one token in the engine, over all of its GPUs."""
    moments: int
    """Of the optimizers, what lies in the CPU's memory but for their steps."""
    saved: int
    """Of the activations, what lies in the CPU's memory until the backward pass."""
    offload: bool
    """Whether the state between steps lies in the CPU's memory."""

    @property
    def kept(self) -> int:
        """State that stays between steps: on the CPU, where it is offloaded."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.reward_model

    @property
    def device(self) -> int:
        """The peak on the worker's device."""
        passing = self.gathered + self.activations + self.logits
        return passing if self.offload else self.kept - self.moments + max(passing, self.moments)

    @property
    def host(self) -> int:
        """Of the CPU's memory, where the device is another."""
        return (self.kept if self.offload else self.moments) + self.saved


def plan_memory(recipe: Recipe) -> MemoryPlan | None:
    """Of each worker that trains the policy, with the roles that share it; in one process, of that. None where a
    configuration is not on this machine. Raises UserError for a path that is no model."""
    apart = {role for pool in recipe.cluster.pools for role in pool.roles}
    roles = [role for role in recipe.roles if role not in apart]
    return _plan_roles(recipe, roles, Setting.of(recipe, recipe.cluster.size))


def plan_pools(recipe: Recipe) -> list[tuple[PoolSection, MemoryPlan]]:
    """Likewise of each worker in the pools of their own."""
    plans = [
        (pool, _plan_roles(recipe, pool.roles, Setting.of(recipe, pool.workers, actor=False)))
        for pool in recipe.cluster.pools
    ]
    return [(pool, plan) for pool, plan in plans if plan is not None]


def plan(
    shape: Shape,
    how: Setting,
    roles: Collection[str] = ("actor",),
    critic: Shape | None = None,
    reward_model: Shape | None = None,
) -> MemoryPlan:
    """Of a worker with these roles. critic, reward_model: their shapes where they are not the policy's."""
    actor = "actor" in roles
    trained = (shape if actor else None, (critic or shape) if "critic" in roles else None)
    trains = actor or "critic" in roles
    weights, gradients, optimizer = _trained(shape, how) if actor else (0, 0, 0)
    value = sum(_trained(critic or shape, how)) if "critic" in roles else 0
    reward = (reward_model or shape).parameters * how.compute // how.shard if "reward_model" in roles else 0
    return MemoryPlan(
        parameters=shape.parameters + shape.adapter,
        trained=shape.adapter or None,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=shape.parameters * how.compute // how.shard if "reference" in roles and not shape.adapter else 0,
        critic=value,
        reward_model=reward,
        gathered=_gathered(shape, how, trains),
        activations=_activations(shape, how, trains),
        logits=_logits(shape, how) if actor else 0,
        cache_token=shape.kv * how.compute,
        moments=sum(_moments(each, how) for each in trained if each is not None) if how.optimizer else 0,
        saved=_saved(shape, how) if trains and how.host_activations else 0,
        offload=how.offload,
    )


def _plan_roles(recipe: Recipe, roles: Collection[str], how: Setting) -> MemoryPlan | None:
    shape = read_shape(recipe.model)
    if shape is None:
        return None
    own = {"critic": recipe.critic.path if recipe.critic else None, "reward_model": recipe.rewards.model}
    shapes: dict[str, Shape | None] = {}
    for role, path in own.items():
        section = recipe.model.model_copy(update={"path": path})
        shapes[role] = read_shape(section) if path is not None and role in roles else None
    return plan(shape, how, roles, shapes["critic"], shapes["reward_model"])


def _trained(shape: Shape, how: Setting) -> tuple[int, int, int]:
    """Weights, gradients and optimizer; those of an adapter are float32."""
    weights = shape.parameters * how.size + shape.adapter * 4
    trained = shape.adapter or shape.parameters
    state = MOMENT_BYTES + (MASTER_BYTES if how.size < 4 and not shape.adapter else 0)
    return weights // how.shard, trained * GRADIENT_BYTES // how.shard, trained * state // how.shard


def _moments(shape: Shape, how: Setting) -> int:
    return (shape.adapter or shape.parameters) * MOMENT_BYTES // how.shard


def _saved(shape: Shape, how: Setting) -> int:
    """The inputs of all layers but the one that runs."""
    return -(-how.tokens // how.sequence) * how.compute * shape.hidden * (shape.layers - 1)


def _gathered(shape: Shape, how: Setting, trains: bool) -> int:
    """The root, the layer that runs and the next one; backwards also a layer's gradients, whole, on their way to be
    averaged, and those of the root, which are averaged last."""
    if how.shard == 1 and not how.offload:
        return shape.parameters * how.compute if how.compute < how.size else 0
    whole = (shape.root + 2 * shape.layer) * how.compute
    if shape.adapter or not trains:
        return whole
    in_layers = whole + shape.root * how.compute + shape.layer * (how.compute + REDUCE_BYTES)
    at_the_end = shape.root * (2 * how.compute + REDUCE_BYTES)
    return max(in_layers, at_the_end)


def _activations(shape: Shape, how: Setting, trains: bool) -> int:
    """Of a forward and backward pass over a micro-batch; a layer's input alone where it is computed again."""
    layer = LAYER_TENSORS * shape.hidden + WIDE_TENSORS * shape.wide
    if not trains:
        numbers = layer
    elif how.checkpointing:
        numbers = layer + shape.hidden * (1 if how.host_activations else shape.layers)
    else:
        numbers = layer * shape.layers
    return -(-how.tokens // how.sequence) * how.compute * numbers


def _logits(shape: Shape, how: Setting) -> int:
    rows = min(how.tokens, max(how.rows, LOGIT_ELEMENTS // shape.vocabulary))
    head = 0 if shape.adapter else shape.vocabulary * shape.hidden * (GRADIENT_BYTES + how.compute)
    return rows * shape.vocabulary * 4 * LOGIT_COPIES + head


@dataclass(frozen=True, slots=True)
class Traffic:
    """What FSDP2 moves in one micro-batch: bytes that each worker receives."""

    forward: int
    """Weights gathered for a pass without gradients."""
    update: int
    """Weights gathered for a pass with gradients, which gathers every layer again in the backward pass."""
    gradients: int
    """Gradients averaged over the workers that hold one copy."""

    @classmethod
    def of(cls, shape: Shape, how: Setting) -> "Traffic":
        """Compute the traffic of a model under a setting."""
        layers = shape.parameters - shape.root
        trained = shape.adapter or shape.parameters

        def received(numbers: int, size: int) -> int:
            return numbers * size * (how.shard - 1) // how.shard

        return cls(
            forward=received(shape.parameters, how.compute),
            update=received(2 * layers + shape.root, how.compute),
            gradients=received(trained, REDUCE_BYTES),
        )


def into_node(received: int, workers: int, nodes: int) -> float:
    """Of what each of `workers` workers receives, the bytes that come into each of their `nodes` machines: what one of
    its workers has received, the others take from it."""
    whole = received * workers / (workers - 1)
    return whole * (1 - 1 / nodes)
