"""Single questions to two ranks, each answered on both (see sharded_help.py)."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_help import LORA, SCENARIOS, There, batches, state_of, whole
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import UserError
from agentrl.models import lora
from agentrl.recipe.schema import ClusterSection, LoraSection
from agentrl.training.forward import _probe
from agentrl.training.learner import Learner
from agentrl.training.optimizer import Optimizer
from agentrl.training.sharded.build import build_policy
from agentrl.training.sharded.mesh import Place, find_place

CPU = torch.device("cpu")
BETAS = (0.9, 0.95)


def place_of(**changes: Any) -> Place:
    return find_place(ClusterSection.model_validate({"workers": 2, **changes}), CPU)


def names_of_shards(root: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of what this rank holds, after a pass in which it held more."""
    policy = build_policy(SCENARIOS["untied"].recipe(root), place_of())
    with torch.no_grad():
        policy.forward(_probe(60), 1.0)
    return {name: tuple(p.to_local().shape) for name, p in policy.model.named_parameters()}


def refused(root: Path) -> list[str]:
    """What the ranks are told of recipes that do not work."""
    said = []
    for folder, cluster in (("nowhere", {}), ("sliding", {"sequence_parallel": 2}), ("tied", {"shard": 3})):
        recipe = SCENARIOS["tied"].recipe(root)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(root / folder)})})
        try:
            build_policy(recipe, place_of(**cluster))
        except UserError as error:
            said.append(str(error))
    return said


def not_finite(root: Path) -> dict[str, Any]:
    """One rank's gradient is nan."""
    policy = build_policy(SCENARIOS["tied"].recipe(root), place_of())
    optimizer = Optimizer(policy.model.named_parameters(), BETAS, 0.1, 1.0)
    before = state_of(policy.model, optimizer)["weights"]
    loss = policy.forward(_probe(60), 1.0)[0].sum()
    (loss * (float("nan") if dist.get_rank() else 1.0)).backward()
    norm = optimizer.step(1e-2)
    return {"norm": norm, "before": before, "after": state_of(policy.model, optimizer)["weights"]}


def resumed(root: Path) -> dict[str, Any]:
    """A step after two others, made twice: the second time by a new optimizer with the state of the first."""
    recipe = SCENARIOS["narrow"].recipe(root)
    roles = There(recipe, place_of())
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
    model = build_policy(recipe, place_of()).model
    return {
        "adapter": {name: whole(tensor) for name, tensor in lora.adapter_state(model).items()},
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "line": lora.describe(model),
    }


def memory(root: Path) -> dict[str, float]:
    """MB: of the model, and how much more this rank held at most while it was built."""
    if dist.get_rank() == 0:
        config = Qwen3Config(
            vocab_size=1000, hidden_size=512, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=4, head_dim=128,
        )  # fmt: skip
        (root / "large").mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (root / "large" / file).write_bytes((root / "tied" / file).read_bytes())
        Qwen3ForCausalLM(config).save_pretrained(root / "large")
    gc.collect()
    dist.barrier()
    recipe = SCENARIOS["tied"].recipe(root)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(root / "large")})})
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    model = build_policy(recipe, place_of()).model
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    return {"model": size, "held": _status("VmHWM") - before}


def _status(key: str) -> float:
    line = next(s for s in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if s.startswith(key))
    return float(line.split()[1]) / 2**10


QUESTIONS = (names_of_shards, refused, not_finite, resumed, started_adapter, memory)
