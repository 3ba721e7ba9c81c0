"""What each of four ranks does that divide layers (see test_layers.py)."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meeting import meet
from sharded_help import LORA, MIXTURES, ROUTED, SCENARIOS, SMALL, Scenario, There, learned, save_folder, state_of

from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.distributed.fsdp.build import build_policy
from agentrl.distributed.fsdp.mesh import make_context
from agentrl.errors import UserError
from agentrl.recipe.schema import Recipe

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor_parallel": 2},
    "experts": {"expert_parallel": 2},
    "both": {"tensor_parallel": 2, "expert_parallel": 4},
    "tensor, copies": {"tensor_parallel": 2, "shard": 2},
    "experts, copies": {"expert_parallel": 2, "shard": 2},
}
REFUSED: tuple[tuple[str, dict[str, int], dict[str, Any]], ...] = (
    ("sinks", {"tensor_parallel": 2}, {}),
    ("tied", {"expert_parallel": 2}, {}),
    ("mixtures", {"tensor_parallel": 4}, {}),
    ("six", {"expert_parallel": 4}, {}),
    ("glm", {"tensor_parallel": 2}, {"lora": {**LORA, "targets": ["q_proj"]}}),
    ("glm", {"expert_parallel": 2}, {"lora": LORA}),
)


def recipe_of(root: Path, folder: str, cluster: dict[str, int], model: dict[str, Any]) -> Recipe:
    sections = {**SCENARIOS["tensor"].sections, "cluster": {"workers": 4, **cluster}, "model": model}
    return Scenario(folder, sections).recipe(root)


def run_rank(rank: int, root: Path) -> None:
    meet(rank, root / "meeting", 4)
    group, before = dist.new_group(backend="gloo"), None
    found: dict[str, Any] = {"again": {}}
    for name, cluster in LAYOUTS.items():
        recipe, scenario = recipe_of(root, "mixtures", cluster, {}), SCENARIOS["tensor"]
        torch.manual_seed(0)
        roles = There(recipe, make_context(recipe.cluster, CPU))
        made = learned(recipe, roles, scenario.steps, scenario.groups())
        shards = {n: p.to_local() for n, p in roles.policy.model.named_parameters()}
        found[name] = {
            **made,
            **state_of(roles.policy.model, roles.own.optimizer),
            "bytes": sum(shard.nbytes for shard in shards.values()),
            "shapes": {n: tuple(shard.shape) for n, shard in shards.items()},
        }
        (folder := root / "saved" / name).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save_roles({"actor": roles.own}, folder, group=group).result()
        if before is not None:
            load_roles({"actor": roles.own}, root / "saved" / before, rank=rank)
            found["again"][before] = state_of(roles.policy.model, roles.own.optimizer)
        before = name
    recipe = recipe_of(root, "mixtures", {}, {})
    roles = There(recipe, make_context(recipe.cluster, CPU))
    load_roles({"actor": roles.own}, root / "saved" / before, rank=rank)
    found["again"][before] = state_of(roles.policy.model, roles.own.optimizer)
    found["refused"] = refused(root)
    torch.save(found, root / f"rank{rank}.pt")
    dist.destroy_process_group()


def refused(root: Path) -> list[str]:
    """What the ranks are told of layers that cannot be divided."""
    if dist.get_rank() == 0:
        config, kind, _ = MIXTURES["mixtures"]
        save_folder(kind(config(**{**SMALL, **ROUTED, "num_experts": 6})), root / "six")
    dist.barrier()
    said = []
    for folder, cluster, model in REFUSED:
        recipe = recipe_of(root, folder, cluster, model)
        try:
            build_policy(recipe, make_context(recipe.cluster, CPU))
        except UserError as error:
            said.append(str(error))
    return said
