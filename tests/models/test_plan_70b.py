"""The numbers of docs/plan_70b.md are those of the functions that `agentrl check` and the trainer use."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.compute.flops import Cost, Workload, known_peak
from agentrl.models.load import resolve_types
from agentrl.models.memory import MemoryPlan, Setting, Traffic, plan
from agentrl.models.shape import Shape
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection
from agentrl.weights.channel import gloo_seconds

PAGE = (ROOT / "docs" / "plan_70b.md").read_text(encoding="utf-8")
QWEN = Qwen2Config(
    vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
GIGA, TERA = 1e9, 1e12
NODES, A_NODE = 8, 8
GPUS = NODES * A_NODE
GROUPS, SAMPLES, PROMPT, MEAN, LONGEST = 128, 8, 1024, 4096, 8192  # tokens; all but the prompt are the trajectory's own
SAMPLED, LONGEST_SAMPLED = 2560, 7168  # of the mean and the longest
GPU_BYTES, CONTEXT_BYTES = 85.0, 5.0  # of an H100; of CUDA, NCCL and two processes on it, GB
NODE_NET, ONE_NET = 0.8 * 400.0, 0.8 * 50.0  # GB/s of eight network cards of 400 Gb/s, and of one
NVLINK = 450.0  # GB/s that leave a GPU
MEMORY_SPEED = 0.7 * 3.35 * TERA  # bytes/s that decoding reads, a GPU
REACHED = 0.45  # of the peak, what is computed again included
ALL_REDUCE = 20e-6  # seconds; two a layer


@cache
def into_node(received: int, workers: int, nodes: int) -> float:
    """The bytes that each of `nodes` machines receives over the network when each of `workers` workers receives
    `received` bytes: workers of one machine share what one of them has received."""
    whole = received * workers / (workers - 1)
    return whole * (1 - 1 / nodes)


@cache
def shape(lora: bool = False) -> Shape:
    return Shape.of(QWEN, LoraSection() if lora else None)


@cache
def cost() -> Cost:
    with torch.device("meta"):
        return Cost.of(AutoModelForCausalLM.from_config(QWEN))


def setting(**changes: Any) -> Setting:
    own = {"size": 4, "compute": 2, "shard": GPUS, "tokens": 8192, "checkpointing": True, "rows": 1024}
    return Setting(**{**own, **changes})


@cache
def planned(lora: bool = False, **changes: Any) -> MemoryPlan:
    return plan(shape(lora), setting(**changes), ("actor", "reference"))


def need() -> Workload:
    own = MEAN - PROMPT
    pairs = PROMPT * (PROMPT + 1) // 2 + SAMPLES * (own * PROMPT + own * (own + 1) // 2)
    return Workload(GROUPS * (PROMPT + SAMPLES * own), GROUPS * SAMPLES * SAMPLED, GROUPS * pairs)


def train_seconds(gpus: int) -> float:
    """Old and reference log-probs, the update, and the layers that it computes again."""
    peak = known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert peak is not None
    work = cost().update(need()) + 3 * cost().forward(need())
    return work / (REACHED * peak * gpus)


def decode_seconds(conversations: float, servers_gpus: int = A_NODE) -> tuple[float, float, float]:
    """Of one token of each: reading the weights, reading keys and values at the mean length, all-reduces."""
    speed = MEMORY_SPEED * servers_gpus
    context = PROMPT + (MEAN - PROMPT) / 2
    cache = planned().cache_token
    return shape().parameters * 2 / speed, conversations * context * cache / speed, 2 * shape().layers * ALL_REDUCE


def memory_rows() -> list[str]:
    here, away, copies = planned(), planned(offload=True), planned(shard=32)
    parts = {
        "weights": "weights (float32)", "gradients": "gradients (float32)", "optimizer": "optimizer (8 bytes each)",
        "reference": "reference (bfloat16)", "gathered": "layers gathered, and the root",
        "activations": "activations, layers computed again",
        "logits": "logits of 1024 predictions, gradient of their layer",
    }  # fmt: skip
    rows = []
    for name, label in parts.items():
        on_cpu = name in ("weights", "gradients", "optimizer", "reference")
        cells = [f"{getattr(p, name) / GIGA:.1f}" for p in (here, away, copies)]
        cells[1] += " (CPU)" if on_cpu else ""
        rows.append(row(label, *cells))
    rows.append(row("**most on the GPU**", *(f"**{p.device / GIGA:.1f}**" for p in (here, away, copies))))
    rows.append(row("on the CPU, a node", *(f"{A_NODE * p.host / GIGA:.0f}" for p in (here, away, copies))))
    return rows


def serving_rows() -> list[str]:
    weights = 2 * shape().parameters / A_NODE / GIGA
    token = planned().cache_token / A_NODE
    rows = [row("weights, tensor parallel over 8", f"{weights:.1f}")]
    kept = planned().kept / GIGA
    for label, beside in (("shared with the trainer", kept), ("alone", 0.0)):
        room = GPU_BYTES - CONTEXT_BYTES - weights - beside
        rows.append(row(f"left for keys and values, {label}", f"{room:.1f}"))
        rows.append(row(f"tokens that a server holds, {label}", f"{room * GIGA / token / 1e6:.2f} million"))
    return [*rows, row("keys and values a token", f"{token / 1e3:.1f} KB")]


def traffic_rows() -> list[str]:
    moved = Traffic.of(shape(), setting())
    passes = {
        "weights, a pass without gradients": moved.forward,
        "weights, a pass with gradients": moved.update,
        "gradients (float32), a pass with gradients": moved.gradients,
    }
    rows = []
    for label, received in passes.items():
        entering = into_node(received, GPUS, NODES)
        rows.append(row(label, f"{received / GIGA:.0f}", f"{entering / GIGA:.0f}", f"{entering / GIGA / NODE_NET:.2f}"))
    stored, whole = 4 * shape().parameters, 2 * shape().parameters / GIGA
    gathered = f"{stored * (GPUS - 1) / GPUS / GIGA:.0f}", f"{stored_into_node(stored) / GIGA:.0f}"
    by_gloo = gloo_seconds(2 * shape().parameters, 3 * A_NODE)
    return [
        *rows,
        row("weights gathered for servers", *gathered, f"{shared_seconds():.2f}"),
        row("weights to servers apart, NCCL", f"{whole:.0f}", f"{whole:.0f}", f"{whole / ONE_NET:.2f}"),
        row("weights to servers apart, gloo", f"{whole:.0f}", "-", f"{by_gloo:.0f}"),
    ]


def stored_into_node(size: int) -> float:
    return size * (1 - 1 / NODES)


def shared_seconds() -> float:
    """Of an update of servers that share GPUs: float32 weights are gathered over the network, and then read by all
    ranks of a node from one GPU, each its part."""
    return stored_into_node(4 * shape().parameters) / GIGA / NODE_NET + 2 * shape().parameters / GIGA / NVLINK


def besides_rows() -> list[str]:
    """What is saved a micro-batch, in seconds of the network, and what it takes of a GPU."""
    layers = 2 * (shape().parameters - shape().root)
    second = layers * (GPUS - 1) // GPUS  # received by the backward pass
    moved, gradients = Traffic.of(shape(), setting()), 4 * shape().parameters
    half = gradients / (GPUS // 2)  # a GPU's shard where there are two copies: the other one's is in another node

    def seconds(entering: float) -> str:
        return f"{entering / GIGA / NODE_NET:.2f}"

    again, averaged = into_node(second, GPUS, NODES), into_node(moved.gradients, GPUS, NODES)
    return [
        row("layers stay whole until their backward pass", seconds(again), f"{second / GIGA:.0f}"),
        row("layers stay sharded over a node until then", seconds(again), f"{layers / A_NODE / GIGA:.1f}"),
        row("gradients averaged once an update", seconds(averaged), f"{gradients / GIGA:.0f}"),
        row("two copies, averaged between them once an update", seconds(A_NODE * half), f"{half / GIGA:.1f}"),
        row("one more layer fetched ahead", "0", f"{2 * shape().layer / GIGA:.1f}"),
    ]


def work_rows() -> list[str]:
    update, forward = (f(need()) / 1e18 for f in (cost().update, cost().forward))
    moved = Traffic.of(shape(), setting())
    a_pass = (into_node(moved.update + moved.gradients, GPUS, NODES)) / GIGA / NODE_NET
    tokens = setting().tokens
    computing = train_seconds(GPUS) * (update + forward) / (update + 3 * forward) * tokens * GPUS / need().tokens
    return [
        row("packed tokens a step", f"{need().tokens / 1e6:.2f} million"),
        row("update, 10^18 FLOP", f"{update:.2f}"),
        row("a pass without gradients, 10^18 FLOP", f"{forward:.2f}"),
        row("training on 64 GPUs, seconds", f"{train_seconds(GPUS):.0f}"),
        row("a micro-batch with gradients: computing, seconds", f"{computing:.1f}"),
        row("a micro-batch with gradients: moving, seconds", f"{a_pass:.1f}"),
    ]


def sampling_rows() -> list[str]:
    rows = []
    for servers in (8, 3):
        reading, cached, reducing = decode_seconds(GROUPS * SAMPLES / servers)
        step = reading + cached + reducing
        longest = LONGEST_SAMPLED * (reading + reducing)
        numbers = (f"{part * 1e3:.1f}" for part in (reading, cached, reducing, step))
        rows.append(row(f"{servers} servers", *numbers, f"{SAMPLED * step:.0f}", f"{longest:.0f}"))
    return rows


def choice_rows() -> list[str]:
    """Sampling takes its longest conversation, and tools as much again as a quarter of it."""
    rows = []
    for label, gpus, servers, overlapped in (("shared", 64, 8, False), ("5 + 3 nodes, one_step", 40, 3, True)):
        reading, cached, reducing = decode_seconds(GROUPS * SAMPLES / servers)
        sampling = 1.25 * max(LONGEST_SAMPLED * (reading + reducing), SAMPLED * (reading + cached + reducing))
        training = train_seconds(gpus)
        moving = 2 * shape().parameters / GIGA / ONE_NET if overlapped else shared_seconds()
        whole = max(sampling, training) + moving if overlapped else sampling + training + moving
        rows.append(row(label, f"{sampling:.0f}", f"{training:.0f}", f"{moving:.0f}", f"{whole:.0f}"))
    return rows


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = (memory_rows, serving_rows, traffic_rows, besides_rows, work_rows, sampling_rows, choice_rows)


@pytest.mark.slow
@pytest.mark.parametrize("rows", TABLES)
def test_the_tables_say_what_the_functions_compute(rows: Any) -> None:
    missing = [line for line in rows() if line not in PAGE.splitlines()]
    assert not missing, "docs/plan_70b.md lacks:\n" + "\n".join(missing)


@pytest.mark.slow
def test_the_text_says_them_too() -> None:
    parameters, less = shape().parameters, planned(lora=True, size=2)
    checkpoint = (4 + 8) * parameters / TERA
    node = Traffic.of(shape(), setting(shard=A_NODE))
    assert node.update < Traffic.of(shape(), setting()).update
    for said in (
        f"{parameters / 1e9:.1f} billion parameters",
        f"{shape().layer / 1e6:.0f} million in each of {shape().layers} layers",
        f"{shape().root / 1e9:.2f} billion outside",
        f"{planned(shard=A_NODE).device / GIGA:.0f} GB with `cluster.shard: 8`",
        f"{planned(tokens=16384).device / GIGA:.0f} GB with 16384 tokens",
        f"{checkpoint:.2f} TB",
        f"{2 * shape().vocabulary * shape().hidden / GIGA:.1f} GB of memory on the first node, its largest tensor",
        f"The files, {2 * parameters / GIGA:.0f} GB, are read twice",
        f"`model.lora` with `dtype: bfloat16` leaves {less.device / GIGA:.0f} GB",
    ):
        assert said in " ".join(PAGE.split()), said


def recipes() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


def test_the_recipe_of_the_page_is_the_plan(tmp_path: Path) -> None:
    whole, apart = recipes()
    (tmp_path / "plan.yaml").write_text(whole)
    (tmp_path / "apart.yaml").write_text("extends: plan.yaml\n" + apart)
    shared, split = (load_recipe(tmp_path / name) for name in ("plan.yaml", "apart.yaml"))
    assert as_planned(shared, GPUS, 8)
    assert as_planned(split, 40, 3)
    assert Setting.of(resolve_types(shared), shared.cluster.size) == setting()
    assert shared.engine.sleep
    assert (split.engine.sleep, split.rollout.overlap) == (False, "one_step")


def as_planned(recipe: Recipe, gpus: int, servers: int) -> bool:
    rollout = recipe.rollout
    return (
        recipe.cluster.size == gpus
        and (recipe.engine.args["servers"], recipe.engine.args["remote_nodes"]) == (servers, servers)
        and recipe.engine.args["flags"]["tp-size"] == A_NODE
        and (rollout.tasks, rollout.n, rollout.max_tokens) == (GROUPS, SAMPLES, LONGEST)
        and recipe.train.mini_batches > 1  # so that old log-probs are computed
        and recipe.algorithm.kl_coef > 0
        and recipe.engine.max_batch >= GROUPS * SAMPLES / servers
    )
