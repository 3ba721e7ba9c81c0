"""Single questions to two ranks, each answered on both (see sharded_help.py)."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_help import LORA, ROW, SCENARIOS, SMALL, There, batches, save_folder, state_of, whole
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from agentrl.compute import liger
from agentrl.distributed.fsdp import role
from agentrl.distributed.fsdp.build import build_critic, build_policy
from agentrl.distributed.fsdp.mesh import ParallelContext, make_context
from agentrl.errors import UserError
from agentrl.learner.learner import Learner
from agentrl.learner.optimizer import Optimizer
from agentrl.models import lora
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.model import LoraSection

CPU = torch.device("cpu")
BETAS = (0.9, 0.95)


def context_of(**changes: Any) -> ParallelContext:
    return make_context(ClusterSection(workers=2).changed(**changes), CPU)


def recipe_at(folder: Path) -> Recipe:
    recipe = SCENARIOS["tied"].recipe(folder.parent)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})


def names_of_shards(root: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of what this rank holds, after a pass in which it held more."""
    policy = build_policy(SCENARIOS["untied"].recipe(root), context_of())
    with torch.no_grad():
        policy.forward(ROW, 1.0)
    return {name: tuple(p.to_local().shape) for name, p in policy.model.named_parameters()}


def bytes_of_parts(root: Path) -> dict[str, tuple[int, int]]:
    """Bytes of the experts and of all else that this rank holds, by how layers are divided."""
    found = {}
    for key in ("tensor_parallel", "expert_parallel"):
        policy = build_policy(recipe_at(root / "mixtures"), context_of(**{key: 2}))
        held = {name: p.to_local().nbytes for name, p in policy.model.named_parameters()}
        experts = sum(size for name, size in held.items() if ".experts." in name)
        found[key] = (experts, sum(held.values()) - experts)
    return found


def refused(root: Path) -> list[str]:
    """What the ranks are told of recipes that do not work."""
    said = []
    for folder, cluster in (("nowhere", {}), ("sliding", {"sequence_parallel": 2}), ("tied", {"shard": 3})):
        try:
            build_policy(recipe_at(root / folder), context_of(**cluster))
        except UserError as error:
            said.append(str(error))
    return said


def not_finite(root: Path) -> dict[str, Any]:
    """One rank's gradient is nan."""
    policy = build_policy(SCENARIOS["tied"].recipe(root), context_of())
    optimizer = Optimizer(policy.model.named_parameters(), BETAS, 0.1, 1.0)
    before = state_of(policy.model, optimizer)["weights"]
    loss = policy.forward(ROW, 1.0)[0].sum()
    (loss * (float("nan") if dist.get_rank() else 1.0)).backward()
    norm = optimizer.step(1e-2)
    return {"norm": norm, "before": before, "after": state_of(policy.model, optimizer)["weights"]}


def resumed(root: Path) -> dict[str, Any]:
    """A step after two others, made twice: the second time by a new optimizer with the state of the first."""
    recipe = SCENARIOS["narrow"].recipe(root)
    roles = There(recipe, context_of())
    learner, groups = Learner(recipe, roles), list(batches())[:3]
    for batch in groups[:2]:
        learner.learn(batch)
    model, first = roles.policy.model, roles.own.optimizer
    state = {name: tensor.clone() for name, tensor in first.named_state().items()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner.learn(groups[2])
    wanted = state_of(model, first)
    _restore(dict(model.named_parameters()), weights)
    roles.own.optimizer = Optimizer(model.named_parameters(), BETAS, 0.1, 1.0)
    roles.own.optimizer.load_named_state(state)
    learner.steps -= 1
    roles.actor.calls -= 1
    learner.learn(groups[2])
    return {"found": state_of(model, roles.own.optimizer), "wanted": wanted}


@torch.no_grad()
def _restore(parameters: dict[str, Any], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def started_adapter(root: Path) -> dict[str, Any]:
    """An adapter that goes on from a folder, which rank 0 alone reads; and what the ranks gather of it."""
    recipe = SCENARIOS["adapter"].recipe(root)
    section = LoraSection.model_validate({**LORA, "start": str(root / "adapter")})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": section})})
    model = build_policy(recipe, context_of()).model
    return {
        "adapter": {name: whole(tensor) for name, tensor in lora.adapter_state(model).items()},
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "line": lora.describe(model),
    }


def memory(root: Path) -> dict[str, float]:
    """MB: of the model, and how much more this rank held at most until it had its weights."""
    if dist.get_rank() == 0:
        config = Qwen3Config(
            vocab_size=1000, hidden_size=512, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=4, head_dim=128,
        )  # fmt: skip
        save_folder(Qwen3ForCausalLM(config), root / "large")
    gc.collect()
    dist.barrier()
    recipe = recipe_at(root / "large")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, most = _status("VmRSS"), []
    chosen = role.choose
    role.choose = lambda *args: most.append(_status("VmHWM")) or chosen(*args)  # type: ignore[func-returns-value]
    model = build_policy(recipe, context_of()).model
    role.choose = chosen
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    return {"model": size, "held": most[0] - before}


def _status(key: str) -> float:
    line = next(s for s in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if s.startswith(key))
    return float(line.split()[1]) / 2**10


def read_whole(root: Path) -> dict[str, Any]:
    """A model whose files hold each expert by itself, which its modules do not."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
        save_folder(Qwen3MoeForCausalLM(config), root / "experts")
    dist.barrier()
    policy = build_policy(recipe_at(root / "experts"), context_of())
    return {"weights": {n: whole(p) for n, p in policy.model.named_parameters()}, "said": policy.description}


def misfit(root: Path) -> dict[str, Any]:
    """A model whose second layer will not attend as it is told to, when the first has done so."""
    usual = Qwen3Attention.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if self.layer_idx == 1 and self.config._attn_implementation == "agentrl_prefix_trees":
            raise ValueError("not this way")
        return usual(self, *args, **options)

    Qwen3Attention.forward = forward  # type: ignore[method-assign]
    try:
        recipe, context = SCENARIOS["critic"].recipe(root), context_of()
        policy, critic = build_policy(recipe, context), build_critic(recipe, context)
        logprobs = policy.forward(ROW, 1.0)[0]
        logprobs.sum().backward()
        gradients = {n: whole(p.grad) for n, p in policy.model.named_parameters() if p.grad is not None}
        said = (policy.description, critic.description)
        return {"logprobs": logprobs.detach(), "gradients": gradients, "said": said}
    finally:
        Qwen3Attention.forward = usual  # type: ignore[method-assign]


def kernels(root: Path) -> dict[str, Any]:
    """A stand-in of liger-kernel that this machine's devices pass for, which multiplies a norm: what is said, and how
    often it was put in. It fits everywhere, on one rank alone, and everywhere but computes something else."""
    usual, found = (liger.fits, liger.apply_kernels), {}
    for name, fits, factor in (("fits", True, 1.0), ("here alone", dist.get_rank() == 0, 1.0), ("differs", True, 1.5)):
        put: list[Any] = []
        liger.fits = lambda model, device, fits=fits: fits  # type: ignore[misc, assignment]
        liger.apply_kernels = lambda model, factor=factor, put=put: put.append(_scale(model, factor))  # type: ignore[misc]
        try:
            recipe, context = SCENARIOS["critic"].recipe(root), context_of()
            said = [build(recipe, context).description for build in (build_policy, build_critic)]
        except UserError as error:
            said = [str(error)]
        found[name] = (said, len(put))
    liger.fits, liger.apply_kernels = usual
    return found


def _scale(model: Any, factor: float) -> None:
    norm = getattr(model, "model", model).norm
    plain = norm.forward
    norm.forward = lambda states: plain(states) * factor


QUESTIONS = (
    names_of_shards, bytes_of_parts, refused, not_finite, resumed, started_adapter, memory, read_whole, misfit, kernels,
)  # fmt: skip
