"""What a recipe wants of this machine and lacks, in lines: `agentrl check` lists them, no run begins with one."""

from typing import Any

from agentrl.cluster.session import reach
from agentrl.engine.base import engine_class
from agentrl.errors import UserError
from agentrl.models.load import find_device, resolve
from agentrl.plugins.registry import check_engine
from agentrl.recipe.schema import Recipe

REMEDY = "Lower cluster.workers (or cluster.nodes, cluster.gpus), or add machines to the cluster"


def lacking(recipe: Recipe) -> list[str]:
    """Looks at paths, devices, Ray's address and the engine's programs. Loads nothing. Raises UserError for arguments
    that the engine does not take."""
    check_engine(recipe.engine)
    computes_here = not recipe.cluster.used or recipe.engine.name == "local"
    return [
        *(_said(lambda: find_device(recipe.model.device)) if computes_here else []),
        *_said(lambda: resolve(recipe.model.path)),
        *_critic(recipe),
        *(_cluster(recipe) if recipe.cluster.used else []),
        *lacking_gpus(recipe),
        *engine_class(recipe.engine.name).missing(recipe.engine.args),
    ]


def lacking_gpus(recipe: Recipe, everywhere: bool = False) -> list[str]:
    """Of the workers and of the servers that are launched here. everywhere: also where a Ray cluster that runs already
    is to have those of the workers: what this machine lacks to be one of it."""
    import torch

    cluster, here = recipe.cluster, torch.cuda.device_count()
    try:
        served = engine_class(recipe.engine.name).gpus(recipe.engine.args)
    except ValueError as error:
        raise UserError(f"engine.args.flags: a number of devices is none: {error}") from error
    if not cluster.gpus:  # without a GPU servers run on the CPU, as the trainer does
        return [f"needs {served} GPUs on this machine (all of the engine), {here} here"] if 0 < here < served else []
    if cluster.address is not None and not everywhere:
        return []
    trains = cluster.gpus + sum(pool.workers for pool in cluster.pools)
    needed = max(trains, served) if recipe.engine.sleep else trains + served
    share = "which share them" if recipe.engine.sleep else "each has its own"
    parts = f"{trains} of the trainer, {served} of the engine, {share}" if served else "all of the trainer"
    return [f"needs {needed} GPUs on this machine ({parts}), {here} here"] if here < needed else []


def _critic(recipe: Recipe) -> list[str]:
    path = recipe.critic.path if recipe.critic is not None else None
    return [line.replace("model.path", "critic.path", 1) for line in _said(lambda: resolve(path))] if path else []


def _cluster(recipe: Recipe) -> list[str]:
    cluster = recipe.cluster
    if (address := cluster.address) is not None:
        return _said(lambda: reach(address))
    if cluster.nodes > 1:
        return [
            f"cluster.nodes is {cluster.nodes}, and a Ray that the run starts has this machine alone: name a cluster "
            "that runs already in cluster.address"
        ]
    try:
        from ray._private.utils import get_num_cpus
    except ImportError as error:
        return [f"a cluster needs Ray, which cannot be imported ({error}): pip install ray"]
    apart = sum(pool.workers for pool in cluster.pools)
    needed, there = cluster.size + apart, int(get_num_cpus())
    parts = f" ({cluster.size} for the actor, {apart} for cluster.pools)" if apart else ""
    if needed <= there:
        return []
    return [f"needed: one node with {needed} CPUs{parts}; there: this machine with {there} CPUs. {REMEDY}"]


def _said(look: Any) -> list[str]:
    """The line of what `look` refuses."""
    try:
        look()
    except UserError as error:
        return [str(error)]
    return []
