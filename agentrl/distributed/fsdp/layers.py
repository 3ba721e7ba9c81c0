"""Divide the matrices and the experts of each layer among ranks, by the plans that transformers declares for a model.

`base_model_tp_plan` says of each linear layer whether its outputs or its inputs are divided; `base_model_ep_plan` which
tensors hold experts. Whole experts are divided, also where only `cluster.tensor_parallel` is set: every part of a
tensor is then one block of it, which checkpoints and weights to servers need no further knowledge of. What no plan
names (norms, routers, embeddings, output layer) is computed whole by every rank.

https://huggingface.co/docs/transformers/perf_infer_gpu_multi
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import PreTrainedModel

from agentrl.distributed.fsdp.mesh import LayerMeshes
from agentrl.errors import UserError

LINEAR = ("colwise", "rowwise")
SHARED = "replicated_with_grad_allreduce"
EXPERTS = ("grouped_gemm", "ep_dispatch_experts")


def divide_layers(model: PreTrainedModel, meshes: LayerMeshes) -> list[nn.Module]:
    """Divide the layers of `model`, on the meta device, in place; return the modules that hold divided experts.

    Raises UserError: the model has no plan, or one with parts that are not supported; sizes that do not divide; layers
    that have adapters.
    """
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        raise UserError("cluster: to divide layers, workers need transformers 5.23 or later") from None
    base, config = model.base_model, model.config
    kind = config.model_type
    experts = _expert_plan(base, kind)
    if meshes.expert > meshes.tensor and not experts:
        raise UserError(f"cluster.expert_parallel: {kind} has no experts that can be divided; leave it at 1")
    if meshes.tensor > 1:
        _divide_matrices(base, kind, meshes)
    if not experts:
        return []
    key = "expert_parallel" if meshes.expert > meshes.tensor else "tensor_parallel"
    parameters = dict(base.named_parameters())
    for name in experts:
        if name in parameters and (count := parameters[name].shape[0]) % meshes.expert:
            raise UserError(f"cluster.{key}: {meshes.expert} workers cannot share {count} experts evenly")
    apply_expert_parallelism(base, meshes.experts["expert"], meshes.dense["tensor"], experts)
    for name in (name for name, style in experts.items() if style == "ep_dispatch_experts"):
        if not any(known.rpartition(".")[0] == name for known in experts):
            raise UserError(
                f"cluster.{key} does not go with an adapter on {name}: name other layers in model.lora.targets"
            )
    divided = [base.get_submodule(name) for name, style in experts.items() if style == "ep_dispatch_experts"]
    for module in divided:
        _own_outputs(module)
    return divided


def _expert_plan(base: nn.Module, kind: str) -> dict[str, str]:
    """The tensors and modules of experts, and how they are divided; empty: there are none."""
    plan = dict(_named(base, getattr(base.config, "base_model_ep_plan", None) or {}))
    if odd := sorted({style for style in plan.values() if style not in EXPERTS}):
        raise UserError(f"cluster.expert_parallel: the plan of {kind} has {', '.join(odd)}, which is not supported")
    return plan


def _divide_matrices(base: nn.Module, kind: str, meshes: LayerMeshes) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    declared = getattr(base.config, "base_model_tp_plan", None) or {}
    plan = {name: style for name, style in _named(base, declared) if ".experts" not in name}
    if not any(style in LINEAR for style in plan.values()):
        raise UserError(
            f"cluster.tensor_parallel: transformers declares no plan for the layers of {kind}; leave it at 1"
        )
    if odd := sorted({style for style in plan.values() if style not in (*LINEAR, SHARED)}):
        raise UserError(f"cluster.tensor_parallel: the plan of {kind} has {', '.join(odd)}, which is not supported")
    _check_sizes(base, plan, meshes.tensor)
    plan |= dict.fromkeys(_beside(base, plan, kind), SHARED)
    mesh = meshes.dense["tensor"]
    for name, style in plan.items():
        if style == SHARED:
            _sum_gradients(base.get_submodule(name), mesh)
    linear = {name: style for name, style in plan.items() if style != SHARED}
    names = [f"{name}.{key}" for name in linear for key, _ in base.get_submodule(name).named_parameters(recurse=False)]
    apply_tensor_parallelism(base, mesh, linear | {name: linear[name.rpartition(".")[0]] for name in names})


def _beside(base: nn.Module, plan: dict[str, str], kind: str) -> list[str]:
    """The norms of queries and keys that a plan forgets (that of GLM-4.5): ranks call them with their own heads.

    Raises UserError for other weights beside the divided ones, of which nothing is known."""
    found = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style in LINEAR):
        module = base.get_submodule(parent)
        own = [key for key, _ in module.named_parameters(recurse=False)]
        rest = [key for key, child in module.named_children() if next(child.parameters(), None) is not None]
        rest = [key for key in rest if f"{parent}.{key}" not in plan]
        if odd := [*own, *(key for key in rest if key not in ("q_norm", "k_norm"))]:
            raise UserError(
                f"cluster.tensor_parallel: the plan of {kind} says nothing of {parent}.{odd[0]}; leave it at 1"
            )
        found += [f"{parent}.{key}" for key in rest]
    return found


def _check_sizes(base: nn.Module, plan: dict[str, str], ranks: int) -> None:
    config = base.config.get_text_config()  # type: ignore[union-attr, operator]
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None) or 0) % ranks:
            what = key.removeprefix("num_").replace("_", " ")
            raise UserError(f"cluster.tensor_parallel: {ranks} workers cannot share {heads} {what} evenly")
    for name, style in plan.items():
        if style == SHARED:
            continue
        if not isinstance(linear := base.get_submodule(name), nn.Linear):
            raise UserError(f"cluster.tensor_parallel does not go with an adapter on {name}; leave it at 1")
        size = linear.out_features if style == "colwise" else linear.in_features
        if size % ranks:
            raise UserError(f"cluster.tensor_parallel: {ranks} workers cannot share the {size} units of {name} evenly")


def _named(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The modules and parameters that a plan's patterns match, in the plan's order, with their styles."""
    names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
    for pattern, style in plan.items():
        known = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        yield from ((name, style) for name in names if known.fullmatch(name))


def _sum_gradients(module: nn.Module, mesh: Any) -> None:
    """Let a module that every rank has, and calls with a part of the heads, have the gradients of all of them."""
    plain: Callable[..., Any] = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        own = dict(module.named_parameters(recurse=False))
        summed: dict[str, Tensor] = {
            name: DTensor.from_local(parameter, mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
            for name, parameter in own.items()
        }
        module._parameters.update(summed)  # type: ignore[arg-type]
        try:
            return plain(*args, **options)
        finally:
            module._parameters.update(own)

    module.forward = forward


def _own_outputs(module: nn.Module) -> None:
    """Let a module return no views: FSDP2 hooks onto its output, and a view may lose the hook."""
    plain: Callable[..., Tensor] = module.forward

    def forward(*args: Any, **options: Any) -> Tensor:
        found = plain(*args, **options)
        return found.clone() if found._is_view() else found

    module.forward = forward
