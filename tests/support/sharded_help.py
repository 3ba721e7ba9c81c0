"""Two processes over gloo that train as the workers of a cluster do, without Ray; and the same work in one process."""

import ctypes
import faulthandler
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learner_help import make_groups
from meeting import meet
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vision_help import groups as seeing_groups
from vision_help import save_seeing, seeing_model

from agentrl.compute.batch import Batch
from agentrl.compute.forward import _probe
from agentrl.compute.micro_batches import TorchProcessGroup
from agentrl.distributed.fsdp.build import build_critic, build_policy, build_reference
from agentrl.distributed.fsdp.mesh import ParallelContext
from agentrl.learner.actor import Actor
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.reference import Reference, WithoutAdapter
from agentrl.learner.roles import LocalRoles
from agentrl.models import embedded_path
from agentrl.models.load import load_model
from agentrl.models.routing import UNKNOWN
from agentrl.recipe.schema import Recipe
from agentrl.trajectory import Group, Trajectory
from agentrl.weights.source import ModelWeights

STEPS = 4
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
SMALL: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2,
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False, "attention_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "tie_word_embeddings": False},
}
"""67 ids, and a bias: dimensions that two ranks cannot share evenly."""

MIXTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtures": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"num_experts": 4}),
    "glm": (
        Glm4MoeConfig, Glm4MoeForCausalLM,
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
         "attention_bias": True, "use_qk_norm": True},
    ),
    "sinks": (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 4, "intermediate_size": 16, "sliding_window": 6}),
}  # fmt: skip
"""Models of experts: configuration, class, and what is special of each."""
ROUTED: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_key_value_heads": 2}

KL = {"kl_coef": 0.1}
KL_IN_REWARD = {**KL, "kl_in": "reward", "advantage": "rloo"}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}


@dataclass(frozen=True)
class Scenario:
    """One training. sections: of the recipe. alone: what differs when one process does it. forks: samples of a group
    have more in common than their prompt. sees: there are pictures. routes: the experts that an engine chose."""

    folder: str = "tied"
    sections: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    alone: dict[str, Any] = field(default_factory=dict)
    forks: bool = False
    sees: bool = False
    routes: bool = False

    def groups(self) -> Iterator[list[Group]]:
        if self.routes:
            return map(routed, batches(self.forks))
        if not self.sees:
            return batches(self.forks)
        model = seeing_model()[0]
        return (seeing_groups(model, seed) for seed in range(STEPS))

    def recipe(self, root: Path, alone: bool = False) -> Recipe:
        sections: dict[str, Any] = {
            "rollout": {"n": 4, "tasks": 4},
            "train": {"lr": 1e-3, "steps": STEPS, "micro_batch_tokens": 96, "weight_decay": 0.1},
            "cluster": {"workers": 2},
        }
        for changes in (self.sections, self.alone if alone else {}):
            for name, section in changes.items():
                sections[name] = {**sections.get(name, {}), **section}
        if alone:
            del sections["cluster"]
        sections["model"] = {"path": str(root / self.folder), "device": "cpu", **sections.get("model", {})}
        return Recipe.model_validate(sections)


GAE = {"name": "gae", "args": {"lam": 0.95}}
SCENARIOS = {
    "tied": Scenario(),
    "untied": Scenario("untied", {"algorithm": KL, "train": {"mini_batches": 2}}),
    "adapter": Scenario("untied", {"algorithm": KL_IN_REWARD, "model": {"lora": LORA}}),
    "critic": Scenario(
        sections={"algorithm": {"advantage": GAE}, "critic": {"lr": 1e-3, "warmup_steps": 2}},
    ),
    "copies": Scenario(sections={"cluster": {"shard": 1}}),
    "offload": Scenario(sections={"cluster": {"offload": True}, "algorithm": KL}),
    "checkpointing": Scenario(
        "untied", {"model": {"checkpointing": True, "lora": LORA}}, alone={"model": {"checkpointing": False}}
    ),
    "window": Scenario("sliding", {"algorithm": {"entropy_coef": 0.01}}),
    "sequences": Scenario(
        "untied",
        {"cluster": {"sequence_parallel": 2}, "algorithm": {"advantage": GAE}, "critic": {"lr": 1e-3}},
    ),
    "forks": Scenario("untied", {"algorithm": KL, "train": {"mini_batches": 2}}, forks=True),
    "narrow": Scenario("untied", {"model": {"dtype": "bfloat16"}, "algorithm": KL}),
    "narrow adapter": Scenario("tied", {"model": {"dtype": "bfloat16", "lora": LORA}}),
    "mixed": Scenario(
        "untied",
        {"model": {"compute": "bfloat16"}, "algorithm": {"off_policy": "none"}},
        alone={"model": {"compute": "same"}},
    ),
    "mixed adapter": Scenario(
        "untied",
        {"model": {"compute": "bfloat16", "lora": LORA}, "algorithm": {**KL, "off_policy": "none"}},
        alone={"model": {"compute": "same"}},
    ),
}
SCENARIOS |= {
    "tensor": Scenario("mixtures", {"cluster": {"tensor_parallel": 2}, "algorithm": KL}, 3),
    "tensor, critic": Scenario(
        "glm", {"cluster": {"tensor_parallel": 2}, "algorithm": {"advantage": GAE}, "critic": {"lr": 1e-3}}, 3
    ),
    "experts": Scenario(
        "mixtures", {"cluster": {"expert_parallel": 2}, "algorithm": KL, "model": {"checkpointing": True}}, 3,
        alone={"model": {"checkpointing": False}}, forks=True,
    ),
    "experts, adapter": Scenario(
        "glm", {"cluster": {"expert_parallel": 2}, "model": {"lora": {**LORA, "targets": ["q_proj", "o_proj"]}}}, 3
    ),
    "experts, routes": Scenario(
        "mixtures", {"cluster": {"expert_parallel": 2}, "algorithm": {"routing_replay": True}}, 3, routes=True
    ),
    "experts, sinks": Scenario("sinks", {"cluster": {"expert_parallel": 2}}, 3),
}  # fmt: skip
SCENARIOS |= {
    f"seeing, {name}": Scenario("seeing", sections, 3, alone, sees=True)
    for name, sections, alone in (
        (
            "critic",
            {
                "algorithm": {**KL, "advantage": GAE},
                "critic": {"lr": 1e-3},
                "train": {"mini_batches": 2},
            },
            {},
        ),
        (
            "adapter",
            {"model": {"lora": {**LORA, "targets": ["all-linear", "vision"]}, "checkpointing": True}, "algorithm": KL},
            {"model": {"checkpointing": False}},
        ),
        (
            "sequences",
            {
                "model": {"freeze": ["vision"]},
                "cluster": {"sequence_parallel": 2},
                "algorithm": {"advantage": GAE},
                "critic": {"lr": 1e-3},
            },
            {},
        ),
    )
}


ROW = _probe(60)


def make_folders(root: Path) -> None:
    for name, changes in FOLDERS.items():
        torch.manual_seed(0)
        save_folder(Qwen3ForCausalLM(Qwen3Config(**SMALL, **changes)), root / name)
    for name, (config, kind, changes) in MIXTURES.items():
        torch.manual_seed(0)
        save_folder(kind(config(**{**SMALL, **ROUTED, **changes})), root / name)
    save_seeing(root / "seeing")


def save_folder(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_path() / file, folder)


def batches(forks: bool = False) -> Iterator[list[Group]]:
    """Of a run's steps: groups of uneven sizes and lengths; some have nothing to learn from. forks: see Scenario."""
    for step in range(STEPS):
        rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0], [0.0] * 6 + [1.0]]
        groups = make_groups(rewards[step % 3 :] if step % 4 else [[1.0, 0.0]], seed=step)
        for before, sample in (pair for group in groups for pair in pairwise(group.trajectories)) if forks else ():
            common = 3 * min(len(before.ids), len(sample.ids)) // 4
            sample.ids[:common] = before.ids[:common]
        yield groups


def routed(groups: list[Group]) -> list[Group]:
    """Groups with the choices of an engine's routers, the same where samples have the same tokens; some are not
    known."""

    def chosen(before: list[int]) -> np.ndarray:
        rng = np.random.default_rng(before)
        experts = np.argsort(rng.random((SMALL["num_hidden_layers"], 4)), axis=-1)[:, :2]
        return np.where(rng.random((len(experts), 1)) < 0.2, UNKNOWN, experts)

    def told(sample: Trajectory) -> Trajectory:
        ids = sample.ids.tolist()
        return replace(sample, experts=np.array([chosen(ids[: n + 1]) for n in range(len(ids))], np.int16))

    return [replace(group, trajectories=tuple(map(told, group.trajectories))) for group in groups]


class Dealt:
    """A role as the learner on a controller sees it: called with a whole batch, of which each rank takes its part.

    Every third call everything goes to the first rank."""

    def __init__(self, role: Any, context: ParallelContext, sharing: int) -> None:
        self.role, self.context, self.sharing, self.calls = role, context, sharing, 0
        self.trained = getattr(role, "trained", 0)

    def logprobs(self, batch: Batch) -> Any:
        return self._split(self.role.logprobs, batch)

    def values(self, batch: Batch) -> Any:
        return self._split(self.role.values, batch)

    def update(self, batch: Batch, rate: float) -> Any:
        return self._split(self.role.update, batch, rate)

    def _split(self, method: Any, batch: Batch, *options: Any) -> Any:
        self.calls += 1
        parts, mine = self.context.size // self.sharing, self.context.rank // self.sharing
        lopsided = self.calls % 3 == 0
        partition = batch.distribute(1 if lopsided else parts)
        own = partition.parts[mine] if mine < len(partition.parts) else batch.select([])
        found: list[Any] = [None] * self.context.size
        dist.all_gather_object(found, method(own, *options))
        return partition.join(found[:: self.sharing][: len(partition.parts)])


class There:
    """The roles of this rank."""

    def __init__(self, recipe: Recipe, context: ParallelContext) -> None:
        ranks = TorchProcessGroup(device=context.device, tensor=recipe.cluster.tensor_parallel)
        sharing = recipe.cluster.sharing
        self.policy = build_policy(recipe, context)
        self.own = Actor(self.policy.model, recipe, self.policy.forward, ranks, self.policy.description)
        self.actor = Dealt(self.own, context, sharing)
        self.reference = self.critic = None
        self.teachers: dict[int, Any] = {}
        self.pools: dict[str, str] = {}
        if recipe.algorithm.kl_coef:
            forward: Any = WithoutAdapter(self.policy.model, self.policy.forward)
            if recipe.model.lora is None:
                forward = build_reference(recipe, context).forward
            self.reference = Dealt(Reference(recipe, forward, ranks), context, sharing)
        if recipe.critic is not None:
            made = build_critic(recipe, context)
            self.critic = Dealt(Critic(recipe, made.forward, ranks, made.description), context, sharing)


def train_here(recipe: Recipe, steps: int, groups: Iterator[list[Group]]) -> dict[str, Any]:
    torch.manual_seed(0)
    place = LocalRoles(recipe, load_model(recipe.model)[0])
    return {**learned(recipe, place, steps, groups), **state_of(place.model, place.actor.optimizer)}


def train_there(recipe: Recipe, context: ParallelContext, steps: int, groups: Iterator[list[Group]]) -> dict[str, Any]:
    torch.manual_seed(0)
    roles = There(recipe, context)
    found = {**learned(recipe, roles, steps, groups), **state_of(roles.policy.model, roles.own.optimizer)}
    return {**found, "description": roles.policy.description}


def learned(recipe: Recipe, place: Any, steps: int, groups: Iterator[list[Group]]) -> dict[str, Any]:
    learner = Learner(recipe, place)
    return {"metrics": [learner.learn(step) for step in islice(groups, steps)]}


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole weights, an adapter merged, and what the optimizer keeps."""
    return {"weights": dict(ModelWeights(model)), "state": {k: whole(v) for k, v in optimizer.named_state().items()}}


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference between tensors of the same names."""
    assert found.keys() == wanted.keys()
    return max(float((found[name].detach().float() - wanted[name].detach().float()).abs().max()) for name in wanted)


def curve(result: dict[str, Any], *names: str) -> np.ndarray:
    """Metrics of each step [names, steps]: of itself the loss of a single update hardly depends on the weights."""
    return np.array(
        [[m.get(name, 0.0) for m in result["metrics"]] for name in names or ("train/loss", "train/entropy")]
    )


def run_rank(rank: int, root: Path) -> None:
    """One of the two processes: every scenario, then the single questions of `sharded_questions`."""
    from sharded_questions import QUESTIONS

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 100_000)  # so that what is freed does not count as held
    meet(rank, root / "meeting")
    faulthandler.enable(os.open(root / f"crash{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # until the process ends
    from agentrl.distributed.fsdp.mesh import make_context

    cpu, found = torch.device("cpu"), {}
    for name, scenario in SCENARIOS.items():
        recipe = scenario.recipe(root)
        found[name] = train_there(recipe, make_context(recipe.cluster, cpu), scenario.steps, scenario.groups())
    for question in QUESTIONS:
        found[question.__name__] = question(root)
    torch.save(found, root / f"rank{rank}.pt")
    dist.destroy_process_group()
