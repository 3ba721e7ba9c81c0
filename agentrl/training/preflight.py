"""What is checked before a model is loaded, so that a mistake costs no waiting."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algo import advantages, aggregations, losses
from agentrl.algo.aggregation import token_weights
from agentrl.algo.registry import check_critic
from agentrl.algo.terms import Tokens, Update
from agentrl.cluster.placement import Expected, Placement, place
from agentrl.cluster.session import reach
from agentrl.compute.batch import Array, Batch
from agentrl.compute.classifier import classifier_config
from agentrl.data.sampler import TaskSampler, make_sampler, restrict
from agentrl.engine.base import engine_class, launched_by
from agentrl.errors import UserError, describe
from agentrl.eval.evaluate import check_tasks, choosing_split, chosen_splits
from agentrl.learner.actor import loss_terms
from agentrl.learner.columns import PART, PART_WEIGHT, chosen, with_advantages
from agentrl.learner.teacher import check_teachers
from agentrl.models.load import find_device, on_gpu, resolve, resolve_types
from agentrl.models.memory import PROCESS_BYTES, MemoryPlan, plan_memory
from agentrl.models.shape import undivided
from agentrl.plugins.agent import make_agent
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import check_engine, load, make_environment, tasks_of, tracker_makers
from agentrl.plugins.tool import Tool
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.selection import make_filter
from agentrl.rollout.workspaces import provider_of

FIRST_TASKS = 3
"""Tasks of each split that are looked at."""
REMEDY = "Lower cluster.workers (or cluster.nodes, cluster.gpus), or add machines to the cluster"


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks have loaded."""

    env: Environment
    """The environment."""
    splits: tuple[str, ...]
    """Held-out splits that are reported."""
    choosing: str | None
    """Split that chooses the best checkpoint; None: no split is evaluated."""
    tasks: Sequence[Task]
    """Tasks to train on."""
    sampler: TaskSampler
    """Draws from them, without those that `data.filter` leaves out."""
    trackers: Mapping[str, Callable[[], Tracker]]
    """Factories of the trackers, by name."""
    placement: Placement
    """The devices of each part."""


def check_names(recipe: Recipe) -> None:
    """Look up advantage, loss, filter, agent and reward model. Raises UserError."""
    if recipe.agent is not None:
        make_agent(recipe.agent, recipe.workspace is not None)
    check_critic(recipe)
    losses.bound(recipe.algorithm.loss)
    check_teachers(recipe)
    aggregations.bound(recipe.algorithm.aggregation)
    make_filter(recipe)
    _check_model_config(recipe)
    if recipe.rewards.model is not None:
        classifier_config(recipe.rewards.model, recipe.model)


def _check_model_config(recipe: Recipe) -> None:
    """Raise UserError where servers would sample from a model of another configuration than the trainer's."""
    kind, flags = engine_class(recipe.engine.name), recipe.engine.args.get("flags")
    flagged = isinstance(flags, Mapping) and {"json-model-override-args", "hf-overrides"} & set(flags)
    if recipe.model.config and not (kind.in_process or kind.brings_chat or flagged):
        raise UserError(
            "model.config: servers read the model's own configuration; give them the same in engine.args.flags "
            "(SGLang: json-model-override-args, vLLM: hf-overrides)"
        )


def check_run(recipe: Recipe) -> Checked:
    """Check names, algorithm, machine, environment and tasks. Raises UserError."""
    trackers = tracker_makers(recipe.track.trackers)
    check_names(recipe)
    check_algorithm(recipe)
    if engine_class(recipe.engine.name).brings_chat:
        raise UserError(
            f"engine.name {recipe.engine.name!r} samples from a model that cannot be trained: use `agentrl eval`"
        )
    if missing := lacking(recipe):
        more = f" (and {len(missing) - 1} more, which `agentrl check` lists)" if len(missing) > 1 else ""
        raise UserError(missing[0] + more)
    if recipe.train.check_memory and (missing := lacking_memory(recipe, plan_memory(resolve_types(recipe)))):
        raise UserError(f"{missing[0]}. train.check_memory=false tries all the same")
    env = make_environment(recipe.env)
    if not (env.pays or recipe.tools or env.tools() or recipe.rewards.functions or recipe.rewards.model):
        raise UserError(
            f"environment {env.name!r} gives no reward, and neither does a tool: name one in rewards.functions"
        )
    splits = chosen_splits(env, recipe)
    choosing = choosing_split(env, recipe, splits)
    tasks = tasks_of(env, "train")
    needed = dict.fromkeys(("train", *splits, *((choosing,) if choosing is not None else ())))
    check_tasks(env, needed, recipe)
    check_workspace(recipe, env, (), tuple(needed))
    sampler = make_sampler(recipe.data, tasks, recipe.train.seed)
    restrict(sampler, recipe.data, tasks)
    return Checked(env, splits, choosing, tasks, sampler, trackers, placement_of(recipe))


def check_workspace(recipe: Recipe, env: Environment, tools: Sequence[Tool], splits: Sequence[str]) -> None:
    """Ask the provider of workspaces about the recipe and the first tasks of each split. tools: those of the recipe,
    where they are open. Raises UserError."""
    found = [tasks_of(env, split) for split in splits] if recipe.workspace is not None else []
    first = (tasks[i] for tasks in found for i in range(min(FIRST_TASKS, len(tasks))))
    provider_of(recipe.workspace, env, tools, recipe.agent, first)


def with_epochs(recipe: Recipe, checked: Checked) -> Recipe:
    """The recipe with the steps that `data.epochs` says."""
    if recipe.data.epochs is None:
        return recipe
    steps = math.ceil(recipe.data.epochs * (len(checked.tasks) - len(checked.sampler.excluded)) / recipe.rollout.tasks)
    return recipe.changed(train={"steps": steps})


def told_of_data(recipe: Recipe, checked: Checked) -> list[str]:
    """Lines that say how many tasks are trained on, and for how many steps, where the recipe leaves that
    open."""
    data, left = recipe.data, len(checked.tasks) - len(checked.sampler.excluded)
    lines = []
    if data.filter is not None and checked.sampler.keep is None:
        lines.append(f"data.filter {data.filter.name!r} keeps {left} of {len(checked.tasks)} tasks")
    if data.epochs is not None:
        lines.append(
            f"data.epochs {data.epochs:g}: {recipe.train.steps} steps of {recipe.rollout.tasks} of {left} tasks"
        )
    return lines


def check_algorithm(recipe: Recipe) -> None:
    """Call the recipe's advantage, loss and aggregation once, on an invented step.

    Raises UserError for a mistake that their signature or their result shows.
    """
    algorithm, batch = recipe.algorithm, _invented_step(recipe)
    if algorithm.routing_replay:
        if not engine_class(name := recipe.engine.name).tells_experts:
            raise UserError(f"algorithm.routing_replay: engine {name!r} does not tell which experts it chose")
        if recipe.cluster.sequence_parallel > 1:
            raise UserError("algorithm.routing_replay does not go with cluster.sequence_parallel: set that to 1")
    found = with_advantages(batch, advantages.bound(algorithm.advantage), algorithm)
    logprobs = torch.from_numpy(batch.tokens["logprobs"]).requires_grad_()
    sample = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.lengths))
    update = Update(batch.lengths, batch.samples["group"], recipe.rollout.max_tokens)
    token_weights(update, aggregations.bound(algorithm.aggregation), algorithm)
    advantages_, old = torch.from_numpy(found.tokens["advantages"]), logprobs.detach()
    choose = losses.chooser(algorithm.loss)
    known = found.with_tokens(old_logprobs=old.numpy())
    picked = choose and torch.from_numpy(chosen(known, old.numpy(), choose, np.random.default_rng(0), algorithm))
    tokens = Tokens(logprobs * 1.0, old, advantages_, sample, picked)
    where = f"algorithm.loss {algorithm.loss.name!r}"
    terms = loss_terms(losses.bound(algorithm.loss), tokens, algorithm)
    if not bool(torch.isfinite(terms.loss).all()):
        raise UserError(f"{where} gave a loss that is not finite")
    if not terms.loss.requires_grad:
        raise UserError(f"{where} gave a loss without a gradient: it does not depend on `tokens.logprobs`")
    try:
        torch.autograd.backward(terms.loss.sum())
    except Exception as error:  # boundary: a plugin's function
        raise UserError(f"{where}: its gradient cannot be computed: {describe(error, place=False)}") from error


def _invented_step(recipe: Recipe) -> Batch:
    """As many samples as the recipe's step has, of one to four tokens, some right and some wrong in every
    task, with the columns that the recipe's advantage may read."""
    limits = recipe.rollout
    size = limits.tasks * limits.n
    lengths = 1 + np.arange(size) % 4
    group = np.repeat(np.arange(limits.tasks), limits.n)
    place = np.linspace(-1.0, -0.1, int(lengths.sum()), dtype=np.float32)
    columns: dict[str, Array] = {
        "ids": np.zeros(len(place), np.int32),
        "loss_mask": np.ones(len(place), np.uint8),
        "logprobs": place,
        "turns": np.zeros(len(place), np.int64),
        "states": np.zeros(len(place), np.int64),
    }
    rewards = (np.arange(size) % limits.n % 2).astype(np.float32)
    if recipe.critic is not None:
        columns["values"] = -place
    if recipe.algorithm.kl_coef > 0 and recipe.algorithm.kl_in == "reward":
        columns["kl_penalty"] = 0.001 * place
    return Batch(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=columns,
        samples={
            "prompt_length": np.zeros(size, np.int32),
            "group": group,
            "reward": rewards,
            f"{PART}reward": rewards,
            f"{PART_WEIGHT}reward": np.ones(size, np.float32),
        },
    )


def lacking(recipe: Recipe) -> list[str]:
    """List, one line each, what the recipe needs and this machine lacks: paths, devices, CPUs, Ray, programs.

    Loads nothing. Raises UserError for arguments that the engine does not take.
    """
    check_engine(recipe.engine)
    computes_here = not recipe.cluster.used or engine_class(recipe.engine.name).in_process
    return [
        *(_error_line(lambda: find_device(recipe.model.device)) if computes_here else []),
        *_error_line(lambda: resolve(recipe.model.path)),
        *_lacking_critic(recipe),
        *_lacking_shares(recipe),
        *(_lacking_cluster(recipe) if recipe.cluster.used else []),
        *lacking_gpus(recipe),
        *engine_class(recipe.engine.name).missing(recipe),
    ]


def placement_of(recipe: Recipe, *, member: bool = False, expected: Expected | None = None) -> Placement:
    """The table of the run's devices on this machine; see `place`. Raises UserError for flags of servers that
    should be numbers."""
    launched = launched_by(recipe.engine)
    return place(recipe, launched, torch.cuda.device_count(), expected=expected or Expected(), member=member)


def lacking_gpus(recipe: Recipe, member: bool = False) -> list[str]:
    """List what keeps the run's devices from this machine. member: it is to be one of a running cluster's."""
    here = torch.cuda.device_count()
    placement = placement_of(recipe, member=member)
    if not here and not recipe.cluster.gpus:
        return []  # it computes on the CPU, or `model.device` is not there, which is said by itself
    return placement.lacking(here)


def lacking_memory(recipe: Recipe, plan: MemoryPlan | None) -> list[str]:
    """List why the plan does not fit the GPUs of this machine: while it trains, and while servers sample beside what
    the trainer keeps. Nothing where a configuration or a GPU is not here."""
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    if plan is None or not sizes or not on_gpu(recipe) or recipe.cluster.trainer is not None:
        return []
    placement, launched = placement_of(recipe, member=True), launched_by(recipe.engine)
    shared = placement.shared and bool(launched.servers or launched.elsewhere)
    beside = plan.beside(launched.ranks if shared else 0)
    lines = []
    if min(sizes) < plan.device + beside:
        who = "each worker" if recipe.cluster.used else "the trainer"
        asleep = " and a server that sleeps" if shared else ""
        lines.append(
            f"{who} needs {_gigabytes(plan.device)}, and CUDA{asleep} {_gigabytes(beside)} beside it (estimated); the "
            f"smallest GPU here has {_gigabytes(min(sizes))}: lower train.micro_batch_tokens, set model.checkpointing, "
            "cluster.offload or model.lora, or use more cluster.gpus"
        )
    trained, kept = placement.devices("trainer"), plan.between_steps + PROCESS_BYTES
    for row in placement.rows:
        on_others = launched.elsewhere and shared and row.kind == "server"  # machines that are like this one
        own = sizes if on_others else [sizes[d] for d in row.devices if d in trained and d < len(sizes)]
        if row.share is not None and own and kept > (1 - row.share) * min(own):
            lines.append(
                f"{row.part} takes {row.share:g} of {_gigabytes(min(own))}, and the trainer keeps {_gigabytes(kept)} "
                "of the same GPU: set mem-fraction-static, for vLLM gpu-memory-utilization, lower in engine.args.flags"
            )
            break
    return lines


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _lacking_critic(recipe: Recipe) -> list[str]:
    path = recipe.critic.path if recipe.critic is not None else None
    return [line.replace("model.path", "critic.path", 1) for line in _error_line(lambda: resolve(path))] if path else []


def _lacking_shares(recipe: Recipe) -> list[str]:
    """List why workers could not share sequences or layers, where that can be told before they load the model."""
    cluster = recipe.cluster
    shared = cluster.sequence_parallel, cluster.tensor_parallel, cluster.expert_parallel
    if max(shared) == 1 or _error_line(lambda: resolve(recipe.model.path)):
        return []
    why = undivided(recipe.model, cluster)
    return [] if why is None else [why]


def _lacking_cluster(recipe: Recipe) -> list[str]:
    cluster = recipe.cluster
    if (trainer := cluster.trainer) is not None:
        return _error_line(lambda: load("trainers", trainer.name))
    if (address := cluster.address) is not None:
        return _error_line(lambda: reach(address))
    if cluster.nodes > 1:
        return [
            f"cluster.nodes is {cluster.nodes}, but a Ray that the run starts has only this machine: name a running "
            "cluster in cluster.address"
        ]
    try:
        from ray._private.utils import get_num_cpus
    except ImportError as error:
        return [f"a cluster needs Ray, which cannot be imported ({error}): pip install ray"]
    pooled = sum(pool.workers for pool in cluster.pools)
    needed, there = cluster.size + pooled, int(get_num_cpus())
    parts = f" ({cluster.size} for the actor, {pooled} for cluster.pools)" if pooled else ""
    if needed <= there:
        return []
    return [f"needed: one node with {needed} CPUs{parts}; there: this machine with {there} CPUs. {REMEDY}"]


def _error_line(check: Callable[[], object]) -> list[str]:
    """The message of the UserError that `check` raises."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []
